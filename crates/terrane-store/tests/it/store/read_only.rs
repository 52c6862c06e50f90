//! The tools on a directory that cannot be written.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use terrane_core::OsError;
use terrane_store::disk::CatalogError;
use terrane_store::{StoreError, tools};
use terrane_testkit::mounted::read_only;
use terrane_testkit::needs::or_skipped;
use terrane_testkit::process::in_child;

use super::harness::{key, keys, open, put_ok};

const BLOCK: usize = 8192;

/// A user who is not root, and owns no file.
const NOT_ROOT: libc::uid_t = 65_534;

/// The files of a folder, with their permissions.
fn files(folder: &Path) -> Vec<(PathBuf, u32)> {
    let files = fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        (path, mode)
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    files
}

/// A closed store of four blocks, one of them damaged. The files that only an owner needs are gone.
fn closed_store(directory: &Path) -> PathBuf {
    let store = open(directory, 8192, 16);
    put_ok(&store, &keys(0..4), BLOCK);
    drop(store);
    let folder = directory.join("model");
    let damaged = tools::why(directory, "model", 0, &key(2)).unwrap().1.unwrap().slot;
    let slab = folder.join("slab.0.000");
    let mut bytes = fs::read(&slab).unwrap();
    bytes[usize::try_from(damaged).unwrap() * BLOCK + 100] ^= 1;
    fs::write(&slab, bytes).unwrap();
    fs::remove_file(folder.join("lock")).unwrap();
    fs::remove_file(folder.join("owner")).unwrap();
    folder
}

/// The tools that only read work, and those that write are refused.
fn assert_readable(directory: &Path) {
    let listing = tools::list(directory, "model").unwrap();
    assert_eq!((listing.blocks.len(), listing.owner), (4, None));
    let stat = tools::stat(directory, "model").unwrap();
    assert_eq!((stat.is_open, stat.groups[0].blocks), (false, 4));
    let (_, block) = tools::why(directory, "model", 0, &key(2)).unwrap();
    let directories = [directory.to_owned()];
    let report = tools::verify(&directories, "model", None).unwrap();
    assert_eq!((report.blocks, report.damaged), (4, vec![block.unwrap()]));
    for refused in
        [tools::scrub(&directories, "model", None).map(|_| ()), tools::clear(directory, "model")]
    {
        let error = refused.unwrap_err();
        let is_right = matches!(error, StoreError::Catalog(CatalogError::NotPermitted { .. }));
        assert!(is_right, "{error}");
    }
}

#[test]
fn tools_read_a_file_system_that_is_mounted_read_only() {
    const TEST: &str = "store::read_only::tools_read_a_file_system_that_is_mounted_read_only";
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let folder = closed_store(directory.path());
        let before = files(&folder);
        let mounted = read_only(directory.path()).map_err(Into::into);
        let Some(_mounted) = or_skipped(TEST, mounted) else { return };
        assert!(fs::write(folder.join("more"), "").is_err(), "the mount can be written");
        assert_readable(directory.path());
        assert_eq!(files(&folder), before);
    });
}

/// The user that a call names is that of the whole process.
fn become_user(user: libc::uid_t) -> Result<(), OsError> {
    // SAFETY: the call takes a number.
    let result = unsafe { libc::seteuid(user) };
    if result == 0 {
        return Ok(());
    }
    Err(OsError::from_io("seteuid", &std::io::Error::last_os_error()))
}

#[test]
fn tools_read_a_directory_without_write_permission() {
    const TEST: &str = "store::read_only::tools_read_a_directory_without_write_permission";
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let folder = closed_store(path);
        let mut files_and_folders: Vec<PathBuf> =
            files(&folder).into_iter().map(|(path, _)| path).collect();
        for file in &files_and_folders {
            fs::set_permissions(file, Permissions::from_mode(0o400)).unwrap();
        }
        fs::set_permissions(&folder, Permissions::from_mode(0o500)).unwrap();
        let before = files(&folder);
        // SAFETY: the call takes nothing.
        let user = unsafe { libc::geteuid() };
        if user == 0 {
            // Root may write without permission.
            files_and_folders.extend([folder.clone(), path.to_owned()]);
            let owned = files_and_folders.iter().try_for_each(|it| chown(it, Some(NOT_ROOT), None));
            let owned = owned.map_err(Into::into);
            let became = owned.and_then(|()| become_user(NOT_ROOT).map_err(Into::into));
            let entered = became.and_then(|()| Ok(fs::metadata(&folder).map(|_| ())?));
            let Some(()) = or_skipped(TEST, entered) else { return };
        }
        assert!(fs::write(folder.join("more"), "").is_err(), "the directory can be written");
        assert_readable(path);
        assert_eq!(files(&folder), before);
        become_user(user).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
    });
}
