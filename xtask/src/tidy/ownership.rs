//! Only one crate depends on a foreign library with a boundary. Crates have few features.

use cargo_metadata::{DependencyKind, Package};

use super::Problem;
use crate::workspace::is_published;

/// External crates, and the library crate that may depend on each.
const OWNERS: [(&str, &str); 15] = [
    ("arrow-array", "terrane-arrow"),
    ("arrow-buffer", "terrane-arrow"),
    ("arrow-data", "terrane-arrow"),
    ("arrow-schema", "terrane-arrow"),
    ("async-task", "terrane-store"),
    ("crc-fast", "terrane-core"),
    ("cudarc", "terrane-cuda"),
    ("dlpack-rs", "terrane-interop"),
    ("nixl-sys", "terrane-nixl"),
    ("postcard", "terrane-wire"),
    ("pyo3", "terrane-python"),
    ("io-uring", "terrane-storage"),
    ("libc", "terrane-storage"),
    ("rustix", "terrane-store"),
    ("rustix", "terrane-cli"),
];

/// External crates that no library crate may depend on, with the reason.
const NEVER: [(&str, &str); 3] = [
    ("anyhow", "a library's errors are typed"),
    ("tokio", "Terrane's futures run on any runtime"),
    ("tracing-subscriber", "where logs go is the user's choice"),
];

/// The maximum number of features of a library crate, without `default`.
const MOST_FEATURES: usize = 3;

/// The crate that may have a feature for each library crate that it depends on.
const FACADE: &str = "terrane";

/// Checks one crate, except its dev-dependencies. Unpublished crates are exempt.
pub fn check(package: &Package) -> Vec<Problem> {
    if !is_published(package) {
        return Vec::new();
    }
    let dependencies: Vec<&str> = package
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind != DependencyKind::Development)
        .map(|dependency| dependency.name.as_str())
        .collect();
    let features: Vec<&str> = package.features.keys().map(String::as_str).collect();
    let owners = forbidden_dependencies(&package.name, &dependencies);
    owners
        .into_iter()
        .chain(too_many_features(&features, most_features(&package.name, &dependencies)))
        .map(|message| Problem::of(package.manifest_path.as_std_path(), message))
        .collect()
}

fn forbidden_dependencies(name: &str, dependencies: &[&str]) -> Vec<String> {
    let foreign = dependencies.iter().filter_map(|dependency| {
        let rows = OWNERS.iter().filter(|(external, _)| external == dependency);
        let owners: Vec<&str> = rows.map(|(_, owner)| *owner).collect();
        (!owners.is_empty() && !owners.contains(&name)).then(|| {
            let owners = owners.join("` and `");
            format!("`{name}` depends on `{dependency}`; only `{owners}` may name it")
        })
    });
    let never = NEVER.iter().filter(|(external, _)| dependencies.contains(external));
    let never = never.map(|(external, reason)| {
        format!("`{name}` is a library and depends on `{external}`; {reason}")
    });
    foreign.chain(never).collect()
}

/// Returns the maximum number of features of a crate with these dependencies.
fn most_features(name: &str, dependencies: &[&str]) -> usize {
    let lower = dependencies.iter().filter(|name| name.starts_with("terrane-"));
    if name == FACADE { lower.count() } else { MOST_FEATURES }
}

/// Finds a crate with more than `most` features.
fn too_many_features(features: &[&str], most: usize) -> Option<String> {
    let mut own: Vec<&str> = features.to_vec();
    own.retain(|feature| *feature != "default");
    (own.len() > most).then(|| {
        format!(
            "has {} features ({}), the limit is {most}; name optional dependencies as \
             `dep:…`, and merge or drop features",
            own.len(),
            own.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_may_name_what_they_own() {
        assert!(forbidden_dependencies("terrane-cuda", &["cudarc", "terrane-core"]).is_empty());
        assert!(forbidden_dependencies("terrane-storage", &["libc", "io-uring"]).is_empty());
    }

    #[test]
    fn others_may_not() {
        let found = forbidden_dependencies("terrane-transfer", &["libc", "cudarc", "smallvec"]);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("only `terrane-storage`"), "{}", found[0]);
        assert!(found[1].contains("only `terrane-cuda`"), "{}", found[1]);
    }

    #[test]
    fn no_library_names_a_runtime() {
        let found = forbidden_dependencies("terrane-transfer", &["tokio", "tracing"]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("any runtime"), "{}", found[0]);
    }

    #[test]
    fn three_features_pass_and_four_do_not() {
        assert_eq!(too_many_features(&["default", "a", "b", "c"], MOST_FEATURES), None);
        let found = too_many_features(&["a", "b", "c", "d"], MOST_FEATURES);
        assert!(found.unwrap().contains("a, b, c, d"));
    }

    #[test]
    fn the_facade_has_a_feature_for_each_lower_crate() {
        let dependencies =
            ["terrane-core", "terrane-cuda", "terrane-wire", "terrane-arrow", "libc"];
        assert_eq!(most_features(FACADE, &dependencies), 4);
        assert_eq!(most_features("terrane-arrow", &dependencies), MOST_FEATURES);
    }
}
