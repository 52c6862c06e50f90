//! Loads the machine's libnl separately from the copy in NIXL's wheels.
//!
//! NIXL's wheels contain libnl under a different file name. UCX's module for EFA, and verbs
//! providers, load the machine's verbs and so the machine's libnl, after the wheel's. The loader
//! then binds calls in the machine's libnl to the wheel's functions, unless it was linked with
//! `-Bsymbolic-functions`: Ubuntu's is, Debian's is not. The machine's `libnl-route-3` therefore
//! adds its traffic classes to the wrong list. At process exit it removes classes that its own list
//! does not have, which crashes.
//!
//! A library that is loaded alone resolves its own functions first. So this module loads the
//! machine's libnl before UCX loads anything.

use std::path::{Path, PathBuf};

use terrane_core::{Capability, CapabilityReport, CapabilityStatus, Reason, Requirement};

use super::loader;

/// The machine's library, by the name that verbs libraries depend on.
const MACHINE_LIBRARY: &str = "libnl-route-3.so.200";

/// The prefix of the wheel's file name.
const BUNDLED: &str = "libnl-route-3-";

/// A function of both copies, which runs when they are loaded.
const FUNCTION: &str = "rtnl_tc_register";

/// The requirement for separating the two copies.
const NEEDS_SEPARATE_LIBNL: &str =
    "a program that does not link or preload libnl-route-3, or a NIXL that uses the machine's";

/// Keeps the machine's libnl separate from that of the NIXL at `library`, for the process's
/// lifetime. Reports whether they are separate.
pub(super) fn load_separately(library: &Path) -> CapabilityReport {
    let mut report = CapabilityReport::default();
    // The program's own libraries precede all others in symbol lookup, including the wheel's.
    let programs = loader::address_in_program(FUNCTION).and_then(loader::file_at);
    let status = match (programs, bundled_with(library)) {
        (Some(programs), Some(bundled)) if !is_same(&programs, &bundled) => {
            CapabilityStatus::Refused(Reason::Needs(NEEDS_SEPARATE_LIBNL))
        }
        (Some(_), _) => CapabilityStatus::Granted,
        (None, _) => {
            // If either copy is missing, there is nothing to separate.
            let _: Option<_> = loader::load_permanently(Path::new(MACHINE_LIBRARY)).ok();
            CapabilityStatus::Granted
        }
    };
    report.record(Capability::SeparateRdmaLibraries, Requirement::Preferred, status);
    report
}

/// A wheel's libnl, in the folder `NAME.libs` beside the library's folder.
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
