//! Syncs during which the store changes, and syncs that fail.

use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use terrane_core::OsError;
use terrane_store::disk::{
    Catalog, CatalogError, CatalogOptions, DirectoryLock, Files, OpenFile, OpenMode,
};

use super::harness::{Note, created, groups, hash, key_bytes, namespace, open, record};
use super::recorder::Recorder;

/// A catalog that changes once, during the sync of `journal.2`.
type Hook = Arc<Mutex<Weak<Catalog>>>;

#[derive(Debug)]
struct Hooked(Recorder<Note>, Hook);

#[derive(Debug)]
struct HookedFile(Box<dyn OpenFile>, Option<Hook>);

impl Files for Hooked {
    fn open(&self, name: &str, mode: OpenMode) -> Result<Box<dyn OpenFile>, OsError> {
        let hook = (name == "journal.2").then(|| Arc::clone(&self.1));
        Ok(Box::new(HookedFile(self.0.open(name, mode)?, hook)))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), OsError> {
        self.0.rename(from, to)
    }

    fn unlink(&self, name: &str) -> Result<(), OsError> {
        self.0.unlink(name)
    }

    fn sync_directory(&self) -> Result<(), OsError> {
        self.0.sync_directory()
    }

    fn list(&self) -> Result<Vec<String>, OsError> {
        self.0.list()
    }

    fn try_lock(&self, name: &str) -> Result<Option<Box<dyn DirectoryLock>>, OsError> {
        self.0.try_lock(name)
    }
}

impl OpenFile for HookedFile {
    fn length(&self) -> Result<u64, OsError> {
        self.0.length()
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<usize, OsError> {
        self.0.read_at(bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), OsError> {
        self.0.write_at(bytes, offset)
    }

    fn set_length(&self, length: u64) -> Result<(), OsError> {
        self.0.set_length(length)
    }

    fn sync_data(&self) -> Result<(), OsError> {
        self.0.sync_data()?;
        let hook = self.1.as_ref().map(|hook| std::mem::take(&mut *hook.lock().unwrap()));
        if let Some(catalog) = hook.and_then(|hook| hook.upgrade()) {
            catalog.append_removes(&[hash(1)]).unwrap();
            catalog.checkpoint(|_| Err(CatalogError::CheckpointAbandoned)).unwrap_err();
        }
        Ok(())
    }
}

#[test]
fn a_journal_that_grows_during_its_sync_is_synced_again() {
    let recorder: Recorder<Note> = Recorder::new(created(), None);
    let hook = Hook::default();
    let files = Arc::new(Hooked(recorder.clone(), Arc::clone(&hook)));
    let options = CatalogOptions::default();
    let opened = Catalog::open_in(files, Path::new("store"), &namespace(), &groups(), options);
    let catalog = Arc::new(opened.unwrap().0);
    catalog.append_puts(&[record(1, 0, &key_bytes(1))]).unwrap();
    *hook.lock().unwrap() = Arc::downgrade(&catalog);
    catalog.sync().unwrap();
    assert_eq!(catalog.snapshot().unwrap().journal, Some(3), "the journal changed during the sync");
    catalog.sync().unwrap();
    let history = recorder.history();
    let end = history.log.len();
    let image = history.crash(end, &history.pending(end), |_| false);
    let (_catalog, recovered) = open(&Recorder::<Note>::new(image, None)).unwrap();
    assert_eq!((recovered.found, recovered.damaged), (0, 0));
}

#[test]
fn a_journal_that_a_checkpoint_replaced_is_not_synced() {
    let recorder: Recorder<Note> = Recorder::new(created(), None);
    let (catalog, _) = open(&recorder).unwrap();
    catalog.append_puts(&[record(1, 0, &key_bytes(1))]).unwrap();
    catalog.checkpoint(|writer| writer.add(&record(1, 0, &key_bytes(1)))).unwrap();
    catalog.append_puts(&[record(2, 1, &key_bytes(2))]).unwrap();
    // The first call of the sync is that of the present journal. A second one would fail.
    recorder.fail_after(1, libc::EIO);
    catalog.sync().unwrap();
}

#[test]
fn a_failed_sync_of_names_makes_the_catalog_read_only() {
    // The calls before the sync of the directory at the beginning of a checkpoint, and at its end.
    for calls in [1, 8] {
        let files: Recorder<Note> = Recorder::new(created(), None);
        let (catalog, _) = open(&files).unwrap();
        files.fail_after(calls, libc::EIO);
        let error = catalog.checkpoint(|_| Ok(())).unwrap_err();
        assert!(matches!(&error, CatalogError::Io { source, .. } if source.operation == "fsync"));
        let reason = catalog.snapshot().unwrap().read_only.expect("a reason");
        assert_eq!(reason.operation, "a sync");
    }
}

#[test]
fn the_numbers_of_files_end_with_a_typed_error() {
    let last = (1_u64 << 62) - 1;
    let with_journal = |number: u64| {
        let mut image = created();
        image.insert(&format!("journal.{number}"), Vec::new());
        open(&Recorder::<Note>::new(image, None))
    };
    assert!(matches!(with_journal(last), Err(CatalogError::NumbersExhausted { .. })));
    let (catalog, _) = with_journal(last - 1).unwrap();
    let error = catalog.checkpoint(|_| Ok(())).unwrap_err();
    assert!(matches!(error, CatalogError::NumbersExhausted { .. }), "{error}");
    assert_eq!(catalog.clear(), Err(error));
}
