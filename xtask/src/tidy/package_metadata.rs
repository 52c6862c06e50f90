//! A published crate has the metadata that the registry and docs.rs show.

use anyhow::Result;
use cargo_metadata::Package;

use super::Problem;
use crate::commands::doc::docs_rs;
use crate::workspace::is_published;

/// The maximum number of keywords that the registry accepts.
const MOST_KEYWORDS: usize = 5;

/// Checks the manifest of a published crate.
pub fn check(package: &Package) -> Result<Vec<Problem>> {
    if !is_published(package) {
        return Ok(Vec::new());
    }
    let manifest = package.manifest_path.as_std_path();
    let text = std::fs::read_to_string(manifest)?;
    let mut messages = metadata_problems(package, &text);
    messages.extend(docs_rs(package).err().map(|error| error.to_string()));
    Ok(messages.into_iter().map(|message| Problem::of(manifest, message)).collect())
}

fn metadata_problems(package: &Package, manifest: &str) -> Vec<String> {
    let keywords = package.keywords.len();
    let rules = [
        (package.description.is_some(), "lacks a description"),
        (package.license.is_some(), "lacks a license"),
        (package.readme.is_some(), "lacks a readme"),
        (package.rust_version.is_some(), "lacks a rust-version"),
        (!package.categories.is_empty(), "lacks categories"),
        ((1..=MOST_KEYWORDS).contains(&keywords), "needs one to five keywords"),
        (lists_files(manifest), "lacks `include`, so that its package would hold its tests"),
    ];
    let broken = rules.into_iter().filter(|(holds, _)| !holds);
    let broken = broken.map(|(_, message)| message.to_owned());
    broken.chain(without_version(package)).collect()
}

/// Whether the manifest lists the files of its package.
fn lists_files(manifest: &str) -> bool {
    let table = manifest.lines().skip_while(|line| line.trim() != "[package]").skip(1);
    table
        .take_while(|line| !line.starts_with('['))
        .any(|line| line.starts_with("include.workspace") || line.starts_with("include ="))
}

/// Returns dependencies on members that a registry could not resolve. Cargo removes those of tests.
fn without_version(package: &Package) -> impl Iterator<Item = String> {
    let needed = package.dependencies.iter().filter(|dependency| {
        dependency.kind != cargo_metadata::DependencyKind::Development
            && dependency.path.is_some()
            && dependency.req.comparators.is_empty()
    });
    needed.map(|dependency| format!("depends on `{}` without a version", dependency.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    #[test]
    fn an_include_is_found_in_its_table_alone() {
        assert!(lists_files("[package]\nname = \"a\"\ninclude.workspace = true\n[lints]\n"));
        assert!(lists_files("[package]\ninclude = [\"/src\"]\n"));
        assert!(!lists_files("[package]\nname = \"a\"\n[x]\ninclude = []\n"));
    }

    #[test]
    fn a_bare_manifest_is_refused_for_each_rule() {
        let workspace = Workspace::load().unwrap();
        let mut package = workspace.member("terrane-wire").unwrap().clone();
        let manifest = "[package]\ninclude.workspace = true\n";
        assert!(metadata_problems(&package, manifest).is_empty());
        for dependency in &mut package.dependencies {
            dependency.req = cargo_metadata::semver::VersionReq::STAR;
        }
        package.description = None;
        package.license = None;
        package.readme = None;
        package.rust_version = None;
        package.categories.clear();
        package.keywords = vec!["k".into(); 6];
        let found = metadata_problems(&package, "[package]\n");
        assert_eq!(found.len(), 9, "{found:?}");
        assert!(found[7].contains("`terrane-core` without a version"), "{found:?}");
        package.keywords.clear();
        assert!(metadata_problems(&package, manifest).iter().any(|line| line.contains("keywords")));
    }
}
