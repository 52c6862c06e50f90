//! Libraries that are loaded and never unloaded.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::SharedCause;

/// Loads a NIXL library as NIXL's bindings do, and never unloads it. NIXL is linked with Abseil,
/// whose thread-local data does not survive an unload.
pub(super) fn load_permanently(library: &Path) -> Result<ManuallyDrop<Library>, SharedCause> {
    // SAFETY: loading runs the initialisers of NIXL, or of a plugin in NIXL's plugin directory, and
    // of the libraries that they need. These libraries may be loaded into any process.
    let loaded = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) };
    loaded.map(ManuallyDrop::new).map_err(|error| Arc::new(error) as SharedCause)
}

/// The address of a function of this name in the program, or in a library that was loaded at its
/// start.
pub(super) fn address_in_program(function: &str) -> Option<usize> {
    let program = Library::this();
    // SAFETY: the symbol is only looked up; the code does not access its address.
    let found = unsafe { program.get::<*const c_void>(function.as_bytes()) };
    found.ok().map(|symbol| symbol.as_raw_ptr().addr())
}

/// Whether a library is loaded whose file name has this prefix.
pub(super) fn is_loaded(prefix: &str) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    is_in(&maps, prefix)
}

fn is_in(maps: &str, prefix: &str) -> bool {
    let name = |line: &str| line.rsplit_once('/').is_some_and(|(_, name)| name.starts_with(prefix));
    maps.lines().any(name)
}

/// The file that is mapped at an address.
pub(super) fn file_at(address: usize) -> Option<PathBuf> {
    file_in(&std::fs::read_to_string("/proc/self/maps").ok()?, address)
}

/// Like [`file_at`], in a list of mappings: `7f0000000000-7f0000001000 r-xp 00000000 fe:00 42
/// /path`.
fn file_in(maps: &str, address: usize) -> Option<PathBuf> {
    let holds = |line: &&str| {
        let range = line.split(' ').next()?.split_once('-')?;
        let [from, to] = [range.0, range.1].map(|text| usize::from_str_radix(text, 16).ok());
        (from?..to?).contains(&address).then_some(())
    };
    let line = maps.lines().find(|line| holds(line).is_some())?;
    // The path is the rest of the line, including spaces.
    let path = line.find('/').and_then(|at| line.get(at..))?;
    Some(PathBuf::from(path.strip_suffix(" (deleted)").unwrap_or(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_an_address_is_found_in_the_mappings() {
        let maps = "\
1000-2000 r--p 00000000 00:00 0\x20
2000-3000 r-xp 00001000 fe:00 42                       /opt/my libs/libnixl_capi.so
3000-4000 r-xp 00001000 fe:00 43                       /opt/libold.so (deleted)
7ffc-7ffd rw-p 00000000 00:00 0                        [stack]";
        let file = |address| file_in(maps, address);
        assert_eq!(file(0x2000), Some("/opt/my libs/libnixl_capi.so".into()));
        assert_eq!(file(0x2fff), Some("/opt/my libs/libnixl_capi.so".into()));
        assert_eq!(file(0x3000), Some("/opt/libold.so".into()));
        assert_eq!([0x1800, 0x7ffc, 0x9000].map(file), [None, None, None]);
        assert!(is_in(maps, "libnixl_") && is_in(maps, "libold.so"));
        assert!(!is_in(maps, "my libs") && !is_in(maps, "libucs"));
    }
}
