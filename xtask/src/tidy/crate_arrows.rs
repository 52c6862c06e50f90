//! Crates depend only on crates of lower levels. Crates on one level do not depend on each other.

use cargo_metadata::{DependencyKind, Package};

use super::Problem;
use crate::workspace::{Workspace, is_published};

/// The level of a crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// A library crate. It may depend only on crates of lower levels.
    Library(u8),
    /// A tool of the project. It may depend on any crate, and no library crate depends on it.
    Tool,
}

/// All crates, as in `docs/architecture.md`.
const LEVELS: [(&str, Level); 21] = [
    ("terrane-core", Level::Library(0)),
    ("terrane-layout", Level::Library(1)),
    ("terrane-storage", Level::Library(1)),
    ("terrane-pool", Level::Library(1)),
    ("terrane-transfer", Level::Library(2)),
    ("terrane-store", Level::Library(3)),
    ("terrane-wire", Level::Library(2)),
    ("terrane-plan", Level::Library(2)),
    ("terrane-cuda", Level::Library(3)),
    ("terrane-nixl", Level::Library(3)),
    ("terrane-interop", Level::Library(4)),
    ("terrane-arrow", Level::Library(5)),
    ("terrane", Level::Library(6)),
    ("terrane-cli", Level::Library(7)),
    ("terrane-interop-proof", Level::Tool),
    ("terrane-python", Level::Tool),
    ("terrane-testkit", Level::Tool),
    ("terrane-bench", Level::Tool),
    ("terrane-simulated-cuda", Level::Tool),
    ("terrane-tests", Level::Tool),
    ("xtask", Level::Tool),
];

/// Checks one crate's normal and build dependencies on other members of the workspace.
pub fn check(package: &Package, workspace: &Workspace) -> Vec<Problem> {
    let members: Vec<&str> =
        workspace.members().into_iter().map(|member| member.name.as_str()).collect();
    let dependencies: Vec<&str> = package
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind != DependencyKind::Development)
        .map(|dependency| dependency.name.as_str())
        .filter(|name| members.contains(name))
        .collect();
    let arrows = forbidden_arrows(&package.name, &dependencies);
    arrows
        .into_iter()
        .chain(publishing_problem(package, is_published(package)))
        .map(|message| Problem::of(package.manifest_path.as_std_path(), message))
        .collect()
}

fn level_of(name: &str) -> Option<Level> {
    LEVELS.iter().find(|(known, _)| *known == name).map(|(_, level)| *level)
}

/// Returns the forbidden ones of `dependencies`, which are all members of the workspace.
fn forbidden_arrows(name: &str, dependencies: &[&str]) -> Vec<String> {
    let Some(level) = level_of(name) else {
        return vec![format!(
            "`{name}` has no level; give it one in xtask/src/tidy/crate_arrows.rs and in \
             docs/architecture.md"
        )];
    };
    let Level::Library(own) = level else {
        return Vec::new();
    };
    let forbidden = dependencies.iter().filter_map(|dependency| match level_of(dependency) {
        Some(Level::Library(other)) if other < own => None,
        Some(Level::Library(other)) => Some(format!(
            "`{name}` (level {own}) depends on `{dependency}` (level {other}): arrows point only \
             downwards"
        )),
        Some(Level::Tool) => Some(format!(
            "`{name}` is a library crate and depends on `{dependency}`, which is not published; \
             only a dev-dependency may"
        )),
        None => Some(format!("`{name}` depends on `{dependency}`, which has no level")),
    });
    forbidden.collect()
}

/// Finds a tool that may be published, and a library crate that may not.
fn publishing_problem(package: &Package, published: bool) -> Option<String> {
    match (level_of(&package.name)?, published) {
        (Level::Tool, true) => {
            Some(String::from("lacks `publish = false`: it is no library crate"))
        }
        (Level::Library(_), false) => {
            Some(String::from("is a library crate, but its manifest says `publish = false`"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downward_arrows_pass() {
        assert!(
            forbidden_arrows("terrane-transfer", &["terrane-core", "terrane-layout"]).is_empty()
        );
        assert!(forbidden_arrows("terrane-arrow", &["terrane-interop", "terrane-cuda"]).is_empty());
        assert!(forbidden_arrows("terrane", &["terrane-arrow", "terrane-interop"]).is_empty());
        assert!(forbidden_arrows("terrane-testkit", &["terrane-transfer", "terrane"]).is_empty());
    }

    #[test]
    fn upward_and_sideways_arrows_are_found() {
        for (name, dependency) in [
            ("terrane-core", "terrane-layout"),
            ("terrane-layout", "terrane-storage"),
            ("terrane-cuda", "terrane-nixl"),
            ("terrane-interop", "terrane-arrow"),
            ("terrane-arrow", "terrane"),
        ] {
            let found = forbidden_arrows(name, &[dependency]);
            assert_eq!(found.len(), 1, "{name} -> {dependency}");
            assert!(found[0].contains("downwards"), "{}", found[0]);
        }
    }

    #[test]
    fn no_library_sees_a_tool() {
        let found = forbidden_arrows("terrane-core", &["terrane-testkit"]);
        assert!(found[0].contains("dev-dependency"), "{}", found[0]);
    }

    #[test]
    fn an_unknown_crate_needs_a_level() {
        assert!(forbidden_arrows("terrane-new", &[])[0].contains("no level"));
    }
}
