//! The files: names, modes, stripes, sizes.

use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use terrane_core::{Capability, CapabilityStatus, Requirement};
use terrane_storage::DiskOptions;

use super::*;

#[test]
fn slots_are_striped_over_the_directories_of_each_group() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let paths: Vec<PathBuf> = folders.iter().map(|folder| folder.path().to_owned()).collect();
    let groups = [group(5000, 5), group(100, 2)];
    let slabs = Slabs::open(&paths, &groups, &SlabOptions::default()).unwrap();
    assert_eq!([0, 1, 2].map(|group| slabs.slot_bytes(group)), [8192, 4096, 0]);
    assert_eq!(slabs.file_bytes(), 5 * 8192 + 2 * 4096);
    for slot in 0..5_u8 {
        write(&slabs, slot.into(), &[slot + 1; 5000]);
    }
    slabs.sync().unwrap();
    slabs.close(in_a_second());
    for (folder, name, slots) in [(0, "slab.0.000", vec![1, 3, 5]), (1, "slab.0.001", vec![2, 4])] {
        let path = paths[folder].join(name);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let bytes = std::fs::read(path).unwrap();
        let found: Vec<u8> = bytes.chunks(8192).map(|slot| slot[4999]).collect();
        assert_eq!(found, slots);
    }
    assert_eq!(paths[0].join("slab.1.000").metadata().unwrap().len(), 4096);
    assert_eq!(paths[1].join("slab.1.001").metadata().unwrap().len(), 4096);
}

#[test]
fn files_are_opened_again_and_short_ones_extended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slab.0.000");
    let slabs = open_one(folder.path(), group(4096, 4), &SlabOptions::default());
    let sum = write(&slabs, 3, &[9; 4096]);
    drop(slabs);
    for (slots, expected) in [(4, 4), (2, 4), (10, 10), (6, 10)] {
        let slabs = open_one(folder.path(), group(4096, slots), &SlabOptions::default());
        assert_eq!(path.metadata().unwrap().len(), expected * 4096);
        if slots > 3 {
            assert_eq!(read(&slabs, 3, 4096, sum).unwrap(), [9; 4096]);
        }
    }
    // A process was killed between the creation of the file and its first block.
    std::fs::File::create(&path).unwrap();
    let slabs = open_one(folder.path(), group(4096, 4), &SlabOptions::default());
    write(&slabs, 3, &[9; 4096]);
    assert_eq!(path.metadata().unwrap().len(), 4 * 4096);
}

#[test]
fn blocks_are_reserved_and_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slab.0.000");
    let slabs = open_one(folder.path(), group(1 << 20, 8), &SlabOptions::default());
    let granted = slabs.capabilities();
    if granted.status(&Capability::Preallocation) != Some(&CapabilityStatus::Granted) {
        eprintln!("skipped: blocks_are_reserved_and_given_back: {granted}");
        return;
    }
    let blocks = || path.metadata().unwrap().blocks();
    assert!(blocks() >= 8 << 11);
    let sum = write(&slabs, 0, &[3; 1 << 20]);
    let last = write(&slabs, 7, &[4; 1 << 20]);
    slabs.punch(0, 1..100).unwrap();
    assert!(blocks() <= 2 << 11, "{} blocks", blocks());
    assert_eq!(path.metadata().unwrap().len(), 8 << 20);
    assert!(read(&slabs, 0, 1 << 20, sum).is_ok());
    let failure = read(&slabs, 7, 1 << 20, last).unwrap_err();
    assert!(matches!(failure, SlabFailure::Corrupt { expected, .. } if expected == last));
    drop(slabs);
    let disk = DiskOptions { preallocate: Requirement::Off, ..SlabOptions::default().disk };
    let sparse = SlabOptions { disk, ..SlabOptions::default() };
    drop(open_one(folder.path(), group(1 << 20, 8), &sparse));
    assert!(blocks() <= 2 << 11);
    drop(open_one(folder.path(), group(1 << 20, 8), &SlabOptions::default()));
    assert!(blocks() >= 8 << 11, "they are reserved again");
}

#[test]
fn read_only_files_are_neither_created_nor_written() {
    let folder = tempfile::tempdir().unwrap();
    let read_only = SlabOptions { read_only: true, ..SlabOptions::default() };
    let groups = [group(4096, 4)];
    let error = Slabs::open(&[folder.path().to_owned()], &groups, &read_only).unwrap_err();
    assert!(matches!(error, StoreError::Storage(StorageError::NotFound { .. })), "{error}");
    let slabs = open_one(folder.path(), groups[0], &SlabOptions::default());
    let sum = write(&slabs, 1, &[5; 100]);
    drop(slabs);
    let slabs = open_one(folder.path(), groups[0], &read_only);
    assert_eq!(read(&slabs, 1, 100, sum).unwrap(), [5; 100]);
    let mut memory = Guarded::new(&[(0, 100)]);
    let result = run(&slabs, request(1, memory.buffers(), SlabDirection::Write));
    assert!(matches!(result, Err(SlabFailure::ReadOnly(_))), "{result:?}");
    let refusal = slabs.refusal();
    assert!(matches!(refusal, Some(SlabFailure::ReadOnly(_))), "{refusal:?}");
}

#[test]
fn wrong_options_are_typed_errors() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [folder.path().to_owned()];
    let open = |paths: &[PathBuf], group| {
        Slabs::open(paths, &[group], &SlabOptions::default()).unwrap_err()
    };
    assert!(matches!(open(&[], group(1, 1)), StoreError::NoDirectory));
    for slot_bytes in [u64::MAX, 1 << 60] {
        let error = open(&paths, group(slot_bytes, u32::MAX));
        assert!(matches!(error, StoreError::SlotsTooLarge { group: 0, .. }), "{error}");
    }
    let error = open(&[folder.path().join("missing")], group(1, 1));
    assert!(matches!(error, StoreError::Storage(StorageError::NotFound { .. })), "{error}");
    std::fs::create_dir(folder.path().join("slab.0.000")).unwrap();
    let error = open(&paths, group(1, 1));
    assert!(matches!(error, StoreError::Storage(StorageError::NotAFile { .. })), "{error}");
}

#[test]
fn requests_outside_the_slabs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = open_one(folder.path(), group(5000, 2), &SlabOptions::default());
    for (slot, length) in [(2, 1), (0, 5001), (0, 0)] {
        let mut memory = Guarded::new(&[(0, length)]);
        let result = run(&slabs, request(slot, memory.buffers(), SlabDirection::Write));
        let Err(SlabFailure::Refused(error)) = result else { panic!("{result:?}") };
        assert!(matches!(*error, StoreError::OutsideSlabs { .. }), "{error}");
    }
    let mut memory = Guarded::new(&[(0, 1)]);
    let results = Arc::new(Results::default());
    let wrong = request(0, memory.buffers(), SlabDirection::Write).to(&results);
    // SAFETY: the memory is kept until the request has ended.
    unsafe { slabs.submit(vec![SlabRequest { group: 7, ..wrong }]) };
    assert!(matches!(results.take(1)[0].1, Err(SlabFailure::Refused(_))));
}

#[test]
fn a_file_that_was_cut_ends_its_reads_with_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = open_one(folder.path(), group(4096, 4), &SlabOptions::default());
    let sum = write(&slabs, 2, &[7; 4096]);
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join("slab.0.000"));
    let file = file.unwrap();
    file.set_len(2 * 4096).unwrap();
    let failure = read(&slabs, 2, 4096, sum).unwrap_err();
    let SlabFailure::Io(failure) = failure else { panic!("{failure:?}") };
    assert_eq!(failure.reason, terrane_storage::IoFailureReason::EndOfFile);
    file.write_all_at(&[7; 4096], 2 * 4096).unwrap();
    assert_eq!(read(&slabs, 2, 4096, sum).unwrap(), [7; 4096]);
}

#[test]
fn a_symbolic_link_is_no_slab_file() {
    let [folder, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (path, target) = (folder.path().join("slab.0.000"), elsewhere.path().join("target"));
    let open = |options: &SlabOptions| {
        Slabs::open(&[folder.path().to_owned()], &[group(4096, 4)], options).map(|_| ())
    };
    std::os::unix::fs::symlink(&target, &path).unwrap();
    // The target does not exist, is short, and is long enough.
    for length in [None, Some(0), Some(4 * 4096)] {
        if let Some(length) = length {
            std::fs::File::create(&target).unwrap().set_len(length).unwrap();
        }
        for read_only in [false, true] {
            let error = open(&SlabOptions { read_only, ..SlabOptions::default() }).unwrap_err();
            let StoreError::Storage(StorageError::NotAFile { found, .. }) = error else {
                panic!("{length:?}, {read_only}: {error}")
            };
            assert_eq!(found, "a symbolic link");
        }
        assert_eq!(target.metadata().ok().map(|it| it.len()), length);
    }
    std::fs::remove_file(&path).unwrap();
    open(&SlabOptions::default()).unwrap();
}
