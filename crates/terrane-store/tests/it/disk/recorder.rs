//! Files in memory that log every change, and make each state that a crash can leave.
//!
//! A change of data is durable after a later sync of its file, a change of names after a later sync of
//! the directory. A crash keeps any of the other changes: sectors of 512 bytes each by itself, lengths
//! without their data, and names in any order.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use terrane_core::OsError;
use terrane_store::disk::{DirectoryLock, Files, OpenFile, OpenMode};

use super::history::apply;
pub use super::history::{Change, History, Image};

/// A step of durability that is left out, to prove that the checker would find that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    SlabSync,
    DirectorySync,
    SecondSuperblock,
}

#[derive(Debug)]
struct Inner<N> {
    base: Image,
    now: Image,
    log: Vec<Change<N>>,
    skip: Option<Skip>,
    /// The changing calls that still succeed, and the error of the one after them.
    fault: Option<(usize, i32)>,
    /// Files whose sync failed.
    failed: BTreeSet<usize>,
    /// Whether one of them was synced again.
    synced_again: bool,
    is_locked: bool,
}

/// The files, and their log.
#[derive(Debug)]
pub struct Recorder<N>(Arc<Mutex<Inner<N>>>);

impl<N> Clone for Recorder<N> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<N: Clone> Recorder<N> {
    /// Files as after a crash that left `image`.
    pub fn new(image: Image, skip: Option<Skip>) -> Self {
        let (base, now) = (image.clone(), image);
        let (log, failed) = (Vec::new(), BTreeSet::new());
        let (fault, synced_again, is_locked) = (None, false, false);
        let inner = Inner { base, now, log, skip, fault, failed, synced_again, is_locked };
        Self(Arc::new(Mutex::new(inner)))
    }

    fn inner(&self) -> MutexGuard<'_, Inner<N>> {
        self.0.lock().unwrap()
    }

    pub fn note(&self, note: N) {
        self.inner().log.push(Change::Note(note));
    }

    /// Lets one changing call fail, after `calls` that succeed.
    pub fn fail_after(&self, calls: usize, code: i32) {
        self.inner().fault = Some((calls, code));
    }

    /// Whether the failure is yet to come.
    pub fn has_fault(&self) -> bool {
        self.inner().fault.is_some()
    }

    /// Whether a file was synced after a sync of it had failed.
    pub fn synced_again(&self) -> bool {
        self.inner().synced_again
    }

    /// The content that processes see.
    pub fn image(&self) -> Image {
        self.inner().now.clone()
    }

    pub fn history(&self) -> History<N> {
        let inner = self.inner();
        History { base: inner.base.clone(), log: inner.log.clone() }
    }
}

impl<N: Clone> Inner<N> {
    /// Counts a changing call, which may be the one that fails.
    fn call(&mut self, operation: &'static str) -> Result<(), OsError> {
        match &mut self.fault {
            Some((0, code)) => {
                let error = OsError::new(operation, *code);
                self.fault = None;
                Err(error)
            }
            Some((left, _)) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn change(&mut self, change: Change<N>) {
        apply(&mut self.now, &change);
        self.log.push(change);
    }

    fn name_of(&self, inode: usize) -> &str {
        let mut names = self.now.names.iter();
        names.find(|(_, other)| **other == inode).map_or("", |(name, _)| name)
    }
}

fn missing(operation: &'static str) -> OsError {
    OsError::new(operation, libc::ENOENT)
}

impl<N> Files for Recorder<N>
where
    N: Clone + std::fmt::Debug + Send + Sync + 'static,
{
    fn open(&self, name: &str, mode: OpenMode) -> Result<Box<dyn OpenFile>, OsError> {
        let mut inner = self.inner();
        if inner.skip == Some(Skip::SecondSuperblock)
            && name == "superblock.b"
            && mode == OpenMode::Create
        {
            // A file without a name: nothing that is written to it will be found.
            let inode = inner.now.inodes.len();
            inner.now.inodes.push(Vec::new());
            return Ok(Box::new(RecordedFile { files: self.clone(), inode }));
        }
        let found = inner.now.names.get(name).copied();
        let inode = match (found, mode) {
            (Some(_), OpenMode::CreateNew) => return Err(OsError::new("openat", libc::EEXIST)),
            (Some(inode), _) => inode,
            (None, OpenMode::Existing) => return Err(missing("openat")),
            (None, _) => {
                inner.call("openat")?;
                let inode = inner.now.inodes.len();
                inner.change(Change::Create { name: name.to_owned(), inode });
                inode
            }
        };
        Ok(Box::new(RecordedFile { files: self.clone(), inode }))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), OsError> {
        let mut inner = self.inner();
        inner.call("renameat")?;
        let inode = *inner.now.names.get(from).ok_or(missing("renameat"))?;
        inner.change(Change::Rename { from: from.to_owned(), to: to.to_owned(), inode });
        Ok(())
    }

    fn unlink(&self, name: &str) -> Result<(), OsError> {
        let mut inner = self.inner();
        inner.call("unlinkat")?;
        if !inner.now.names.contains_key(name) {
            return Err(missing("unlinkat"));
        }
        inner.change(Change::Unlink { name: name.to_owned() });
        Ok(())
    }

    fn sync_directory(&self) -> Result<(), OsError> {
        let mut inner = self.inner();
        inner.call("fsync")?;
        if inner.skip != Some(Skip::DirectorySync) {
            inner.change(Change::SyncDirectory);
        }
        Ok(())
    }

    fn list(&self) -> Result<Vec<String>, OsError> {
        Ok(self.inner().now.names.keys().cloned().collect())
    }

    fn try_lock(&self, _: &str) -> Result<Option<Box<dyn DirectoryLock>>, OsError> {
        let mut inner = self.inner();
        let is_free = !std::mem::replace(&mut inner.is_locked, true);
        if is_free {
            // Another owner cannot know what failed before.
            inner.failed.clear();
        }
        drop(inner);
        let lock = is_free.then(|| RecordedLock(self.clone()));
        Ok(lock.map(|lock| -> Box<dyn DirectoryLock> { Box::new(lock) }))
    }
}

#[derive(Debug)]
struct RecordedLock<N>(Recorder<N>);

impl<N: Clone + std::fmt::Debug + Send + Sync> DirectoryLock for RecordedLock<N> {}

impl<N> Drop for RecordedLock<N> {
    fn drop(&mut self) {
        self.0.0.lock().unwrap().is_locked = false;
    }
}

#[derive(Debug)]
struct RecordedFile<N> {
    files: Recorder<N>,
    inode: usize,
}

impl<N: Clone + std::fmt::Debug + Send + Sync> OpenFile for RecordedFile<N> {
    fn length(&self) -> Result<u64, OsError> {
        Ok(self.files.inner().now.inodes[self.inode].len() as u64)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<usize, OsError> {
        let inner = self.files.inner();
        let file = &inner.now.inodes[self.inode];
        let from = usize::try_from(offset).unwrap().min(file.len());
        let count = bytes.len().min(file.len() - from);
        bytes[..count].copy_from_slice(&file[from..from + count]);
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), OsError> {
        let mut inner = self.files.inner();
        let result = inner.call("pwrite");
        // A write that fails has written some of its bytes.
        let length = if result.is_ok() { bytes.len() } else { bytes.len() / 2 };
        let extends = (inner.now.inodes[self.inode].len() as u64) < offset + length as u64;
        let bytes = bytes[..length].to_vec();
        inner.change(Change::Write { inode: self.inode, offset, bytes, extends });
        result
    }

    fn set_length(&self, length: u64) -> Result<(), OsError> {
        let mut inner = self.files.inner();
        inner.call("ftruncate")?;
        inner.change(Change::SetLength { inode: self.inode, length });
        Ok(())
    }

    fn sync_data(&self) -> Result<(), OsError> {
        let mut inner = self.files.inner();
        inner.synced_again |= inner.failed.contains(&self.inode);
        if let Err(error) = inner.call("fdatasync") {
            inner.failed.insert(self.inode);
            return Err(error);
        }
        let is_slab = inner.name_of(self.inode).starts_with("slab.");
        if !(is_slab && inner.skip == Some(Skip::SlabSync)) {
            inner.change(Change::SyncData { inode: self.inode });
        }
        Ok(())
    }
}
