//! Memory of Python objects that jobs read or write.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, HostAddress};
use terrane_cuda::Context;
use terrane_storage::{IoBuffer, IoMemory};
use terrane_store::{Blocks as NativeBlocks, Spans};
use terrane_transfer::DeviceOrder;

use crate::cache::KvCache;
use crate::numbers::ids;
use crate::process::PerProcess;

/// Objects that jobs no longer use. The next call into this module, which has the GIL, releases them, because the
/// threads of a store never wait for the GIL.
static RELEASED: PerProcess<Vec<KeptObjects>> = PerProcess::new();

/// Releases the objects of ended jobs.
pub(crate) fn release_ended(_py: Python<'_>) {
    // No Python code runs under the lock.
    let released = std::mem::take(&mut *lock(RELEASED.get()));
    for mut kept in released {
        // Emptied, so that its drop does not add it to the list again.
        kept.buffers.clear();
        kept.objects.clear();
    }
}

/// Whether a transfer or a job did not end before the interpreter exited.
static IS_LEAKING: AtomicBool = AtomicBool::new(false);

/// Records that work continues after the interpreter's exit. Its memory is then never freed, because the drop would
/// wait for the work.
pub(crate) fn leak_remaining() {
    // Relaxed: the thread that exits reads it.
    IS_LEAKING.store(true, Ordering::Relaxed);
}

/// Drops a value without the GIL, because its drop may wait for threads or for a device. Then releases the objects
/// that it has kept.
pub(crate) fn drop_detached(value: impl Send) {
    if IS_LEAKING.load(Ordering::Relaxed) {
        // The end of the process frees it.
        let _leaked = ManuallyDrop::new(value);
        return;
    }
    let mut value = Some(value);
    Python::try_attach(|py| {
        py.detach(|| drop(value.take()));
        release_ended(py);
    });
}

/// Exports of buffers, and other objects, that keep the memory of a job alive.
#[derive(Default)]
pub(crate) struct KeptObjects {
    buffers: Vec<PyUntypedBuffer>,
    objects: Vec<Py<PyAny>>,
}

impl Drop for KeptObjects {
    fn drop(&mut self) {
        let buffers = std::mem::take(&mut self.buffers);
        let objects = std::mem::take(&mut self.objects);
        if !buffers.is_empty() || !objects.is_empty() {
            lock(RELEASED.get()).push(Self { buffers, objects });
        }
    }
}

/// The memory of blocks, one block for each key of a job.
///
/// It references the objects that own the memory, and each job references it. While a job runs, no other code may
/// write the memory of a `put`, or access the memory of a `get`.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Blocks {
    memory: BlockMemory,
    is_writable: bool,
    kept: Arc<KeptObjects>,
}

impl Drop for Blocks {
    /// When Python frees the object, the objects of ended jobs are released at once.
    fn drop(&mut self) {
        // Its registered pages are unpinned before the export of their buffer is released.
        if let BlockMemory::Spans(spans) = &mut self.memory {
            *spans = Spans::new();
        }
        drop(std::mem::take(&mut self.kept));
        Python::attach(release_ended);
    }
}

/// Spans of host memory, or blocks of a cache.
enum BlockMemory {
    Spans(Spans),
    Cache {
        blocks: NativeBlocks,
        /// The ids of the blocks, if all blocks are whole.
        whole: Option<Vec<u32>>,
        cache: Py<KvCache>,
    },
}

impl Blocks {
    fn spans(spans: Spans, is_writable: bool, kept: Arc<KeptObjects>) -> Self {
        Self { memory: BlockMemory::Spans(spans), is_writable, kept }
    }

    /// Blocks of a cache, with their ids if they are whole.
    ///
    /// Jobs keep the cache's object alive. Otherwise the last job would free the tensors on a thread of the store,
    /// which would wait for the GIL.
    pub(crate) fn of_cache(
        blocks: NativeBlocks,
        whole: Option<Vec<u32>>,
        cache: Py<KvCache>,
    ) -> Self {
        let kept = Python::attach(|py| KeptObjects::object(cache.clone_ref(py).into_any()));
        let memory = BlockMemory::Cache { blocks, whole, cache };
        Self { memory, is_writable: true, kept: Arc::new(kept) }
    }

    /// The cache, and the ids of its blocks, which must be whole.
    pub(crate) fn whole_blocks(&self) -> PyResult<(&Py<KvCache>, &[u32])> {
        match &self.memory {
            BlockMemory::Cache { whole: Some(whole), cache, .. } => Ok((cache, whole)),
            BlockMemory::Cache { .. } => Err(PyValueError::new_err(
                "a manager copies whole blocks; omit tokens= in KvCache.blocks",
            )),
            BlockMemory::Spans(_) => Err(PyValueError::new_err(
                "a manager copies blocks of a KvCache; pass the result of KvCache.blocks",
            )),
        }
    }

    /// The work after which a job runs, if the blocks are on a device.
    pub(crate) fn order(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
    ) -> PyResult<Option<DeviceOrder>> {
        match &self.memory {
            BlockMemory::Cache { cache, .. } => cache.get().order(py, stream),
            BlockMemory::Spans(_) if stream.is_some() => Err(PyValueError::new_err(
                "stream= was passed for blocks in host memory, which no stream orders; omit it",
            )),
            BlockMemory::Spans(_) => Ok(None),
        }
    }

    /// The context of the device with the blocks.
    pub(crate) fn context(&self) -> Option<&Context> {
        match &self.memory {
            BlockMemory::Cache { cache, .. } => cache.get().context(),
            BlockMemory::Spans(_) => None,
        }
    }

    /// The memory for a job.
    ///
    /// # Safety
    ///
    /// The job must get [`kept`](Self::kept) as its guard. For a get, [`check_writable`](Self::check_writable) must
    /// have passed.
    pub(crate) unsafe fn native(&self) -> NativeBlocks {
        match &self.memory {
            // SAFETY: `kept` owns the exports of the buffers, or the `keep` object of `Blocks.at`, so the spans stay
            // valid. By the documentation of `Blocks`, Python's caller promises that no other code uses them
            // meanwhile.
            BlockMemory::Spans(spans) => unsafe { NativeBlocks::spans(spans.clone()) },
            BlockMemory::Cache { blocks, .. } => blocks.clone(),
        }
    }

    pub(crate) fn kept(&self) -> Arc<KeptObjects> {
        Arc::clone(&self.kept)
    }

    /// Checks that a get may write to the memory.
    pub(crate) fn check_writable(&self) -> PyResult<()> {
        if self.is_writable {
            return Ok(());
        }
        Err(PyBufferError::new_err(
            "a buffer is read-only, and a get writes to it; pass a writable buffer",
        ))
    }

    /// Blocks, or an iterable of buffers.
    pub(crate) fn from_argument<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        match value.cast::<Self>() {
            Ok(blocks) => Ok(blocks.clone()),
            Err(_) => Bound::new(value.py(), Self::of(value)?),
        }
    }
}

impl KeptObjects {
    /// Keeps one object.
    pub(crate) fn object(object: Py<PyAny>) -> Self {
        Self { buffers: Vec::new(), objects: vec![object] }
    }

    /// Adds an export of the buffer, and returns its start and length.
    fn add(&mut self, value: &Bound<'_, PyAny>) -> PyResult<(NonNull<u8>, usize)> {
        let buffer = PyUntypedBuffer::get(value)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("a buffer has gaps; pass contiguous memory"));
        }
        let bytes = buffer.len_bytes();
        let start = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
        self.buffers.push(buffer);
        Ok((start, bytes))
    }
}

#[pymethods]
impl Blocks {
    /// Blocks of buffers: `bytes`, `bytearray`, `memoryview`, NumPy arrays. Each item is one buffer, or a list of
    /// buffers whose bytes are adjacent in the block.
    ///
    /// Raises `BufferError` for memory with gaps.
    #[staticmethod]
    pub(crate) fn of(buffers: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (mut kept, mut spans) = (KeptObjects::default(), Spans::new());
        for item in buffers.try_iter()? {
            let item = item?;
            if item.is_instance_of::<PyList>() {
                let parts: PyResult<Vec<_>> =
                    item.try_iter()?.map(|part| kept.add(&part?)).collect();
                spans.add_block(parts?);
            } else {
                let (start, bytes) = kept.add(&item)?;
                spans.add(start, bytes);
            }
        }
        let is_writable = kept.buffers.iter().all(|buffer| !buffer.readonly());
        Ok(Self::spans(spans, is_writable, Arc::new(kept)))
    }

    /// Blocks at addresses. `pointers` and `sizes` (in bytes) have the same length, a multiple of `count`. The first
    /// `len(pointers) / count` spans are the first block, and so on. `keep` is referenced until the jobs have ended.
    ///
    /// The memory must be valid host memory: a wrong address crashes the process, as with `ctypes`.
    #[staticmethod]
    #[pyo3(signature = (pointers, sizes, count, *, keep, writable = true))]
    fn at(
        pointers: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        count: usize,
        keep: Py<PyAny>,
        writable: bool,
    ) -> PyResult<Self> {
        let (pointers, sizes) = (ids(pointers)?, ids(sizes)?);
        let each = pointers.len().checked_div(count).unwrap_or(0);
        if pointers.len() != sizes.len() || each * count != pointers.len() {
            let (pointers, sizes) = (pointers.len(), sizes.len());
            return Err(PyValueError::new_err(format!(
                "{pointers} pointers and {sizes} sizes for {count} blocks; pass the same number for each block"
            )));
        }
        let mut spans = Spans::new();
        for (pointers, sizes) in pointers.chunks(each.max(1)).zip(sizes.chunks(each.max(1))) {
            let parts: Option<Vec<_>> = pointers
                .iter()
                .zip(sizes)
                .map(|(&pointer, &bytes)| Some((address(pointer)?, bytes)))
                .collect();
            let parts = parts.ok_or_else(|| PyValueError::new_err("a pointer is 0"))?;
            spans.add_block(parts);
        }
        Ok(Self::spans(spans, writable, Arc::new(KeptObjects::object(keep))))
    }

    fn __len__(&self) -> usize {
        match &self.memory {
            BlockMemory::Spans(spans) => spans.len(),
            BlockMemory::Cache { blocks, .. } => blocks.len(),
        }
    }
}

fn address(pointer: usize) -> Option<NonNull<u8>> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(pointer))
}

/// A buffer of rows of equal size, exported once. `rows` selects rows as blocks without accessing the buffer.
///
/// A store may pin the buffer's pages for direct I/O. So do not discard its pages while the region exists
/// (`mmap.madvise` with `MADV_DONTNEED` or `MADV_REMOVE`, or a hole in its file): a get would fill the pages that were
/// there before.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Region {
    /// The memory, if it is writable, drops before its export is released.
    bound: Mutex<Option<(Option<IoMemory>, Arc<KeptObjects>)>>,
    start: usize,
    row_bytes: usize,
    count: usize,
    is_writable: bool,
}

#[pymethods]
impl Region {
    /// Exports a contiguous buffer of rows of `row_bytes` bytes.
    ///
    /// Raises `BufferError` for memory with gaps, and `ValueError` if the buffer is not a whole number of rows.
    #[new]
    fn new(buffer: &Bound<'_, PyAny>, row_bytes: usize) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(buffer)?;
        let bytes = buffer.len_bytes();
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the buffer has gaps; pass contiguous memory"));
        }
        let count = bytes.checked_div(row_bytes).unwrap_or(0);
        if count == 0 || count * row_bytes != bytes {
            return Err(PyValueError::new_err(format!(
                "the buffer has {bytes} bytes, which is not a whole number of rows of {row_bytes}"
            )));
        }
        let start = buffer.buf_ptr().expose_provenance();
        let is_writable = !buffer.readonly();
        let kept = KeptObjects { buffers: vec![buffer], objects: Vec::new() };
        let range = address(start).filter(|_| is_writable).map(|start| IoBuffer {
            address: HostAddress::new(start),
            length: ByteCount::from_usize(bytes),
        });
        // SAFETY: the export keeps the buffer where it is until the memory was dropped. By the documentation of
        // `Region`, Python's caller promises that its pages are not discarded.
        let memory = range.map(|range| unsafe { IoMemory::new(range) });
        let bound = Mutex::new(Some((memory, Arc::new(kept))));
        Ok(Self { bound, start, row_bytes, count, is_writable })
    }

    /// Returns the rows with these ids (a NumPy array, a buffer or a list of integers), as blocks.
    ///
    /// Raises `IndexError` for an id that is out of range, and `ValueError` after `release`.
    fn rows(&self, numbers: &Bound<'_, PyAny>) -> PyResult<Blocks> {
        let kept = lock(&self.bound).clone();
        let (memory, kept) =
            kept.ok_or_else(|| PyValueError::new_err("the region was released"))?;
        let mut spans = Spans::new();
        if let Some(memory) = &memory {
            spans = spans.within(memory);
        }
        for row in ids(numbers)? {
            if row >= self.count {
                return Err(PyIndexError::new_err(format!(
                    "row {row} of a region of {} rows",
                    self.count
                )));
            }
            let start = address(self.start + row * self.row_bytes);
            spans.add(start.unwrap_or(NonNull::dangling()), self.row_bytes);
        }
        Ok(Blocks::spans(spans, self.is_writable, kept))
    }

    /// Releases the buffer. It stays exported until the jobs that use it have ended.
    fn release(&self, py: Python<'_>) {
        let (memory, kept) = lock(&self.bound).take().unzip();
        // It may wait for a thread that registers memory with the kernel.
        py.detach(|| drop(memory));
        drop(kept);
        release_ended(py);
    }

    fn __len__(&self) -> usize {
        self.count
    }
}
