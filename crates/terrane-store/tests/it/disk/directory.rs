//! The catalog on a real directory: owners, permissions, namespaces, full disks.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use terrane_store::disk::{
    Catalog, CatalogError, CatalogOptions, GroupSlots, Namespace, Recovered,
};
use terrane_testkit::mounted::tmpfs;
use terrane_testkit::needs::or_skipped;
use terrane_testkit::process::{allow_seconds, in_child, in_fork};

use super::harness::{groups, hash, key_bytes, namespace, record};

fn open(directory: &Path) -> Result<(Catalog, Recovered), CatalogError> {
    Catalog::open(directory, &namespace(), &groups(), CatalogOptions::default())
}

fn put(catalog: &Catalog, key: u32) -> Result<(), CatalogError> {
    catalog.append_puts(&[record(key, key % 16, &key_bytes(key))])
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn blocks_come_back_and_removed_ones_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let (catalog, recovered) = open(directory.path()).unwrap();
    assert!(recovered.live.is_empty() && !recovered.superblock_repaired);
    (0..10).for_each(|key| put(&catalog, key).unwrap());
    catalog.append_removes(&[hash(3)]).unwrap();
    catalog.sync().unwrap();
    let before = catalog.snapshot().unwrap();
    assert_eq!((before.epoch, before.tombstones, before.journal), (1, 1, Some(1)));
    let secret = catalog.secret();
    drop(catalog);

    let (catalog, recovered) = open(directory.path()).unwrap();
    assert_eq!(catalog.secret(), secret);
    assert_eq!(
        (recovered.found, recovered.torn, recovered.damaged, recovered.dropped),
        (9, 0, 0, 0)
    );
    let report = catalog
        .checkpoint(|writer| {
            let live = recovered.live.iter().filter(|live| live.slot != 5);
            let mut keys = live.filter_map(|live| super::harness::key_of(live.key_hash));
            keys.try_for_each(|key| writer.add(&record(key, key % 16, &key_bytes(key))))
        })
        .unwrap();
    assert_eq!((report.number, report.blocks), (3, 8));
    put(&catalog, 12).unwrap();
    catalog.sync().unwrap();
    drop(catalog);
    let (catalog, recovered) = open(directory.path()).unwrap();
    assert_eq!(recovered.found, 9);
    catalog.clear().unwrap();
    put(&catalog, 13).unwrap();
    catalog.sync().unwrap();
    drop(catalog);
    let (catalog, recovered) = open(directory.path()).unwrap();
    assert_eq!((recovered.found, catalog.snapshot().unwrap().epoch), (1, 2));
}

#[test]
fn a_second_owner_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let first = open(directory.path()).unwrap();
    for _ in 0..2 {
        let error = open(directory.path()).unwrap_err();
        let CatalogError::Owned { owner: Some(owner), .. } = &error else { panic!("{error}") };
        assert_eq!(owner.process, std::process::id());
        assert!(error.to_string().contains(&owner.host), "{error}");
    }
    // Another namespace is another store.
    let other = Namespace::new("other", [("rank", "0")]).unwrap();
    Catalog::open(directory.path(), &other, &groups(), CatalogOptions::default()).unwrap();
    drop(first);
    open(directory.path()).unwrap();
}

#[test]
fn a_forked_child_is_no_owner() {
    in_child("disk::directory::a_forked_child_is_no_owner", || {
        let directory = tempfile::tempdir().unwrap();
        let (catalog, _) = open(directory.path()).unwrap();
        let parent = std::process::id();
        in_fork(|| {
            assert!(matches!(put(&catalog, 1), Err(CatalogError::Forked(_))));
            assert!(matches!(catalog.sync(), Err(CatalogError::Forked(_))));
            assert!(matches!(catalog.snapshot(), Err(CatalogError::Forked(_))));
            let error = open(directory.path()).unwrap_err();
            let CatalogError::Owned { owner: Some(owner), .. } = error else { panic!("{error}") };
            assert_eq!(owner.process, parent);
        });
        // The child's exit has not released the parent's lock.
        in_fork(|| assert!(matches!(open(directory.path()), Err(CatalogError::Owned { .. }))));
        put(&catalog, 1).unwrap();
    });
}

#[test]
fn a_forked_child_that_lives_on_does_not_keep_the_lock() {
    in_child("disk::directory::a_forked_child_that_lives_on_does_not_keep_the_lock", || {
        let directory = tempfile::tempdir().unwrap();
        let (catalog, _) = open(directory.path()).unwrap();
        // SAFETY: the forked process only waits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // Nothing else ends it.
            allow_seconds(60);
            loop {
                // SAFETY: the call takes nothing.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
        drop(catalog);
        let again = open(directory.path());
        // SAFETY: the child was forked above and has not been waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: as above; no status is written.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        again.unwrap();
    });
}

#[test]
fn only_the_owner_can_read_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (catalog, _) = open(directory.path()).unwrap();
    catalog.checkpoint(|_| Ok(())).unwrap();
    assert_eq!(mode(&folder), 0o700);
    let mut files = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{path:?}");
        files += 1;
    }
    assert!(files >= 6, "{files}");
}

#[test]
fn a_directory_without_permission_is_a_typed_error() {
    in_child("disk::directory::a_directory_without_permission_is_a_typed_error", || {
        let directory = tempfile::tempdir().unwrap();
        let closed = directory.path().join("closed");
        std::fs::create_dir(&closed).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o500)).unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        in_fork(|| {
            // SAFETY: the call takes plain numbers. Root would pass every check of permissions.
            let changed = unsafe { libc::setresuid(65534, 65534, 65534) };
            assert!(changed == 0 || std::fs::create_dir(closed.join("probe")).is_err());
            let error = open(&closed).unwrap_err();
            assert!(matches!(error, CatalogError::NotPermitted { .. }), "{error}");
        });
    });
}

#[test]
fn paths_that_are_no_directories_are_typed_errors() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    assert!(matches!(open(&missing), Err(CatalogError::NotFound { path }) if path == missing));
    std::fs::write(directory.path().join("model"), b"a file").unwrap();
    assert!(matches!(open(directory.path()), Err(CatalogError::NotADirectory { .. })));
    std::fs::remove_file(directory.path().join("model")).unwrap();
    std::os::unix::fs::symlink("/tmp", directory.path().join("model")).unwrap();
    assert!(matches!(open(directory.path()), Err(CatalogError::NotADirectory { .. })));
    // A journal that is a directory.
    std::fs::remove_file(directory.path().join("model")).unwrap();
    drop(open(directory.path()).unwrap());
    std::fs::create_dir(directory.path().join("model/journal.9")).unwrap();
    assert!(matches!(open(directory.path()), Err(CatalogError::Io { .. })));
}

#[test]
fn a_renamed_folder_and_other_fields_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()).unwrap());
    std::fs::rename(directory.path().join("model"), directory.path().join("other")).unwrap();
    let fields = |namespace: &Namespace, groups: &[GroupSlots]| {
        let error = Catalog::open(directory.path(), namespace, groups, CatalogOptions::default());
        let CatalogError::NamespaceDiffers { differences, .. } = error.unwrap_err() else {
            panic!("another error")
        };
        differences.into_iter().map(|difference| difference.field).collect::<Vec<_>>()
    };
    let same = [("model", "m"), ("rank", "0")];
    assert_eq!(fields(&Namespace::new("other", same).unwrap(), &groups()), ["folder"]);
    std::fs::rename(directory.path().join("other"), directory.path().join("model")).unwrap();
    let rank = Namespace::new("model", [("model", "m"), ("rank", "1")]).unwrap();
    assert_eq!(fields(&rank, &groups()), ["rank"]);
    let [mut group] = groups();
    group.slot_bytes = 4096;
    assert_eq!(fields(&namespace(), &[group]), ["group 0: slot bytes"]);
    open(directory.path()).unwrap();
}

#[test]
fn fewer_slots_drop_the_blocks_behind_them() {
    let directory = tempfile::tempdir().unwrap();
    let (catalog, _) = open(directory.path()).unwrap();
    (0..16).for_each(|key| put(&catalog, key).unwrap());
    catalog.sync().unwrap();
    drop(catalog);
    let [mut group] = groups();
    group.slots = 10;
    let options = CatalogOptions::default();
    let (catalog, found) =
        Catalog::open(directory.path(), &namespace(), &[group], options).unwrap();
    assert_eq!((found.found, found.dropped), (10, 6));
    assert!(matches!(put(&catalog, 12), Err(CatalogError::NoSuchSlot { slot: 12, slots: 10, .. })));
}

#[test]
fn impossible_records_are_refused_with_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let (catalog, _) = open(directory.path()).unwrap();
    let key = vec![0; 65_536];
    let good = record(1, 1, b"key");
    let refused = |bad| {
        let error = catalog.append_puts(&[good, bad]).unwrap_err();
        assert_eq!(catalog.snapshot().unwrap().next_sequence, 2, "a record was written");
        error
    };
    let bad = terrane_store::disk::PutRecord { group: 1, ..good };
    assert!(matches!(refused(bad), CatalogError::NoSuchGroup { group: 1, groups: 1 }));
    let bad = terrane_store::disk::PutRecord { slot: 16, ..good };
    assert!(matches!(refused(bad), CatalogError::NoSuchSlot { slot: 16, slots: 16, .. }));
    let bad = terrane_store::disk::PutRecord { length: 1025, ..good };
    assert!(matches!(refused(bad), CatalogError::PayloadTooLong { limit: 1024, .. }));
    let bad = terrane_store::disk::PutRecord { key: &key, ..good };
    assert!(matches!(refused(bad), CatalogError::KeyTooLong { limit: 65_535, .. }));
    let none = [GroupSlots { slots: 0, ..groups()[0] }];
    let error = Catalog::open(directory.path(), &namespace(), &none, CatalogOptions::default());
    assert!(matches!(error, Err(CatalogError::EmptyGroup { group: 0, .. })));
}

#[test]
fn a_full_disk_makes_the_catalog_read_only() {
    const TEST: &str = "disk::directory::a_full_disk_makes_the_catalog_read_only";
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let mounted = tmpfs(directory.path(), 128 << 10).map_err(Into::into);
        let Some(_mounted) = or_skipped(TEST, mounted) else { return };
        let (catalog, _) = open(directory.path()).unwrap();
        put(&catalog, 1).unwrap();
        catalog.sync().unwrap();
        let error = (0..10_000).find_map(|_| put(&catalog, 2).err()).expect("the disk is full");
        assert!(matches!(error, CatalogError::NoSpace { .. }), "{error}");
        let error = put(&catalog, 2).unwrap_err();
        let CatalogError::ReadOnly { reason } = &error else { panic!("{error}") };
        assert_eq!(reason.operation, "an append");
        assert_eq!(reason.source.code, libc::ENOSPC);
        assert!(matches!(catalog.clear(), Err(CatalogError::ReadOnly { .. })));
        assert!(matches!(catalog.checkpoint(|_| Ok(())), Err(CatalogError::ReadOnly { .. })));
        drop(catalog);
        // It opens on the full disk, without writing.
        let (catalog, recovered) = open(directory.path()).unwrap();
        assert_eq!(recovered.found, 2);
        assert!(catalog.snapshot().unwrap().read_only.is_some());
        assert!(matches!(put(&catalog, 3), Err(CatalogError::ReadOnly { .. })));
        drop(catalog);
        std::fs::write(directory.path().join("model/journal.1"), b"").unwrap();
        let (catalog, _) = open(directory.path()).unwrap();
        put(&catalog, 3).unwrap();
        catalog.sync().unwrap();
    });
}

/// The open files of this process below `directory` whose names were removed.
fn removed_files(directory: &Path) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let is_removed = |link: &std::path::PathBuf| {
        link.starts_with(directory) && link.to_string_lossy().ends_with(" (deleted)")
    };
    links.filter(is_removed).count()
}

#[test]
fn a_checkpoint_closes_the_journals_that_it_replaces() {
    let directory = tempfile::tempdir().unwrap();
    let (catalog, _) = open(directory.path()).unwrap();
    for key in 0..5 {
        put(&catalog, key).unwrap();
        catalog.checkpoint(|writer| writer.add(&record(key, key, &key_bytes(key)))).unwrap();
        assert_eq!(removed_files(directory.path()), 0, "checkpoint {key}");
    }
    catalog.sync().unwrap();
    drop(catalog);
    assert_eq!(open(directory.path()).unwrap().1.found, 1);
}

#[test]
fn a_folder_of_another_user_is_refused_and_stays_as_it_is() {
    const TEST: &str = "disk::directory::a_folder_of_another_user_is_refused_and_stays_as_it_is";
    /// A user who is not root, and owns no process.
    const OTHER: u32 = 65_534;
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("model");
    for permissions in [0o700, 0o755] {
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(permissions)).unwrap();
        // Only root may give it away.
        let given = chown(&folder, Some(OTHER), None).map_err(Into::into);
        let Some(()) = or_skipped(TEST, given) else { return };
        let error = open(directory.path()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("user 65534") && text.contains("chown"), "{text}");
        assert_eq!(mode(&folder), permissions);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(&folder).unwrap();
    }
    // A folder that the process created itself is its own.
    drop(open(directory.path()).unwrap());
    drop(open(directory.path()).unwrap());
}

#[test]
fn a_folder_with_the_owner_that_its_file_system_gives_to_files_is_used() {
    const TEST: &str =
        "disk::directory::a_folder_with_the_owner_that_its_file_system_gives_to_files_is_used";
    const OTHER: u32 = 65_534;
    in_child(TEST, || {
        // SAFETY: the call takes a plain number. The kernel gives this id to new files of the thread.
        let set = |id| unsafe { libc::setfsuid(id).cast_unsigned() };
        // The call returns the id before it, and nothing else tells a refusal.
        let as_other = |id| [set(id), set(id)][1] == id;
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let is_other = as_other(OTHER);
        let permitted = is_other.then_some(()).ok_or(std::io::ErrorKind::PermissionDenied.into());
        let Some(()) = or_skipped(TEST, permitted.map_err(std::io::Error::into)) else { return };
        for _ in 0..2 {
            drop(open(directory.path()).unwrap());
            assert!(!directory.path().join("model/owner.probe").exists());
        }
        // Without that owner, it is the folder of another user.
        assert!(as_other(0));
        let error = open(directory.path()).unwrap_err();
        assert!(matches!(error, CatalogError::OtherUser { owner: OTHER, .. }), "{error}");
        assert!(!directory.path().join("model/owner.probe").exists());
    });
}
