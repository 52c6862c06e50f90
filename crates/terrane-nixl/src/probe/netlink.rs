//! The machine's libnl, loaded apart from the one that comes with NIXL.
//!
//! Wheels of NIXL bring libnl under a file name of their own. UCX's module for EFA, and providers of
//! verbs, load the machine's verbs and so the machine's libnl, after the wheel's. The loader then
//! binds calls of the machine's libnl to the wheel's functions, unless it was linked with
//! `-Bsymbolic-functions`: Ubuntu's is, Debian's is not. The machine's `libnl-route-3` thus fails to
//! enter its traffic classes in the wheel's list, and as the process exits it removes what it never
//! entered, which crashes.
//!
//! A library that is loaded by itself finds its own functions first. So the machine's libnl is loaded
//! here, before UCX loads anything.

use std::path::{Path, PathBuf};

use terrane_core::{Capability, CapabilityReport, Grant, Reason, Wish};

use super::loader;

/// The machine's library, by the name by which verbs need it.
const MACHINES: &str = "libnl-route-3.so.200";

/// How the name of the wheel's begins.
const BUNDLED: &str = "libnl-route-3-";

/// A function of both, which is called as they are loaded.
const FUNCTION: &str = "rtnl_tc_register";

/// Why two copies cannot be kept apart.
const APART: &str =
    "a program that does not link or preload libnl-route-3, or a NIXL that uses the machine's";

/// Keeps the machine's libnl and that of the NIXL at `library` apart, for as long as the process
/// lives, and says whether they are.
pub(super) fn keep_apart(library: &Path) -> CapabilityReport {
    let mut report = CapabilityReport::default();
    // The program's own libraries come first for every other one, the wheel's included.
    let programs = loader::address_in_program(FUNCTION).and_then(loader::file_at);
    let grant = match (programs, bundled_with(library)) {
        (Some(programs), Some(bundled)) if !is_same(&programs, &bundled) => {
            Grant::Refused(Reason::Needs(APART))
        }
        (Some(_), _) => Grant::Granted,
        (None, _) => {
            // Where there is none, there is nothing to keep apart.
            let _: Option<_> = loader::for_good(Path::new(MACHINES)).ok();
            Grant::Granted
        }
    };
    report.record(Capability::SeparateRdmaLibraries, Wish::Preferred, grant);
    report
}

/// The libnl of a wheel, in the folder `NAME.libs` beside the one with the library.
fn bundled_with(library: &Path) -> Option<PathBuf> {
    let entries = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let begins =
        |name: &std::ffi::OsStr| name.to_str().is_some_and(|name| name.starts_with(BUNDLED));
    entries(library.parent()?.parent()?)
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "libs"))
        .flat_map(|folder| entries(&folder.path()))
        .find_map(|entry| begins(&entry.file_name()).then(|| entry.path()))
}

fn is_same(one: &Path, other: &Path) -> bool {
    let resolved = |path: &Path| std::fs::canonicalize(path).ok();
    resolved(one).is_some_and(|one| Some(one) == resolved(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libnl_of_a_wheel_is_found_beside_its_library() {
        let packages = tempfile::tempdir().unwrap();
        let library = packages.path().join("own/libnixl_capi.so");
        assert_eq!(bundled_with(&library), None);
        for folder in ["nixl_cu12.libs", "numpy.libs", "own"] {
            std::fs::create_dir(packages.path().join(folder)).unwrap();
        }
        assert_eq!(bundled_with(&library), None);
        let bundled = packages.path().join("nixl_cu12.libs/libnl-route-3-0123.so.200.26.0");
        std::fs::write(&bundled, "").unwrap();
        assert_eq!(bundled_with(&library), Some(bundled));
    }
}
