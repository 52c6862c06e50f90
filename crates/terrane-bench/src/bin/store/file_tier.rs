//! A tier with one file for each block and one thread for each request.
//!
//! It writes a block to a new file and renames the file. It reads a block with one call and direct
//! I/O.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, anyhow};
use terrane_core::{Alignment, Allocate};
use terrane_core::{ByteCount, Memory, RegionRequest};
use terrane_storage::{SystemAllocator, SystemMemory, SystemOptions};

/// The number of threads, the maximum of the pool of vLLM's tier.
const THREADS: usize = 64;

pub struct FileTier {
    folder: PathBuf,
    memory: SystemMemory,
    block: usize,
    count: usize,
}

impl FileTier {
    pub fn new(folder: &Path, block: u32, count: u32) -> Result<Self> {
        let bytes = ByteCount::new(u64::from(block)).checked_mul("blocks", count.into())?;
        let request = RegionRequest::new(bytes).aligned_to(Alignment::PAGE).labelled("blocks");
        let memory = SystemAllocator::new(SystemOptions::default()).allocate(&request)?;
        fs::create_dir(folder)?;
        let (block, count) = (usize::try_from(block)?, usize::try_from(count)?);
        Ok(Self { folder: folder.to_owned(), memory, block, count })
    }

    /// Writes or reads all blocks, each with one thread.
    pub fn pass(&mut self, is_write: bool) -> Result<()> {
        let (folder, block, count) = (self.folder.clone(), self.block, self.count);
        let bytes = self.bytes()?;
        thread::scope(|scope| {
            let mut threads = Vec::new();
            let chunks: Vec<&mut [u8]> = bytes.chunks_mut(block).collect();
            let each = count.div_ceil(THREADS);
            let mut chunks = chunks.into_iter().enumerate();
            loop {
                let mine: Vec<_> = chunks.by_ref().take(each).collect();
                if mine.is_empty() {
                    break;
                }
                let folder = &folder;
                threads.push(scope.spawn(move || {
                    mine.into_iter()
                        .try_for_each(|(number, bytes)| one(folder, number, is_write, bytes))
                }));
            }
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
        })
    }

    #[expect(unsafe_code, reason = "the memory is the tier's own")]
    fn bytes(&mut self) -> Result<&mut [u8]> {
        let address = self.memory.location().as_host().context("no host memory")?;
        let length = self.block * self.count;
        // SAFETY: the memory is zeroed, belongs to this value, and is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), length) })
    }
}

fn one(folder: &Path, number: usize, is_write: bool, bytes: &mut [u8]) -> Result<()> {
    let path = folder.join(number.to_string());
    let open = |path: &Path| -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(is_write).create(is_write).custom_flags(libc::O_DIRECT);
        options.open(path)
    };
    if is_write {
        let aside = folder.join(format!("{number}.new"));
        open(&aside)?.write_all_at(bytes, 0)?;
        fs::rename(aside, path)?;
    } else {
        open(&path)?.read_exact_at(bytes, 0)?;
    }
    Ok(())
}
