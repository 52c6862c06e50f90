//! The store.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use terrane_core::ByteCount;
use terrane_cuda::Context;
use terrane_store::disk::Namespace;
use terrane_store::{BlockGroup, DiskTier, Presence, Recovery, Store as NativeStore, TierId};

use crate::cache::KvCache;
use crate::device;
use crate::errors;
use crate::events::Events;
use crate::jobs::{JobBlocks, Submission, submission};
use crate::keys::Keys;
use crate::manager::Manager;
use crate::memory::{Blocks, release_ended};
use crate::numbers::moment;
use crate::open::{CLOSE_TIMEOUT, OpenStore};
use crate::options::{self, BlockShape, Group, Write};
use crate::outcome::Job;
use crate::snapshot;
use crate::tier::Tier;

/// Blocks of bytes by key, on disk, and optionally in memory tiers above the disk.
///
/// A key names content: two blocks with the same key have equal bytes. A block that is damaged on disk is reported as
/// absent, and never returned with wrong bytes. One process at a time owns the directory.
///
/// - `directory`: created if it does not exist. The store creates a folder named `namespace` in it.
/// - `capacity`: bytes on disk, which the store reserves when it is opened. Blocks are evicted to stay within it.
/// - `groups`: tuples of a name, the largest block in bytes or a `KvCache` whose blocks are stored, and optionally a
///   weight. A group's share of each tier is its weight (1 by default) divided by the sum of all weights.
/// - `namespace`, `fields`: the values on which the blocks depend, such as model and revision. A folder with other
///   fields is refused with `NamespaceError`.
/// - `persistent`: False empties the store when it is opened.
/// - `read_only`: refuses puts.
/// - `host_bytes`: a tier of system memory above the disk; 0 for none. Short for `tiers=[Tier.system(host_bytes)]`.
/// - `tiers`: tiers of memory above the disk, the fastest first. Blocks of a device need one in host memory.
/// - `write`: when a block is written to slower tiers. "through": with the put, which ends when the block is on disk.
///   "back": when the fastest tier evicts it, or by `sync`. A number: after that many uses, or by `sync`; before that
///   it may be lost.
/// - `manager`: the `Manager` that copies between memories. By default, the store creates one for the devices of its
///   groups and tiers.
/// - `keep_keys`: keeps the keys in memory, for `events` and for the checkpoints on disk.
///
/// When a store is freed, it is closed: its jobs have ten seconds to end, and are then cancelled.
///
/// Raises `InUseError`, `NamespaceError` or `StoreError`.
#[pyclass(frozen, weakref, module = "terrane_kv")]
pub(crate) struct Store {
    open: Arc<OpenStore>,
    namespace: String,
    recovery: Recovery,
    /// The caches of tiers. A Python thread frees them after the store.
    _caches: Vec<Py<KvCache>>,
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (
        directory, capacity, *, groups, namespace, fields = None, persistent = true, read_only = false,
        host_bytes = 0, tiers = Vec::new(), write = Write::Named(String::from("through")), manager = None,
        keep_keys = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        #[pyo3(from_py_with = options::bytes)] capacity: u64,
        #[pyo3(from_py_with = options::groups)] groups: Vec<Group<'_>>,
        namespace: String,
        fields: Option<BTreeMap<String, String>>,
        persistent: bool,
        read_only: bool,
        #[pyo3(from_py_with = options::bytes)] host_bytes: u64,
        tiers: Vec<Bound<'_, Tier>>,
        write: Write,
        manager: Option<Bound<'_, Manager>>,
        keep_keys: bool,
    ) -> PyResult<Self> {
        let fields = fields.unwrap_or_default();
        let checked = Namespace::new(namespace.clone(), fields)
            .map_err(|error| errors::catalog(&error, errors::text(&error)))?;
        let disk = DiskTier::new(&directory, ByteCount::new(capacity)).read_only(read_only);
        let mut builder = NativeStore::builder()
            .disk(disk)
            .namespace(checked)
            .persistent(persistent)
            .write_policy(write.policy()?)
            .keep_keys(keep_keys);
        let mut contexts: Vec<Context> = Vec::new();
        for Group { name, blocks, weight } in groups {
            if let BlockShape::Cache(cache) = &blocks {
                contexts.extend(cache.get().context().cloned());
            }
            let group = match blocks {
                BlockShape::Bytes(bytes) => BlockGroup::new(name, bytes),
                BlockShape::Cache(cache) => {
                    BlockGroup::of_layout(name, cache.get().endpoint().layout())
                }
            };
            builder = builder.group(group.weight(weight));
        }
        if !contexts.is_empty() && tiers.is_empty() && host_bytes == 0 {
            return Err(PyValueError::new_err(
                "a group is in device memory, and its blocks pass through host memory; add tiers=[Tier.pinned(bytes)]",
            ));
        }
        let mut kept = Vec::new();
        for tier in &tiers {
            let tier = tier.get();
            builder = builder.memory_tier(py.detach(|| tier.native())?);
            contexts.extend(py.detach(|| tier.contexts())?);
            kept.extend(tier.caches(py));
        }
        if host_bytes > 0 {
            builder = builder.host(ByteCount::new(host_bytes));
        }
        contexts.sort_by_key(|context| context.device().id);
        contexts.dedup_by_key(|context| context.device().id);
        builder = match manager {
            Some(manager) => builder.manager(manager.get().native()?),
            None if contexts.is_empty() => builder,
            None => builder.manager(&py.detach(|| device::manager(&contexts))?),
        };
        let opened = py.detach(|| {
            create(&directory)?;
            builder.open().map_err(|error| errors::exception(&error))
        });
        let (store, recovery) = opened?;
        Ok(Self { open: OpenStore::new(store), namespace, recovery, _caches: kept })
    }

    /// The namespace, which is also the name of its folder.
    #[getter]
    fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The results of the recovery at the start: `found` blocks, `torn` and `damaged` records, `dropped` blocks, and
    /// `seconds`.
    #[getter]
    fn recovery<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let numbers = PyDict::new(py);
        numbers.set_item("found", self.recovery.found)?;
        numbers.set_item("torn", self.recovery.torn)?;
        numbers.set_item("damaged", self.recovery.damaged)?;
        numbers.set_item("dropped", self.recovery.dropped)?;
        numbers.set_item("seconds", self.recovery.took.as_secs_f64())?;
        Ok(numbers)
    }

    /// Stores blocks: one for each key, as `Blocks` or a list of buffers. Keys that are already stored are skipped.
    /// It does not wait for I/O.
    ///
    /// Options: `group`, `priority` ("low", "normal", "high"), `timeout` in seconds, `queue` (a `CompletionQueue`)
    /// with `tag`, and `durable`: the job ends when the blocks survive a power failure. For blocks of a device also
    /// `stream` (a handle): the job runs after the work of that CUDA stream, instead of after the work of the
    /// tensors' library. −1 means that the device has completed its work.
    ///
    /// Raises `StoreError` if the job is refused, and `BufferError` for memory with gaps.
    #[pyo3(signature = (keys, blocks, **options))]
    fn put(
        &self,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Job> {
        let py = keys.py();
        let (keys, blocks) = (Keys::of(keys)?, Blocks::from_argument(blocks)?);
        let blocks = blocks.get();
        let Submission { options, own } = submission(py, options, JobBlocks::Source(blocks))?;
        // SAFETY: the job gets `kept` as its guard.
        let (source, kept) = (unsafe { blocks.native() }, blocks.kept());
        let store = self.native()?;
        let job = py.detach(|| store.put(&keys.slices(), source, options, kept));
        let job = job.map_err(|refused| errors::exception(&refused.cause));
        release_ended(py);
        Ok(Job::new(job?, own))
    }

    /// Reads blocks into memory: one for each key, as writable `Blocks` or a list of writable buffers. The
    /// destination must have the stored length. It does not wait for I/O. The options are those of `put`; `durable` has
    /// no effect. With `layer_by_layer`, blocks of a `KvCache` are copied layer by layer from memory tiers, and
    /// `Job.wait_layer` waits for a layer.
    ///
    /// Each key has its own result: an absent or damaged block does not affect the others.
    ///
    /// Raises `StoreError` if the job is refused, and `BufferError` for memory that is read-only or has gaps.
    #[pyo3(signature = (keys, blocks, **options))]
    fn get(
        &self,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Job> {
        let py = keys.py();
        let (keys, blocks) = (Keys::of(keys)?, Blocks::from_argument(blocks)?);
        let blocks = blocks.get();
        blocks.check_writable()?;
        let Submission { options, own } = submission(py, options, JobBlocks::Destination(blocks))?;
        // SAFETY: the job gets `kept` as its guard, and the memory is writable.
        let (destination, kept) = (unsafe { blocks.native() }, blocks.kept());
        let store = self.native()?;
        let job = py.detach(|| store.get(&keys.slices(), destination, options, kept));
        let job = job.map_err(|refused| errors::exception(&refused.cause));
        release_ended(py);
        Ok(Job::new(job?, own).on_device(blocks.context()))
    }

    /// Copies blocks to the fastest memory tier, so that a later get reads them from there. The options are those of
    /// `put`, without `stream`; `durable` has no effect.
    #[pyo3(signature = (keys, **options))]
    fn promote(
        &self,
        keys: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Job> {
        let py = keys.py();
        let keys = Keys::of(keys)?;
        let Submission { options, own } = submission(py, options, JobBlocks::None)?;
        let store = self.native()?;
        let job = py.detach(|| store.promote(&keys.slices(), TierId::new(0), options));
        Ok(Job::new(job.map_err(|error| errors::exception(&error))?, own))
    }

    /// Removes keys. They are absent when this returns. The job ends when the removal survives a restart. The options
    /// are those of `put`, without `stream`; `durable` has no effect.
    #[pyo3(signature = (keys, **options))]
    fn remove(
        &self,
        keys: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Job> {
        let py = keys.py();
        let keys = Keys::of(keys)?;
        let Submission { options, own } = submission(py, options, JobBlocks::None)?;
        let store = self.native()?;
        let job = py.detach(|| store.remove_with(&keys.slices(), options));
        Ok(Job::new(job.map_err(|error| errors::exception(&error))?, own))
    }

    /// The state of one key: 0 absent, 1 being written, 2 ready, 3 ready and being copied to a faster tier.
    #[pyo3(signature = (key, *, group = 0))]
    fn presence(&self, key: &Bound<'_, PyAny>, group: u16) -> PyResult<u8> {
        let mut state = [Presence::Absent];
        let Some(store) = self.owned()? else { return Ok(0) };
        if let Ok(key) = key.cast::<PyBytes>() {
            store.presence(group, &[key.as_bytes()], &mut state);
        } else {
            store.presence(group, &Keys::one(key)?.slices(), &mut state);
        }
        Ok(code(state[0]))
    }

    /// The states of keys, as `bytes` with one number for each key.
    #[pyo3(signature = (keys, *, group = 0))]
    fn presences<'py>(
        &self,
        keys: &Bound<'py, PyAny>,
        group: u16,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let copied = Keys::of(keys)?;
        let slices = copied.slices();
        let mut states = vec![Presence::Absent; slices.len()];
        if let Some(store) = self.owned()? {
            store.presence(group, &slices, &mut states);
        }
        let codes: Vec<u8> = states.into_iter().map(code).collect();
        Ok(PyBytes::new(keys.py(), &codes))
    }

    /// The number of leading keys that are ready.
    #[pyo3(signature = (keys, *, group = 0))]
    fn prefix(&self, keys: &Bound<'_, PyAny>, group: u16) -> PyResult<usize> {
        let keys = Keys::of(keys)?;
        Ok(self.owned()?.map_or(0, |store| store.prefix(group, &keys.slices())))
    }

    /// Records a use of each key, so that it is evicted later.
    #[pyo3(signature = (keys, *, group = 0))]
    fn touch(&self, keys: &Bound<'_, PyAny>, group: u16) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        if let Some(store) = self.owned()? {
            store.touch(group, &keys.slices());
        }
        Ok(())
    }

    /// Explains in a sentence why a key is, or is not, in the store.
    #[pyo3(signature = (key, *, group = 0))]
    fn why(&self, key: &Bound<'_, PyAny>, group: u16) -> PyResult<String> {
        let keys = Keys::one(key)?;
        let slices = keys.slices();
        Ok(self.native()?.why(group, slices.first().copied().unwrap_or_default()).to_string())
    }

    /// Removes all blocks, and waits until the removal survives a restart.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.finish(py, NativeStore::clear)
    }

    /// Waits until all earlier puts survive a power failure.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.finish(py, NativeStore::sync)
    }

    /// The changes from now on. At most `capacity` changes are buffered.
    fn events(&self, capacity: usize) -> PyResult<Events> {
        self.native()?.events(capacity).map(Events::new).map_err(|error| errors::exception(&error))
    }

    /// The numbers of the store, by name.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        snapshot::dictionary(py, &self.native()?.snapshot())
    }

    /// The capabilities of the file system and the kernel, as lines of text.
    fn capabilities(&self) -> PyResult<String> {
        Ok(self.native()?.capabilities().to_string())
    }

    /// Waits until no job runs, for at most `timeout` seconds. Returns the number of jobs that still run.
    #[pyo3(signature = (timeout = 30.0))]
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<usize> {
        let deadline = moment(timeout)?;
        let store = self.owned()?;
        let remaining = py.detach(|| store.map_or(0, |store| store.drain(deadline).left));
        release_ended(py);
        Ok(remaining)
    }

    /// Refuses further jobs, and waits for running jobs. After `timeout` seconds, cancels the remaining ones. Then
    /// makes the blocks durable, and ends the threads. Returns the number of cancelled jobs. A second call does
    /// nothing.
    ///
    /// It waits beyond `timeout` for a request that the device is working on, because the request's memory is in use.
    /// It does so too for a job that waits for a CUDA stream.
    #[pyo3(signature = (timeout = 30.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<usize> {
        let deadline = moment(timeout)?;
        let remaining = py.detach(|| self.open.close(deadline));
        release_ended(py);
        Ok(remaining)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _exception: &Bound<'_, pyo3::types::PyTuple>,
    ) -> PyResult<()> {
        self.close(py, 30.0).map(drop)
    }
}

impl Store {
    /// The store, or `None` if it is closed. Answers about a closed store are those about an empty one.
    fn owned(&self) -> PyResult<Option<NativeStore>> {
        self.open.owned().map_err(|error| errors::exception(&error))
    }

    fn native(&self) -> PyResult<NativeStore> {
        self.open.require().map_err(|error| errors::exception(&error))
    }

    /// Waits for a job that concerns the whole store.
    fn finish(
        &self,
        py: Python<'_>,
        submit: fn(&NativeStore) -> Result<terrane_store::Job, terrane_store::StoreError>,
    ) -> PyResult<()> {
        let store = self.native()?;
        let outcome = py
            .detach(|| submit(&store).map(terrane_store::Job::wait))
            .map_err(|error| errors::exception(&error))?;
        match outcome.results.iter().find(|result| !result.is_ok()) {
            Some(result) => Err(errors::StoreError::new_err(result.to_string())),
            None => Ok(()),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Closing waits for jobs, so the GIL is released.
        Python::try_attach(|py| py.detach(|| self.open.close(Instant::now() + CLOSE_TIMEOUT)));
    }
}

fn code(presence: Presence) -> u8 {
    match presence {
        Presence::Writing => 1,
        Presence::Ready { .. } => 2,
        Presence::Loading { .. } => 3,
        _ => 0,
    }
}

/// Creates a directory for a store, which only its owner may access.
fn create(directory: &Path) -> PyResult<()> {
    if directory.is_dir() {
        return Ok(());
    }
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        fs::create_dir_all(parent).map_err(|error| unusable(parent, &error))?;
    }
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(unusable(directory, &error))
        }
        _ => Ok(()),
    }
}

fn unusable(directory: &Path, error: &std::io::Error) -> PyErr {
    let text = format!("cannot create {}: {error}; choose another directory", directory.display());
    match error.raw_os_error() {
        Some(number) => PyOSError::new_err((number, text)),
        None => PyValueError::new_err(text),
    }
}
