//! Puts and gets of a store in a directory, compared with a raw loop over a file of the same
//! blocks.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use terrane_core::ByteCount;
use terrane_store::disk::Namespace;
use terrane_store::{BlockGroup, Blocks, DiskTier, Job, JobOptions, Store};
use terrane_transfer::Endpoint;

use super::host::system;
use super::{Shape, seconds_of_call};
use crate::error::Failure;

/// A store with blocks of a model, whose only tier is on disk.
pub(crate) struct StoreCase {
    // The first field, so that it drops before the folder, which it has open.
    store: Store,
    memory: Endpoint,
    ids: Vec<u32>,
    keys: Vec<[u8; 8]>,
    _folder: TemporaryFolder,
}

/// A folder that is removed on drop.
struct TemporaryFolder(PathBuf);

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // The user may have removed the folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl StoreCase {
    pub(crate) fn new(shape: &Shape, directory: &Path) -> Result<Self, Failure> {
        let path = directory.join(format!(".terrane-bench-store-{}", std::process::id()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|source| Failure::Write { path: path.clone(), source })?;
        let folder = TemporaryFolder(path);
        let namespace = Namespace::new("bench", [("model", "bench")]);
        let namespace = namespace.map_err(terrane_store::StoreError::from)?;
        // A slot is rounded up to whole pages. An eighth of the slots is for blocks that are being
        // replaced.
        let slot = shape.block_bytes().next_multiple_of(4096);
        let slots = u64::from(shape.blocks) * 9 / 8 + 1;
        let (store, _) = Store::builder()
            .group(BlockGroup::of_geometry("kv", &shape.host))
            .disk(DiskTier::new(&folder.0, ByteCount::new(slot.saturating_mul(slots))))
            .namespace(namespace)
            .open()?;
        let (ids, _) = shape.ids();
        let keys = ids.iter().map(|id| u64::from(*id).to_le_bytes()).collect();
        Ok(Self { store, memory: system(&shape.host)?, ids, keys, _folder: folder })
    }

    /// Puts all blocks from memory. The store is empty before and after.
    pub(crate) fn put(&mut self) -> Result<f64, Failure> {
        let time = seconds_of_call(|| self.put_all())?;
        wait_for_success(self.store.clear()?)?;
        Ok(time)
    }

    /// Fills the store, for gets.
    pub(crate) fn put_all(&mut self) -> Result<(), Failure> {
        let blocks = Blocks::new(&self.memory, &self.ids);
        let job = self.store.put(&self.keys, blocks, JobOptions::new(), ());
        wait_for_success(job.map_err(|refused| refused.cause)?)
    }

    /// Gets all blocks into memory.
    pub(crate) fn get(&mut self) -> Result<f64, Failure> {
        seconds_of_call(|| {
            let blocks = Blocks::new(&self.memory, &self.ids);
            let job = self.store.get(&self.keys, blocks, JobOptions::new(), ());
            wait_for_success(job.map_err(|refused| refused.cause)?)
        })
    }

    /// Gets one block into memory.
    pub(crate) fn get_one(&mut self) -> Result<f64, Failure> {
        seconds_of_call(|| {
            let keys = self.keys.get(..1).unwrap_or_default();
            let blocks = Blocks::new(&self.memory, &[0]);
            let job = self.store.get(keys, blocks, JobOptions::new(), ());
            wait_for_success(job.map_err(|refused| refused.cause)?)
        })
    }
}

/// Waits, and checks that each block succeeded.
fn wait_for_success(job: Job) -> Result<(), Failure> {
    let outcome = job.wait();
    match outcome.results.iter().find(|result| !result.is_ok()) {
        Some(result) => Err(Failure::Block(format!("{result:?}"))),
        None => Ok(()),
    }
}
