//! Copies between host memory and a file, compared with a raw loop, and with fio if it is
//! installed.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use terrane_core::convert::{to_u64, to_usize};
use terrane_core::{ByteCount, Region};
use terrane_layout::LayoutBuilder;
use terrane_storage::{DiskFile, DiskOptions, IoQueueOptions};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::fio::{Pass, run};
use super::host::system;
use super::{End, Ids, Shape, first_ids, seconds_of_blocks, seconds_of_call};
use crate::error::Failure;

/// Blocks in a file and in memory.
#[derive(Debug)]
pub(crate) struct DiskCase {
    manager: TransferManager,
    memory: Endpoint,
    file: Endpoint,
    ids: Ids,
    path: TemporaryFile,
    blocks: u64,
    /// The bytes of a block in the file.
    stride: u64,
    depth: u32,
}

/// A file that is removed on drop.
#[derive(Debug)]
struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // The user may have removed the file.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl DiskCase {
    pub(crate) fn new(shape: &Shape, directory: &Path, depth: u32) -> Result<Self, Failure> {
        let path = directory.join(format!(".terrane-bench-{}", std::process::id()));
        let size = shape.disk.region_bytes(0);
        // A whole number of strides, so that the raw loop reads whole blocks.
        let stride = size.get().div_ceil(u64::from(shape.blocks)).next_multiple_of(4096);
        let length = ByteCount::new(stride).checked_mul("blocks", shape.blocks.into());
        let length = length.unwrap_or(size);
        let file = DiskFile::create_new(&path, length, &DiskOptions::default())?;
        let path = TemporaryFile(path);
        let region = Region::new(file)
            .view(ByteCount::ZERO, size)
            .map_err(terrane_layout::LayoutError::from)?;
        let builder = LayoutBuilder::from_geometry(shape.disk.clone()).adopt([region]);
        let layout = builder.unregistered().build().map_err(terrane_layout::LayoutError::from)?;
        let options = DiskEngineOptions {
            queue: IoQueueOptions { depth, ..DiskEngineOptions::default().queue },
            ..DiskEngineOptions::default()
        };
        Ok(Self {
            manager: TransferManager::new([Arc::new(DiskEngine::new(&options)?) as _]),
            memory: system(&shape.host)?,
            file: Endpoint::new(layout)?,
            ids: shape.ids(),
            path,
            blocks: shape.blocks.into(),
            stride,
            depth,
        })
    }

    /// The engine's path, as named in the manager's explanation.
    pub(crate) fn engine_path(&self) -> Result<String, Failure> {
        let (ids, backwards) = &self.ids;
        let transfer = Transfer::new(&self.memory, &self.file).blocks(backwards, ids);
        Ok(self.manager.explain(&transfer)?.path().into_owned())
    }

    /// Copies all blocks.
    pub(crate) fn pass(&mut self, is_write: bool) -> Result<f64, Failure> {
        let (ids, backwards) = &self.ids;
        self.copy((&self.memory, backwards), (&self.file, ids), is_write)
    }

    /// Copies the first blocks.
    pub(crate) fn pass_some(&mut self, is_write: bool, blocks: u32) -> Result<f64, Failure> {
        let (ids, backwards) = first_ids(&self.ids, blocks);
        self.copy((&self.memory, backwards), (&self.file, ids), is_write)
    }

    /// Copies one block.
    pub(crate) fn one_block(&mut self, is_write: bool) -> Result<f64, Failure> {
        self.copy((&self.memory, &[0]), (&self.file, &[1]), is_write)
    }

    fn copy(&self, memory: End<'_>, file: End<'_>, is_write: bool) -> Result<f64, Failure> {
        let (source, destination) = if is_write { (memory, file) } else { (file, memory) };
        seconds_of_blocks(&self.manager, source, destination)
    }

    /// Reads or writes the same bytes by threads, each with a part of the file, block by block.
    /// Uses direct I/O if the file system supports it.
    pub(crate) fn raw(&self, is_write: bool) -> Result<f64, Failure> {
        let path = &self.path.0;
        let file = open(path)?;
        let threads = u64::from(self.depth).min(self.blocks);
        let part = self.blocks.div_ceil(threads);
        seconds_of_call(|| {
            thread::scope(|scope| {
                let threads: Vec<_> = (0..threads)
                    .map(|thread| {
                        let blocks = thread * part..((thread + 1) * part).min(self.blocks);
                        let file = &file;
                        scope.spawn(move || read_or_write(file, blocks, self.stride, is_write))
                    })
                    .collect();
                for thread in threads {
                    let ended = thread
                        .join()
                        .unwrap_or_else(|_| Err(std::io::Error::other("a thread panicked")));
                    ended.map_err(|source| match is_write {
                        true => Failure::Write { path: path.clone(), source },
                        false => Failure::Read { path: path.clone(), source },
                    })?;
                }
                Ok(())
            })
        })
    }

    /// Runs the same requests with fio. The error is the reason why it cannot run.
    pub(crate) fn fio(&self, is_write: bool) -> Result<f64, String> {
        let bytes = self.stride * self.blocks;
        let pass =
            Pass { path: &self.path.0, is_write, block: self.stride, bytes, depth: self.depth };
        run(&pass)
    }
}

fn open(path: &Path) -> Result<File, Failure> {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or(0);
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let opened = match options.clone().custom_flags(direct).open(path) {
        // The file system has no direct I/O. The engine's file is buffered then, too.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            options.open(path)
        }
        opened => opened,
    };
    opened.map_err(|source| Failure::Read { path: path.to_owned(), source })
}

fn read_or_write(
    file: &File,
    blocks: std::ops::Range<u64>,
    stride: u64,
    is_write: bool,
) -> std::io::Result<()> {
    const PAGE: usize = 4096;
    let length = to_usize(stride);
    // Direct I/O needs page-aligned memory.
    let mut memory = vec![1_u8; length + PAGE];
    let begin = memory.as_ptr().align_offset(PAGE).min(PAGE);
    let Some(buffer) = memory.get_mut(begin..begin + length) else { return Ok(()) };
    for block in blocks {
        let offset = block * to_u64(length);
        if is_write {
            file.write_all_at(buffer, offset)?;
        } else {
            file.read_exact_at(buffer, offset)?;
        }
    }
    Ok(())
}
