//! The engine that copies blocks between a device and pinned memory, within the device, and
//! between devices.

mod abandoned;
mod batch;
mod calibration;
mod choice;
mod cutter;
mod feeder;
mod flight;
mod launch;
mod lists;
mod options;
mod order;
mod packing;
mod pin;
mod quote;
mod reach;
mod scratch;
mod streams;
mod submit;
mod tables;
mod watch;
mod work;

use std::borrow::Cow;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Sender, unbounded};
use terrane_core::{
    BoxedCause, Capability, CapabilityReport, CapabilityStatus, Reason, Requirement,
};
use terrane_transfer::engines::threads;
use terrane_transfer::{
    CopyEngine, CopyFailure, CopyJob, Declined, DeviceOrder, PinnedOrder, Quote, Terms,
    TransferPlan,
};

pub use calibration::{Calibration, CalibrationOptions, Direction, PathCost};
pub use options::{CopyPath, DeviceEngineOptions};

use crate::context::Context;
use crate::driver::{BesideCaptures, DriverCode};
use crate::error::CudaError;
use crate::kernels::Kernels;
use choice::{Choice, Corrections};
use feeder::{Desk, Feed, Feeder};
use flight::engine_failure;
use lists::ListPool;
use order::Peers;
use quote::device_of;
use reach::ReachCache;
use streams::StreamPool;
use tables::Tables;
use watch::{Task, Watch, Watchers};

/// Copies blocks between a device's memory and pinned host memory, within the device's memory, and
/// between it and the memory of another device.
///
/// Each transfer takes one of several [paths](CopyPath): the one that a [`Calibration`] predicts to
/// be the fastest.
///
/// The thread that submits a small transfer puts it on a stream. That takes some microseconds and
/// does not block. A thread of the engine submits a large transfer to the device in parts. It takes
/// one part of each such transfer in turn, so that no transfer occupies the wire for long.
///
/// The engine also serves pinned memory that other libraries have locked (PyTorch's).
///
/// Dropping the engine lets its threads finish the submitted work, and joins them. A thread that
/// finishes transfers must not wait for others. If the engine drops on such a thread, its threads
/// end without a join. In a process that was forked after the engine was created, a transfer fails
/// with [`CudaError::Forked`], and dropping the engine waits for nothing.
///
/// It copies between the device and *pinned* memory. For other host memory and for files, a
/// [`RelayEngine`](terrane_transfer::engines::RelayEngine) combines it with the engine that reaches
/// those. One manager holds all engines, and each transfer goes to the fastest one.
///
/// # Example
///
/// The example copies blocks of a model from the device to pinned memory. It brings them back to
/// other blocks, layer by layer, while compute on the first layers runs:
///
/// ```
/// use std::sync::Arc;
///
/// use terrane_core::DeviceId;
/// use terrane_cuda::{
///     Context, DeviceAllocator, DeviceEngine, DeviceEngineOptions, PinnedAllocator,
///     PinnedOptions, Stream,
/// };
/// use terrane_layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig};
/// use terrane_transfer::{Endpoint, Transfer, TransferManager};
///
/// fn offload_and_bring_back() -> Result<(), Box<dyn std::error::Error>> {
///     let context = Context::primary(DeviceId::new(0))?;
///     // Llama 3.1 8B: 32 layers of K and V, 8 heads of 128 numbers of 2 bytes, 16 tokens a block.
///     let config = LayoutConfig::builder().num_blocks(16).num_layers(32).outer_dim(2)
///         .page_size(16).inner_dim(8 * 128).element(ElementFormat::Width(2)).build()?;
///
///     // On the device K and V of each layer; in pinned memory each block in one piece. Tensors
///     // that there are already are adopted: see `Context::device_span`.
///     let device = DeviceAllocator::new(&context);
///     let cache = LayoutBuilder::new(config).layer_separate(BlockDimension::Second)
///         .allocate(&device).unregistered().build()?;
///     let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?;
///     let tier = LayoutBuilder::new(config).fully_contiguous()
///         .allocate(&pinned).unregistered().build()?;
///     let (cache, tier) = (Endpoint::new(cache)?, Endpoint::new(tier)?);
///     let engine = DeviceEngine::new(&context, DeviceEngineOptions::default())?;
///     let manager = TransferManager::new([Arc::new(engine) as _]);
///
///     // The stream on which the model runs; `Stream::borrow` takes another library's.
///     let compute = Stream::new(&context)?;
///     // SAFETY: the stream lives until both transfers have ended.
///     let after_compute = unsafe { compute.order() };
///
///     // Out, behind what has been submitted to the stream. The submit waits for nothing; the
///     // guard, whatever it is, comes back with the outcome.
///     let out = Transfer::new(&cache, &tier).blocks(&[5, 9, 2], &[0, 1, 2]);
///     let out = out.device_order(after_compute);
///     println!("{}", manager.explain(&out)?);
///     let completion = manager.submit(out, "my lock on blocks 5, 9 and 2")?;
///     println!("{}", completion.wait().result?);
///
///     // Home. Each layer's compute is submitted as soon as the layer is on its way.
///     let home = Transfer::new(&tier, &cache).blocks(&[0, 1, 2], &[7, 8, 3]);
///     let completion = manager.submit(home.device_order(after_compute).layer_wise(), ())?;
///     let layers = completion.layers().ok_or("it is layer by layer")?;
///     for layer in layers.range() {
///         compute.wait_for_layer(&layers, layer)?;
///         // Here the kernels of this layer are launched on `compute`.
///     }
///     println!("{}", completion.wait().result?);
///     compute.synchronize()?;
///     Ok(())
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// match terrane_cuda::probe() {
///     Ok(_) => offload_and_bring_back()?,
///     Err(reason) => println!("without a device: {reason}"),
/// }
/// # Ok(())
/// # }
/// ```
pub struct DeviceEngine {
    shared: Arc<Shared>,
    /// Counters for copies to the device, to the host, and between devices' memories.
    feeders: Option<[(Sender<Feed>, Arc<Desk>); 3]>,
    watchers: Option<Watchers>,
    /// The counter for threads that wait until jobs may begin.
    gates: Option<Watchers>,
    threads: Vec<JoinHandle<()>>,
}

/// State shared by the engine's threads.
struct Shared {
    context: Context,
    options: DeviceEngineOptions,
    kernels: Option<Kernels>,
    /// The result of the request for kernels.
    capabilities: CapabilityReport,
    reach: ReachCache,
    tables: Tables,
    lists: Arc<ListPool>,
    /// The streams that jobs copy on.
    streams: Arc<StreamPool>,
    /// The streams on which unstarted jobs wait, if their order is another library's event. There
    /// are as many as there are such jobs at a time.
    gate_streams: Arc<StreamPool>,
    peers: Arc<Peers>,
    calibration: Calibration,
    corrections: Arc<Corrections>,
    has_batches: bool,
}

/// Threads that wait until large transfers may begin on the device. The last thread polls all
/// transfers that the others cannot serve.
const GATE_KEEPERS: u32 = 2;

/// Streams that are created in advance, so that the first submits need not create any.
const READY: u32 = 4;
const READY_GATES: u32 = 1;

impl Shared {
    /// The thread blocks of a kernel within the device's memory.
    fn relayout_ctas(&self) -> u32 {
        /// A kernel counts its threads in 32 bits.
        const MOST: u32 = 1 << 20;
        self.options.relayout_ctas.map_or(MOST, |ctas| ctas.get().min(MOST))
    }
}

impl DeviceEngine {
    /// Creates an engine for the context's device. Loads the kernels, if the driver accepts them,
    /// and starts the threads. The threads are named `terrane-cuda-feed-0` and so on,
    /// `terrane-cuda-gate-0` and `terrane-cuda-wait-0`.
    ///
    /// # Errors
    ///
    /// [`CudaError::KernelsRefused`] if they are [required](DeviceEngineOptions::kernels), the
    /// errors of creating a stream, [`CudaError::Thread`].
    pub fn new(context: &Context, options: DeviceEngineOptions) -> Result<Self, CudaError> {
        let _beside = BesideCaptures::new(context.driver());
        let (kernels, capabilities) = load_kernels(context, options.kernels)?;
        let peers = Arc::default();
        let shared = Arc::new(Shared {
            kernels,
            capabilities,
            reach: ReachCache::new(context, &peers),
            peers,
            tables: Tables::new(context)?,
            lists: ListPool::new(context)?,
            streams: StreamPool::new(context, options.priority, options.streams.get(), READY)?,
            gate_streams: StreamPool::new(context, options.priority, u32::MAX, READY_GATES)?,
            calibration: options.calibration.clone().unwrap_or_default(),
            corrections: Arc::new(Corrections::new(options.learns)),
            has_batches: batch::is_there(context),
            context: context.clone(),
            options,
        });
        let lost = Arc::default();
        let [tasks, gated] = [(); 2].map(|()| Watch::new(&lost, &shared.lists));
        let [watchers, gates] = [&tasks, &gated].map(Watchers::new);
        // If this is dropped on an error, it joins the threads that have been started.
        let mut engine = Self {
            shared,
            feeders: None,
            watchers: Some(watchers),
            gates: Some(gates),
            threads: Vec::new(),
        };
        for number in 0..engine.shared.options.watchers.get() {
            let tasks = Arc::clone(&tasks);
            engine.start(format!("terrane-cuda-wait-{number}"), move || tasks.serve())?;
        }
        for number in 0..GATE_KEEPERS {
            let gated = Arc::clone(&gated);
            engine.start(format!("terrane-cuda-gate-{number}"), move || gated.serve())?;
        }
        let (mut queues, of_all) = (Vec::new(), Arc::default());
        for number in 0..3 {
            let (queue, jobs) = unbounded();
            let Some(watchers) = engine.watchers.clone() else { break };
            let desk = Desk::new(&engine.shared, &of_all);
            let shared = Arc::clone(&engine.shared);
            let feeder = Feeder::new(shared, Arc::clone(&desk), jobs, watchers);
            engine.start(format!("terrane-cuda-feed-{number}"), move || feeder.serve())?;
            queues.push((queue, desk));
        }
        engine.feeders = queues.try_into().ok();
        Ok(engine)
    }

    fn start(
        &mut self,
        name: String,
        serve: impl FnOnce() + Send + 'static,
    ) -> Result<(), CudaError> {
        let shared = Arc::clone(&self.shared);
        let beside = move || {
            // The mode applies for the thread's lifetime, whatever other threads capture.
            let _beside = BesideCaptures::new(shared.context.driver());
            serve();
            // Freeing memory waits for the device. If the engine drops on a thread that must not
            // wait, the last of these threads frees it, after all jobs have ended.
            drop(shared);
        };
        let thread = threads::spawn(name, beside).map_err(|source| CudaError::Thread { source })?;
        self.threads.push(thread);
        Ok(())
    }

    /// The context of the engine's device.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// The options.
    #[must_use]
    pub fn options(&self) -> &DeviceEngineOptions {
        &self.shared.options
    }

    /// The calibration: the predicted costs of the paths.
    #[must_use]
    pub fn calibration(&self) -> &Calibration {
        &self.shared.calibration
    }

    /// Whether it copies with kernels. Its [capabilities](CopyEngine::capabilities) give the reason
    /// if not.
    #[must_use]
    pub fn has_kernels(&self) -> bool {
        self.shared.kernels.is_some()
    }
}

/// Returns the kernels, if they are requested and the driver accepts them, and the result of the
/// request.
fn load_kernels(
    context: &Context,
    requirement: Requirement,
) -> Result<(Option<Kernels>, CapabilityReport), CudaError> {
    let loaded = (requirement != Requirement::Off).then(|| Kernels::load(context));
    let (kernels, status) = match loaded {
        None => (None, CapabilityStatus::NotTried),
        Some(Ok(kernels)) => (Some(kernels), CapabilityStatus::Granted),
        // A present lack of memory says nothing about the driver.
        Some(Err(CudaError::KernelsRefused { code, .. }))
            if requirement == Requirement::Preferred && code != DriverCode::OUT_OF_MEMORY =>
        {
            let operation = "cuModuleLoadDataEx";
            (None, CapabilityStatus::Refused(Reason::Driver { operation, code: code.get() }))
        }
        Some(Err(error)) => return Err(error),
    };
    let mut capabilities = CapabilityReport::default();
    capabilities.record(Capability::CopyKernels, requirement, status);
    Ok((kernels, capabilities))
}

// SAFETY: the work submitted for a job copies the bytes of its plan's runs and of the engine's own
// buffers. `Cargo::finish` finishes the job. It runs after an event behind the last of that work
// has completed, or after the job's streams have been waited for.
unsafe impl CopyEngine for DeviceEngine {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined> {
        let Choice { path, predicted, mut reason } =
            self.choose(plan, terms, self.shared.options.path)?;
        if self.shared.kernels.is_none() {
            reason = Cow::Owned(format!("{reason}; {}", self.shared.capabilities));
        }
        Ok(Quote { path: Cow::Borrowed(path.name()), reason, predicted })
    }

    fn capabilities(&self) -> CapabilityReport {
        self.shared.capabilities.clone()
    }

    fn pin(&self, order: DeviceOrder) -> Result<PinnedOrder, BoxedCause> {
        Ok(pin::pin(order, &self.shared)?)
    }

    fn submit(&self, job: CopyJob) {
        if let Err(error) = self.shared.context.driver().check_process() {
            // None of the engine's threads exists in this process.
            return job.finish(Err(engine_failure(error)));
        }
        if job.terms().deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return self.watch(Task::Over(Box::new(job), Err(CopyFailure::DeadlineExceeded)));
        }
        // Without an order there is nothing to wait for.
        if job.plan().bytes().is_zero() && device_of(job.terms().device_order).is_none() {
            return self.watch(Task::Over(Box::new(job), Ok(())));
        }
        // The thread belongs to the caller; another thread of the caller may be capturing.
        let _beside = BesideCaptures::new(self.shared.context.driver());
        // The context is bound once for all driver calls.
        let mut job = Some(Box::new(job));
        let bound = self.shared.context.bound(|_| {
            if let Some(Err(refused)) = job.take().map(|job| self.dispatch(job)) {
                let (job, error) = refused;
                self.watch(Task::Over(job, Err(engine_failure(error))));
            }
            Ok(())
        });
        if let (Err(error), Some(job)) = (bound, job) {
            self.watch(Task::Over(job, Err(engine_failure(error))));
        }
    }
}

impl Drop for DeviceEngine {
    fn drop(&mut self) {
        if self.shared.context.driver().is_of_parent() {
            // None of the threads exists in this process: their shared state stays as it was at the
            // fork.
            let senders = (self.feeders.take(), self.watchers.take(), self.gates.take());
            // The parent drops them.
            let _left = ManuallyDrop::new((senders, std::mem::take(&mut self.threads)));
            return;
        }
        (self.feeders, self.watchers, self.gates) = (None, None, None);
        threads::join(self.threads.drain(..));
    }
}

impl fmt::Debug for DeviceEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceEngine")
            .field("device", &self.shared.context.device().id)
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}
