//! Files of a crate that import each other in a cycle cannot be read one after the other.
//!
//! Each import is followed to the file that defines the name. A cycle is a group of files that all
//! reach each other.

mod graph;
mod modules;
mod resolve;

use std::path::PathBuf;

use anyhow::{Context, Result};
use cargo_metadata::{Package, Target};

use super::Problem;
use crate::workspace::crate_folder;
use modules::Modules;

/// The maximum number of files in a cycle: a type, its parts and their error.
const MOST_FILES: usize = 3;

/// Finds the cycles of a crate with too many files.
pub fn check(package: &Package) -> Result<Vec<Problem>> {
    let path = package.manifest_path.as_std_path();
    let problem = |cycle: Vec<String>| {
        let message = format!(
            "{} files import each other, at most {MOST_FILES} may; move what they share to a file \
             below them: {}",
            cycle.len(),
            cycle.join(", ")
        );
        Problem::of(path, message)
    };
    Ok(find(package)?.into_iter().map(problem).collect())
}

/// Returns the files of each such cycle of the library, as paths within the sources. Programs are
/// omitted, because their files share the parsed command line of the main file.
fn find(package: &Package) -> Result<Vec<Vec<String>>> {
    let mut found = Vec::new();
    let is_library = |target: &&Target| target.is_lib() || target.is_cdylib();
    for target in package.targets.iter().filter(is_library) {
        found.extend(cycles(&Modules::read(target.src_path.as_std_path())?)?);
    }
    let folder = crate_folder(package).join("src");
    let relative =
        |file: &PathBuf| file.strip_prefix(&folder).unwrap_or(file).display().to_string();
    Ok(found.iter().map(|cycle| cycle.iter().map(relative).collect()).collect())
}

fn cycles(modules: &Modules) -> Result<Vec<Vec<PathBuf>>> {
    let cycles = graph::cycles(modules.files.len(), &modules.edges());
    let large = cycles.into_iter().filter(|cycle| cycle.len() > MOST_FILES);
    let named = large.map(|cycle| {
        let files = cycle.into_iter().map(|file| modules.files.get(file).cloned());
        files.collect::<Option<_>>().context("a cycle has a file that was not read")
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns the edges of a crate with these files, by their names.
    fn crate_of(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let modules = Modules::read(&folder.path().join("lib.rs")).unwrap();
        let name = |file: usize| {
            modules.files[file].strip_prefix(folder.path()).unwrap().display().to_string()
        };
        modules.edges().into_iter().map(|(from, to)| (name(from), name(to))).collect()
    }

    fn has(edges: &[(String, String)], from: &str, to: &str) -> bool {
        edges.contains(&(from.into(), to.into()))
    }

    #[test]
    fn re_exports_lead_to_the_definition() {
        let edges = crate_of(&[
            ("lib.rs", "mod a; pub mod b; pub use a::A;"),
            ("a.rs", "use crate::{b::c::C as D, b::B}; pub struct A(D, B);"),
            ("b/mod.rs", "pub(crate) mod c; mod d; pub use c::*; pub use d::{B, make};"),
            ("b/c.rs", "pub struct C; pub fn c() { use std::mem; super::make::<u8>(); }"),
            (
                "b/d.rs",
                "pub use crate::A as B; #[cfg(test)] mod tests { use super::super::c::C; }
                        pub fn make<T>() { assert!(matches!(crate::b::C, super::C)) }",
            ),
        ]);
        // `a.rs` itself defines `B`, so that import is not an edge.
        assert!(has(&edges, "a.rs", "b/c.rs"), "{edges:?}");
        assert!(has(&edges, "b/c.rs", "b/d.rs") && has(&edges, "b/d.rs", "b/c.rs"), "{edges:?}");
        assert_eq!(edges.len(), 3, "{edges:?}");
    }

    #[test]
    fn a_used_item_of_a_module_is_an_edge() {
        let edges = crate_of(&[
            ("lib.rs", "mod a; mod b; mod c; pub use b::b; fn f() { a::a() }"),
            ("a.rs", "use super::{b, c}; pub fn a() { b::b(c::inner::C) }"),
            ("b.rs", "use super::*; pub fn b<T>(_: T) {}"),
            ("c.rs", "pub mod inner { pub struct C; impl C { fn up() { super::super::f() } } }"),
        ]);
        let expected = [
            ("a.rs", "b.rs"),
            ("a.rs", "c.rs"),
            ("b.rs", "lib.rs"),
            ("c.rs", "lib.rs"),
            ("lib.rs", "a.rs"),
        ];
        assert!(expected.iter().all(|(from, to)| has(&edges, from, to)), "{edges:?}");
        assert_eq!(edges.len(), expected.len(), "{edges:?}");
    }

    #[test]
    fn names_that_import_themselves_end() {
        let edges = crate_of(&[
            ("lib.rs", "mod a; use serde::serde; pub use a::a as b; pub use b as a2;"),
            ("a.rs", "pub use crate::b as a; use super::gone::Gone; fn f() { serde::x() }"),
        ]);
        assert!(edges.is_empty(), "{edges:?}");
    }
}
