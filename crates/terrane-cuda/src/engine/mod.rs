//! The engine that copies blocks between a device and pinned memory, within the device, and
//! between devices.

mod checksums;
mod complete;
mod geometry;
pub(crate) mod options;
pub(crate) mod path;
mod resources;
mod shared;
mod submit;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use terrane_core::{BoxedCause, CapabilityReport};
use terrane_transfer::calibration::Calibration;
use terrane_transfer::engines::threads;
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Quote, TransferOptions, TransferPlan,
};

use crate::driver::capture::RelaxedCaptureMode;
use crate::engine::checksums::factors::FactorCache;
use crate::engine::complete::completion_queue::{CompletionQueue, CompletionThreads, Task};
use crate::engine::complete::failed_job::engine_failure;
use crate::engine::options::DeviceEngineOptions;
use crate::engine::path::choice::Corrections;
use crate::engine::resources::base_tables::BaseTables;
use crate::engine::resources::block_lists::ListPool;
use crate::engine::resources::device_mapping::MappingCache;
use crate::engine::resources::job_streams::StreamPool;
use crate::engine::shared::{Shared, load_kernels};
use crate::engine::submit::batch;
use crate::engine::submit::capture::capture;
use crate::engine::submit::direction_queue::DirectionQueue;
use crate::engine::submit::queued_job::QueuedJob;
use crate::engine::submit::submit_thread::SubmitThread;
use crate::error::CudaError;
use crate::runtime::context::Context;

/// Copies blocks between a device's memory and pinned host memory, within the device's memory, and
/// between it and the memory of another device.
///
/// Each transfer is copied by one of several [paths](crate::CopyPath): the path with the shortest
/// time that a [`Calibration`] predicts.
///
/// The caller's thread submits a small transfer to a stream. That takes some microseconds and does
/// not block. A thread of the engine submits a large transfer to the device in parts. It takes one
/// part of each such transfer in turn, so that no transfer occupies the wire for long.
///
/// Kernels compute [checksums](terrane_transfer::Transfer::checksums) in the device's memory,
/// beside the copy: of the source, or of the destination's bytes once they have arrived. Without
/// [kernels](Self::has_kernels), or without those for checksums alone, the engine declines
/// checksums. Its [capabilities](CopyEngine::capabilities) give the reason.
///
/// The engine also copies from and to pinned memory that other libraries have locked (PyTorch's).
///
/// Dropping the engine lets its threads finish the submitted work, and joins them. A thread that
/// finishes transfers must not wait for others. If the engine drops on such a thread, its threads
/// end without a join. In a process that was forked after the engine was created, a transfer fails
/// with [`CudaError::Forked`], and dropping the engine waits for nothing.
///
/// The engine copies between the device and *pinned* memory. For other host memory and for files, a
/// [`RelayEngine`](terrane_transfer::engines::RelayEngine) combines it with the host or the disk
/// engine. One manager holds all engines, and each transfer is given to the fastest one.
///
/// # Example
///
/// The example copies blocks of a model from the device to pinned memory. It brings them back to
/// other blocks, layer by layer, while compute on the first layers runs:
///
/// ```
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
///     // K and V of each layer on the device, whole blocks in pinned memory. Existing tensors are
///     // adopted: see `Context::device_span`.
///     let device = DeviceAllocator::new(&context);
///     let cache = LayoutBuilder::new(config).layer_separate(BlockDimension::Second)
///         .allocate(&device).unregistered().build()?;
///     let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?;
///     let tier = LayoutBuilder::new(config).fully_contiguous()
///         .allocate(&pinned).unregistered().build()?;
///     let (cache, tier) = (Endpoint::new(cache)?, Endpoint::new(tier)?);
///     let engine = DeviceEngine::new(&context, DeviceEngineOptions::default())?;
///     let manager = TransferManager::builder().engine(engine).build();
///
///     // The stream on which the model runs; `Stream::borrow` takes another library's.
///     let compute = Stream::new(&context)?;
///
///     // Offload, after the work on the stream. The submit returns at once. The guard, a value of
///     // any type, is returned with the outcome.
///     let out = Transfer::new(&cache, &tier).blocks(&[5, 9, 2], &[0, 1, 2]);
///     let out = out.device_order(compute.order());
///     println!("{}", manager.explain(&out)?);
///     let completion = manager.submit(out, "my lock on blocks 5, 9 and 2")?;
///     println!("{}", completion.wait().result?);
///
///     // Bring the blocks back. Each layer's compute is submitted as soon as the layer is on a
///     // stream.
///     let home = Transfer::new(&tier, &cache).blocks(&[0, 1, 2], &[7, 8, 3]);
///     let completion = manager.submit(home.device_order(compute.order()).layer_by_layer(), ())?;
///     let layers = completion.layers().ok_or("it is layer by layer")?;
///     for layer in layers.range() {
///         compute.wait_for_layers(&layers, layer)?;
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
    /// The queues for copies to the device, to the host, and between devices' memories.
    queues: Option<[(Sender<QueuedJob>, Arc<DirectionQueue>); 3]>,
    completion_threads: Option<CompletionThreads>,
    /// The threads that wait until jobs may begin.
    order_waits: Option<CompletionThreads>,
    threads: Vec<JoinHandle<()>>,
}

/// The number of threads that wait until large transfers may begin on the device. The last thread
/// polls all transfers that the other threads cannot wait for.
const ORDER_THREADS: u32 = 2;

/// Streams that are created in advance, so that the first submits need not create any.
const READY_STREAMS: u32 = 4;
const READY_ORDER_STREAMS: u32 = 1;

impl DeviceEngine {
    /// Creates an engine for the context's device. Loads the kernels, if the driver accepts them, and
    /// starts the threads. The threads are named `terrane-cuda-submit-0` and so on,
    /// `terrane-cuda-order-0` and `terrane-cuda-wait-0`.
    ///
    /// # Errors
    ///
    /// [`CudaError::KernelsRefused`] if they are [required](DeviceEngineOptions::kernels), or if
    /// memory is short and they are preferred; the errors of creating a stream;
    /// [`CudaError::Thread`].
    pub fn new(context: &Context, options: DeviceEngineOptions) -> Result<Self, CudaError> {
        let (kernels, capabilities) = load_kernels(context, options.kernels)?;
        let peers = Arc::default();
        let shared = Arc::new(Shared {
            kernels,
            capabilities: Arc::new(capabilities),
            mapping: MappingCache::new(context, &peers),
            peers,
            tables: BaseTables::new(context)?,
            lists: ListPool::new(context)?,
            sum_factors: FactorCache::default(),
            streams: StreamPool::new(
                context,
                options.priority,
                options.streams.get(),
                READY_STREAMS,
            )?,
            order_streams: StreamPool::new(
                context,
                options.priority,
                u32::MAX,
                READY_ORDER_STREAMS,
            )?,
            calibration: options.calibration.clone().unwrap_or_default(),
            corrections: Arc::new(Corrections::new(options.learns)),
            has_batches: batch::is_supported(context),
            context: context.clone(),
            options,
        });
        let orphans = Arc::default();
        let [tasks, waiting] = [(); 2].map(|()| CompletionQueue::new(&orphans, &shared.lists));
        let [completion_threads, order_waits] = [&tasks, &waiting].map(CompletionThreads::new);
        // On an error, dropping this value joins the threads that have been started.
        let mut engine = Self {
            shared,
            queues: None,
            completion_threads: Some(completion_threads),
            order_waits: Some(order_waits),
            threads: Vec::new(),
        };
        for number in 0..engine.shared.options.completion_threads.get() {
            let tasks = Arc::clone(&tasks);
            engine.start(format!("terrane-cuda-wait-{number}"), move || tasks.serve())?;
        }
        for number in 0..ORDER_THREADS {
            let waiting = Arc::clone(&waiting);
            engine.start(format!("terrane-cuda-order-{number}"), move || waiting.serve())?;
        }
        let (mut queues, engine_jobs) = (Vec::new(), Arc::default());
        for number in 0..3 {
            let (sender, jobs) = unbounded();
            let Some(completion_threads) = engine.completion_threads.clone() else { break };
            let queue = DirectionQueue::new(&engine_jobs);
            let shared = Arc::clone(&engine.shared);
            let submit_thread =
                SubmitThread::new(shared, Arc::clone(&queue), jobs, completion_threads);
            engine.start(format!("terrane-cuda-submit-{number}"), move || submit_thread.serve())?;
            queues.push((sender, queue));
        }
        engine.queues = queues.try_into().ok();
        Ok(engine)
    }

    fn start(
        &mut self,
        name: String,
        serve: impl FnOnce() + Send + 'static,
    ) -> Result<(), CudaError> {
        let shared = Arc::clone(&self.shared);
        let run = move || {
            // The mode is changed once, not at each call of the driver.
            let _relaxed = RelaxedCaptureMode::new(shared.context.driver());
            serve();
            // Freeing memory waits for the device. If the engine drops on a thread that must not
            // wait, the last of these threads frees it, after all jobs have ended.
            drop(shared);
        };
        let thread = threads::spawn(name, run).map_err(|source| CudaError::Thread { source })?;
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

// SAFETY: the work submitted for a job copies the bytes of its plan's runs and of the engine's own
// buffers. `Submission::finish` finishes the job. It runs after an event behind the last of that work
// has completed, or after the job's streams have been waited for.
unsafe impl CopyEngine for DeviceEngine {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.quote_by(plan, options, self.shared.options.path)
    }

    fn computes_checksums(&self) -> bool {
        // The engine's quotes decline the checksums that its kernels do not compute.
        true
    }

    fn capabilities(&self) -> CapabilityReport {
        self.shared.capabilities_now()
    }

    fn capture_order(&self, order: &DeviceOrder) -> Result<DeviceOrder, BoxedCause> {
        Ok(capture(order, &self.shared)?)
    }

    fn submit(&self, job: CopyJob) {
        if let Err(error) = self.shared.context.driver().check_process() {
            // None of the engine's threads exists in this process.
            return job.finish(Err(engine_failure(error)));
        }
        if let Some(failure) = job.reason_to_stop() {
            return self.send_task(Task::Finish(job, Err(failure)));
        }
        // Without an order there is nothing to wait for.
        if job.plan().bytes().is_zero()
            && job.options().device_order.as_ref().and_then(DeviceOrder::device).is_none()
        {
            return self.send_task(Task::Finish(job, Ok(())));
        }
        // The context is bound once for all driver calls.
        let mut job = Some(job);
        let bound = self.shared.context.bound(|_| {
            if let Some(Err(refused)) = job.take().map(|job| self.dispatch(job)) {
                let (job, error) = refused;
                self.send_task(Task::Finish(job, Err(engine_failure(error))));
            }
            Ok(())
        });
        if let (Err(error), Some(job)) = (bound, job) {
            self.send_task(Task::Finish(job, Err(engine_failure(error))));
        }
    }
}

impl Drop for DeviceEngine {
    fn drop(&mut self) {
        if self.shared.context.driver().is_of_parent() {
            // None of the threads exists in this process: their shared state is that of the moment
            // of the fork.
            let senders =
                (self.queues.take(), self.completion_threads.take(), self.order_waits.take());
            // The parent process drops them.
            let _left = ManuallyDrop::new((senders, std::mem::take(&mut self.threads)));
            return;
        }
        (self.queues, self.completion_threads, self.order_waits) = (None, None, None);
        threads::join(self.threads.drain(..));
    }
}

terrane_core::debug_fields!(DeviceEngine, |it| { device: it.shared.context.device().id,
    options: it.shared.options });
