//! Finds NIXL's version from the files around the library.

use std::path::Path;

/// The version of the package that contains the library at this path.
pub(super) fn of_package(library: &Path) -> Option<String> {
    let directory = library.parent()?;
    of_pkg_config(directory).or_else(|| of_wheel(directory.parent()?))
}

/// `nixl.pc` beside the library has a line `Version: 1.5.1`.
fn of_pkg_config(directory: &Path) -> Option<String> {
    let text = std::fs::read_to_string(directory.join("pkgconfig/nixl.pc")).ok()?;
    let version = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
    (!version.is_empty()).then(|| version.to_owned())
}

/// A wheel's packages are beside a directory `nixl_cu12-1.5.1.dist-info`.
fn of_wheel(packages: &Path) -> Option<String> {
    let entries = std::fs::read_dir(packages).ok()?;
    entries.filter_map(Result::ok).find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (package, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
        let is_nixl = package == "nixl" || package.starts_with("nixl_cu");
        is_nixl.then(|| version.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_the_files_around_the_library() {
        let directory = tempfile::tempdir().unwrap();
        let library = directory.path().join("lib/libnixl_capi.so");
        assert_eq!(of_package(&library), None);
        std::fs::create_dir_all(directory.path().join("numpy-2.0.0.dist-info")).unwrap();
        std::fs::create_dir_all(directory.path().join("nixl_cu12-1.5.1.dist-info")).unwrap();
        assert_eq!(of_package(&library).as_deref(), Some("1.5.1"));
        std::fs::create_dir_all(directory.path().join("lib/pkgconfig")).unwrap();
        let file = directory.path().join("lib/pkgconfig/nixl.pc");
        std::fs::write(file, "Name: nixl\nVersion: 1.6.0\n").unwrap();
        assert_eq!(of_package(&library).as_deref(), Some("1.6.0"));
    }
}
