//! What `cargo metadata` knows about this workspace.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, MetadataCommand, Package};

/// The workspace that this program was built from.
pub struct Workspace {
    metadata: Metadata,
}

impl Workspace {
    /// Asks cargo about the workspace; touches neither the network nor the lock file.
    pub fn load() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("the xtask crate lies directly under the workspace's root")?;
        let metadata = MetadataCommand::new()
            .manifest_path(root.join("Cargo.toml"))
            .no_deps()
            .exec()
            .context("`cargo metadata` failed; does the root Cargo.toml parse?")?;
        Ok(Self { metadata })
    }

    /// The folder that holds the root `Cargo.toml`.
    pub fn root(&self) -> &Path {
        self.metadata.workspace_root.as_std_path()
    }

    /// Where cargo builds (`CARGO_TARGET_DIR`, if it is set).
    pub fn target(&self) -> &Path {
        self.metadata.target_directory.as_std_path()
    }

    /// All crates of the workspace, in the order of their names.
    pub fn members(&self) -> Vec<&Package> {
        let mut members = self.metadata.workspace_packages();
        members.sort_by(|left, right| left.name.cmp(&right.name));
        members
    }

    /// The crates that users get: all that may be published.
    pub fn libraries(&self) -> Vec<&Package> {
        let mut members = self.members();
        members.retain(|package| is_published(package));
        members
    }

    /// The member called `name`, if there is one.
    pub fn member(&self, name: &str) -> Option<&Package> {
        self.members().into_iter().find(|package| package.name == name)
    }
}

/// Whether the manifest lets the crate be published.
pub fn is_published(package: &Package) -> bool {
    package.publish.as_ref().is_none_or(|registries| !registries.is_empty())
}

/// The folder that holds the crate's manifest.
pub fn crate_folder(package: &Package) -> PathBuf {
    let mut folder = package.manifest_path.clone().into_std_path_buf();
    folder.pop();
    folder
}
