//! The state of the simulated driver.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::arena::Arena;
use crate::capture::Capture;
use crate::code::{Code, Outcome};
use crate::config::Config;
use crate::faults::Faults;
use crate::pools::Pool;
use crate::ptx::{Kernel, Module};
use crate::random::Random;
use crate::space::{Owner, Space, host_pointer};
use crate::work::Work;

/// The caller: the thread, and its current context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pub context: u64,
    pub thread: u64,
}

/// A position in a stream: its work up to and including this number.
pub type Mark = (u64, u64);

#[derive(Debug)]
pub struct Device {
    /// The primary context, while it is retained.
    pub primary: Option<u64>,
    pub retained: u64,
    /// The bytes of allocations and pools.
    pub used: u64,
    pub default_pool: u64,
    pub current_pool: u64,
}

#[derive(Debug)]
pub struct Context {
    pub device: u32,
    pub lost: Option<Code>,
    /// The stream of a null handle.
    pub legacy: u64,
    /// The streams of the per-thread default handle.
    pub of_threads: BTreeMap<u64, u64>,
    /// The contexts whose memory this context's kernels can access.
    pub peers: BTreeSet<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    Legacy,
    PerThread,
    Created,
}

#[derive(Debug)]
pub struct Stream {
    pub context: u64,
    pub kind: StreamKind,
    /// Whether it is non-blocking: it does not wait for the legacy default stream.
    pub is_non_blocking: bool,
    pub priority: i32,
    pub queue: VecDeque<Operation>,
    /// The number of the last submitted operation.
    pub submitted: u64,
    /// The number of the last operation that has run.
    pub completed: u64,
    /// Whether a test holds its work back.
    pub is_held: bool,
    pub is_destroyed: bool,
    /// The capture that records submitted work.
    pub capture: Option<u64>,
}

#[derive(Debug)]
pub struct Operation {
    /// The work that must run before it.
    pub after: Vec<Mark>,
    pub work: Work,
}

#[derive(Debug)]
pub struct Event {
    pub context: u64,
    pub flags: u32,
    /// The mark of the last record.
    pub mark: Option<Mark>,
    /// The time at which the stream reached a mark.
    pub time: Option<(Mark, Instant)>,
    /// The capture in which it was recorded last.
    pub captured: Option<u64>,
}

#[derive(Debug)]
pub struct Function {
    pub module: u64,
    pub context: u64,
    pub kernel: Arc<Kernel>,
}

/// A host function that a stream has reached.
#[derive(Clone, Copy, Debug)]
pub struct Callback {
    pub stream: u64,
    pub function: usize,
    pub data: usize,
}

#[derive(Debug)]
pub struct State {
    pub config: Config,
    pub random: Random,
    pub devices: Vec<Device>,
    pub contexts: BTreeMap<u64, Context>,
    pub streams: BTreeMap<u64, Stream>,
    pub events: BTreeMap<u64, Event>,
    pub pools: BTreeMap<u64, Pool>,
    pub modules: BTreeMap<u64, (u64, Arc<Module>)>,
    pub functions: BTreeMap<u64, Function>,
    pub space: Space,
    pub faults: Faults,
    pub captures: BTreeMap<u64, Capture>,
    pub callbacks: VecDeque<Callback>,
    /// The number of operations that may still run, if it is limited.
    pub operations_left: Option<u64>,
    /// The number of calls: the background thread waits until there are no more.
    pub activity: u64,
    pub is_ending: bool,
    next_handle: u64,
}

impl State {
    /// # Errors
    ///
    /// The system's error, if it does not reserve the addresses.
    pub fn new(config: Config) -> Outcome<Self> {
        let arenas: Result<Vec<Arena>, _> =
            (0..config.devices).map(|_| Arena::new(config.memory)).collect();
        let space = Space::new(arenas.map_err(|_| Code::OPERATING_SYSTEM)?);
        let mut state = Self {
            random: Random::new(config.seed),
            devices: Vec::new(),
            contexts: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            pools: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            space,
            faults: Faults::default(),
            operations_left: None,
            captures: BTreeMap::new(),
            callbacks: VecDeque::new(),
            activity: 0,
            is_ending: false,
            next_handle: 0x10_0000,
            config,
        };
        for device in 0..state.config.devices {
            let pool = state.new_handle();
            state.pools.insert(pool, Pool::new(device));
            let device = Device {
                primary: None,
                retained: 0,
                used: 0,
                default_pool: pool,
                current_pool: pool,
            };
            state.devices.push(device);
        }
        Ok(state)
    }

    /// Returns a new handle. Handles are never reused, so a stale handle is refused and names no
    /// other object.
    pub const fn new_handle(&mut self) -> u64 {
        self.next_handle += 16;
        self.next_handle
    }

    pub fn device(&mut self, device: u32) -> Outcome<&mut Device> {
        let index = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
        self.devices.get_mut(index).ok_or(Code::INVALID_DEVICE)
    }

    /// The context, if it is alive and not lost.
    pub fn context(&mut self, context: u64) -> Outcome<&mut Context> {
        if context == 0 {
            return Err(Code::INVALID_CONTEXT);
        }
        let context = self.contexts.get_mut(&context).ok_or(Code::CONTEXT_IS_DESTROYED)?;
        match context.lost {
            Some(code) => Err(code),
            None => Ok(context),
        }
    }

    /// The current context's device.
    pub fn current_device(&mut self, caller: Caller) -> Outcome<u32> {
        Ok(self.context(caller.context)?.device)
    }

    pub fn new_context(&mut self, device: u32) -> u64 {
        let context = self.new_handle();
        let legacy = self.new_stream(context, StreamKind::Legacy, false, 0);
        let (of_threads, peers) = (BTreeMap::new(), BTreeSet::new());
        self.contexts.insert(context, Context { device, lost: None, legacy, of_threads, peers });
        context
    }

    pub fn new_stream(
        &mut self,
        context: u64,
        kind: StreamKind,
        is_non_blocking: bool,
        priority: i32,
    ) -> u64 {
        let handle = self.new_handle();
        let stream = Stream {
            context,
            kind,
            is_non_blocking,
            priority,
            queue: VecDeque::new(),
            submitted: 0,
            completed: 0,
            is_held: false,
            is_destroyed: false,
            capture: None,
        };
        self.streams.insert(handle, stream);
        handle
    }

    /// The stream of a handle, for this caller: a created stream, or a default stream.
    pub fn stream(&mut self, caller: Caller, handle: u64) -> Outcome<u64> {
        const LEGACY: u64 = 1;
        const PER_THREAD: u64 = 2;
        match handle {
            0 | LEGACY => Ok(self.context(caller.context)?.legacy),
            PER_THREAD => {
                let context = self.context(caller.context)?;
                if let Some(&stream) = context.of_threads.get(&caller.thread) {
                    return Ok(stream);
                }
                let stream = self.new_stream(caller.context, StreamKind::PerThread, false, 0);
                self.context(caller.context)?.of_threads.insert(caller.thread, stream);
                Ok(stream)
            }
            handle => {
                self.context(caller.context)?;
                let stream = self.streams.get(&handle).ok_or(Code::INVALID_HANDLE)?;
                let context = stream.context;
                if stream.is_destroyed {
                    return Err(Code::INVALID_HANDLE);
                }
                self.context(context)?;
                Ok(handle)
            }
        }
    }

    /// The last work of every stream of a context.
    pub fn marks_of(&self, context: u64) -> Vec<Mark> {
        let own = self.streams.iter().filter(|(_, stream)| stream.context == context);
        own.map(|(&handle, stream)| (handle, stream.submitted)).collect()
    }

    pub fn is_done(&self, (stream, number): Mark) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.completed >= number)
    }

    /// Loses a context: its submitted work will not run, and every call returns the code.
    pub fn lose(&mut self, context: u64, code: Code) {
        let Some(lost) = self.contexts.get_mut(&context) else { return };
        lost.lost = lost.lost.or(Some(code));
        for stream in self.streams.values_mut().filter(|stream| stream.context == context) {
            stream.queue.clear();
            stream.completed = stream.submitted;
        }
        self.forget_callbacks();
        self.streams.retain(|_, stream| !stream.is_destroyed || !stream.queue.is_empty());
    }

    /// Removes host functions of streams that will not continue.
    fn forget_callbacks(&mut self) {
        let streams = &self.streams;
        self.callbacks.retain(|callback| {
            streams.get(&callback.stream).is_some_and(|stream| !stream.queue.is_empty())
        });
    }

    /// Ends a context and its objects.
    pub fn end_context(&mut self, context: u64) {
        self.contexts.remove(&context);
        self.streams.retain(|_, stream| stream.context != context);
        self.forget_callbacks();
        self.events.retain(|_, event| event.context != context);
        self.modules.retain(|_, (owner, _)| *owner != context);
        self.functions.retain(|_, function| function.context != context);
        for base in self.space.owned_by(Owner::Context(context)) {
            self.free_now(base);
        }
        for host in self.space.pinned_in(context) {
            self.unpin(host);
        }
    }

    /// Frees an allocation into the device, or into its pool.
    pub fn free_now(&mut self, base: u64) {
        let Some(allocation) = self.space.release(base) else { return };
        match allocation.owner {
            Owner::Context(_) => {
                if let Ok(device) = self.device(allocation.device) {
                    device.used = device.used.saturating_sub(granted(allocation.length));
                }
            }
            Owner::Pool(pool) => self.return_to_pool(pool, granted(allocation.length)),
        }
    }

    /// Unpins host memory; memory that the driver mapped is unmapped.
    pub fn unpin(&mut self, host: u64) {
        let Some(pinned) = self.space.unpin(host).filter(|pinned| pinned.is_owned) else { return };
        if let Ok(length) = usize::try_from(pinned.length) {
            // SAFETY: the driver mapped it, and the caller has freed it.
            let _ = unsafe { rustix::mm::munmap(host_pointer(host).cast(), length) };
        }
    }
}

/// The device bytes of an allocation: whole large pages, or parts of one.
pub const fn granted(length: u64) -> u64 {
    if length >= 1 << 20 { length.next_multiple_of(2 << 20) } else { length.next_multiple_of(512) }
}
