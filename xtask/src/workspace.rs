//! The workspace, from `cargo metadata`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, MetadataCommand, Package};

/// The workspace that this program was built from.
pub struct Workspace {
    metadata: Metadata,
}

impl Workspace {
    /// Loads the workspace from cargo, without the network and without a change of the lock file.
    pub fn load() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("the xtask crate is directly under the workspace's root")?;
        let metadata = MetadataCommand::new()
            .manifest_path(root.join("Cargo.toml"))
            .no_deps()
            .exec()
            .context("`cargo metadata` failed; does the root Cargo.toml parse?")?;
        Ok(Self { metadata })
    }

    /// Returns the folder with the root `Cargo.toml`.
    pub fn root(&self) -> &Path {
        self.metadata.workspace_root.as_std_path()
    }

    /// Returns cargo's target folder (`CARGO_TARGET_DIR`, if it is set).
    pub fn target(&self) -> &Path {
        self.metadata.target_directory.as_std_path()
    }

    /// Returns all crates of the workspace, sorted by name.
    pub fn members(&self) -> Vec<&Package> {
        let mut members = self.metadata.workspace_packages();
        members.sort_by(|left, right| left.name.cmp(&right.name));
        members
    }

    /// Returns the published crates.
    pub fn libraries(&self) -> Vec<&Package> {
        let mut members = self.members();
        members.retain(|package| is_published(package));
        members
    }

    /// Whether the crate depends on `external`, directly or through other members, with all
    /// features and the dependencies of tests.
    pub fn reaches(&self, package: &Package, external: &str) -> bool {
        let mut seen = BTreeSet::new();
        let mut left = vec![package];
        while let Some(package) = left.pop() {
            if !seen.insert(package.name.as_str()) {
                continue;
            }
            for dependency in &package.dependencies {
                if dependency.name == external {
                    return true;
                }
                left.extend(self.member(&dependency.name));
            }
        }
        false
    }

    /// Returns the member called `name`, if there is one.
    pub fn member(&self, name: &str) -> Option<&Package> {
        self.members().into_iter().find(|package| package.name == name)
    }
}

/// Whether the manifest allows publishing the crate.
pub fn is_published(package: &Package) -> bool {
    package.publish.as_ref().is_none_or(|registries| !registries.is_empty())
}

/// Returns the folder with the crate's manifest.
pub fn crate_folder(package: &Package) -> PathBuf {
    let mut folder = package.manifest_path.clone().into_std_path_buf();
    folder.pop();
    folder
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_reach_indirect_dependencies() {
        let workspace = Workspace::load().unwrap();
        let reaches = |name: &str| workspace.reaches(workspace.member(name).unwrap(), "nixl-sys");
        assert!(reaches("terrane-nixl") && reaches("terrane"));
        assert!(!reaches("terrane-core") && !reaches("xtask"));
    }

    /// `cargo build` and `cargo test` at the root work with Rust and a C linker alone.
    #[test]
    fn only_crates_that_need_libclang_are_no_default_members() {
        let workspace = Workspace::load().unwrap();
        let default = workspace.metadata.workspace_default_packages();
        for member in workspace.members() {
            let needs =
                member.dependencies.iter().any(|found| found.name == "nixl-sys" && !found.optional);
            let is_default = default.iter().any(|found| found.id == member.id);
            assert_ne!(needs, is_default, "{}", member.name);
        }
    }
}
