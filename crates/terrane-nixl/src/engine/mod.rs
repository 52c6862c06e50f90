//! The copy engine between registered memory and the memory of peers or files.

pub(crate) mod add_nixl;
mod context;
mod descriptors;
pub(crate) mod error;
mod local_and_target;
pub(crate) mod options;
mod route;
mod thread;
mod transfer;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread::JoinHandle;

use terrane_core::{Durability, Location};
use terrane_transfer::engines::threads;
use terrane_transfer::{
    CopyEngine, CopyFailure, CopyJob, Declined, DeviceOrder, EndpointCache, Quote, TransferOptions,
    TransferPlan,
};

use crate::agent::Agent;
use crate::bindings::process;
use crate::error::NixlError;
use context::EngineContext;
use descriptors::prepared::PreparedLists;
use descriptors::region_bases::RegionBases;
use error::RequestError;
use options::NixlEngineOptions;
use route::rates::Rates;
use route::{QuotedRoute, Route};
use thread::EngineThread;
use thread::queue::{Queue, QueuedJob};
use transfer::shared::SharedTransfer;

/// The engine's name in explanations and errors.
const NAME: &str = "nixl";

/// Copies through NIXL: between memory that is registered with an agent and the memory of the
/// agent's peers, and between such memory and registered files.
///
/// | from | to | how |
/// |---|---|---|
/// | system, pinned or device memory | a peer's memory | a write, by a network backend (UCX) |
/// | a peer's memory | system, pinned or device memory | a read, likewise |
/// | memory | a file, both registered with the agent | a write, by a storage backend (POSIX, GDS) |
/// | a file | memory, likewise | a read |
///
/// The engine selects the backend for each transfer among those that accepted the memory at both
/// ends. It uses the registrations' records, in the agent's order of backends. A file that GDS
/// refused is never copied by GDS because another backend accepted it. The quote names the backend:
/// `"UCX write, 64 descriptors"`.
///
/// # Limits
///
/// - It does not wait for a device's order. It accepts device memory that is [already
///   synchronised](DeviceOrder::AlreadySynchronised) and declines streams and events. For these, a
///   relay lets the device's own engine wait.
/// - It makes no file durable.
/// - It tracks only this process's transfers. The peer must not use the blocks that a transfer
///   reads or writes until a [notification](terrane_transfer::Transfer::notify) arrives.
///
/// # Its thread
///
/// NIXL copies in the calling thread: posting a request can take as long as the copy. So the engine
/// has a thread that posts, polls the requests in flight, and sleeps when idle. Submitting only
/// queues.
///
/// A thread that blocks until the end ([`Completion::wait`](terrane_transfer::Completion::wait),
/// [`Layers::wait`](terrane_transfer::Layers::wait)) may begin first. It then posts and polls in
/// place of the engine's thread. No other thread has to wake, and the copy runs on the waiting
/// thread. Threads that only poll, tasks that await, and waits with a deadline never run a copy.
///
/// # Descriptors
///
/// A request has a descriptor for each run of bytes that is contiguous at both ends. Some pieces
/// cannot be joined. After an endpoint has been used in this way for a while, NIXL prepares a
/// descriptor list of its pieces. Requests then name pieces by index, which is less work
/// ([`prepared_descriptors`](NixlEngineOptions::prepared_descriptors)).
///
/// # When a peer does not answer
///
/// A transfer has a deadline, its own or that of the [options](NixlEngineOptions::deadline),
/// unless both are `None`. A request in flight cannot be cancelled immediately or reliably. A
/// cancelled transfer posts no further request, and ends when those in flight have ended. When the
/// deadline passes, the transfer ends with its error. The memory at both ends stays claimed and
/// alive until NIXL reports that the request has ended too. If the engine drops earlier, it waits
/// for that at most [`drop_timeout`](NixlEngineOptions::drop_timeout). After the timeout, the
/// memory is never freed or reused. The peer then stays busy in that agent: it can be forgotten,
/// but neither refreshed nor disconnected.
///
/// # When a request fails
///
/// NIXL reports that a request failed, but not which of its parts may still be in flight. So the
/// transfer ends with its error. The memory at both ends stays claimed until the connection to the
/// peer is closed. The engine closes it once no other request is in flight with the peer. Until
/// then it begins no transfer with that peer ([`RequestError::PeerLost`]). The next
/// [import](crate::Agent::import) reconnects.
///
/// For a file, POSIX and GDS_MT of NIXL 1.5.1 report a failure only once all I/Os of the request
/// have ended. POSIX does so with its default, the kernel's asynchronous I/O. The memory is
/// therefore free when the error arrives. With other backends and releases, a failed request may
/// still access the memory. A file has no connection that the engine could close. So the engine
/// leaks the memory and the I/Os of the request. A backend with too few I/Os left for a request is
/// declined ([`Declined::NoIosLeft`]). GDS of NIXL 1.5.1 reports no failure of an I/O. The engine
/// fails a write after which the file is too short ([`RequestError::WrittenShort`]). Use GDS_MT if
/// other errors must be reported.
///
/// Dropping the engine ends its thread after it has served the submitted transfers. The drop joins
/// it, unless it runs on an engine's thread.
///
/// # Example
///
/// Two agents, here in one process: the first one exports a layout, and the second one writes to
/// it.
///
/// ```
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
///
/// use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
/// use terrane_nixl::{AgentBuilder, BackendConfig, NixlEngine, NixlEngineOptions};
/// use terrane_storage::{SystemAllocator, SystemOptions};
/// use terrane_transfer::{Endpoint, Transfer, TransferManager};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let agent = || AgentBuilder::unnamed().backend(BackendConfig::new("UCX")).build();
/// let (decode, prefill) = (agent()?, agent()?);
/// let shape = LayoutConfig::builder().num_blocks(8).num_layers(4).outer_dim(2).page_size(16);
/// let config = shape.inner_dim(128).element(ElementFormat::Width(2)).build()?;
/// let system = SystemAllocator::new(SystemOptions::default());
/// let layout = |agent| {
///     LayoutBuilder::new(config).fully_contiguous().allocate(&system).register(agent).build()
/// };
///
/// // The bytes of an export go to the other process over any channel.
/// let blocks_of_decode = layout(&decode)?;
/// let exported = decode.export(&blocks_of_decode)?;
///
/// let remote = prefill.import(&exported)?;
/// let local = Endpoint::new(layout(&prefill)?)?;
/// let engine = NixlEngine::new(&prefill, NixlEngineOptions::default())?;
/// let manager = TransferManager::new([Arc::new(engine) as _]);
/// let write = Transfer::new(&local, remote.endpoint()).blocks(&[0, 1, 2], &[5, 6, 7]);
/// println!("{}", manager.explain(&write)?);
/// manager.submit(write.notify(*b"blocks 5 to 7"), ())?.wait().result?;
///
/// let received = decode.wait_for_notifications(Instant::now() + Duration::from_secs(60))?;
/// assert_eq!(received[0].message, b"blocks 5 to 7");
/// # Ok(())
/// # }
/// ```
pub struct NixlEngine {
    context: Arc<EngineContext>,
    bases: EndpointCache<Arc<RegionBases>>,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl NixlEngine {
    /// Creates an engine for this agent.
    ///
    /// # Errors
    ///
    /// [`NixlError::Thread`] if its thread cannot be started, [`NixlError::Forked`].
    pub fn new(agent: &Agent, options: NixlEngineOptions) -> Result<Self, NixlError> {
        process::check()?;
        let rates = Rates::new(agent);
        let prepared = Arc::new(PreparedLists::new(&options));
        let (agent, options) = (agent.clone(), Arc::new(options));
        let context = Arc::new(EngineContext { agent, options, rates, prepared });
        let queue = Arc::<Queue>::default();
        let engine_thread = EngineThread::new(Arc::clone(&context), Arc::clone(&queue));
        let thread = threads::spawn("terrane-nixl".to_owned(), move || engine_thread.run())
            .map_err(|source| NixlError::Thread { source })?;
        Ok(Self { context, bases: EndpointCache::default(), queue, thread: Some(thread) })
    }

    /// The agent of the engine.
    #[must_use]
    pub fn agent(&self) -> &Agent {
        &self.context.agent
    }

    fn route(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Route, Declined> {
        if process::is_forked() {
            return Err(Declined::Forked);
        }
        let route = Route::of(self.agent(), &self.bases, plan)?;
        if !matches!(options.device_order, None | Some(DeviceOrder::AlreadySynchronised)) {
            return Err(Declined::DeviceOrder);
        }
        if durability(plan, options) > Durability::None {
            return Err(Declined::Durability);
        }
        Ok(route)
    }
}

// SAFETY: requests consist only of the plan's runs. A job is finished when all of its requests have
// ended: successfully, by NIXL's report, or with their connection. Otherwise it is orphaned, and
// its memory is kept until they have ended, or permanently.
unsafe impl CopyEngine for NixlEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        let route = self.route(plan, options)?;
        let (backend, runs) = (route.backend_name(self.agent()), plan.run_count());
        let predicted = self.context.rates.of(&route).predict(plan.bytes(), runs);
        Ok(Quote::new(predicted, QuotedRoute { route, backend, runs }))
    }

    fn submit(&self, job: CopyJob) {
        if process::is_forked() {
            // Its thread does not exist in this process, and its queue may stay locked.
            let source = RequestError::Declined(Declined::Forked).into();
            return job.finish(Err(CopyFailure::Engine { source }));
        }
        let route = match job.decision::<QuotedRoute>() {
            Ok(quoted) => quoted.route.clone(),
            Err(foreign) => {
                return job.finish(Err(CopyFailure::Engine { source: foreign.into() }));
            }
        };
        self.queue.push(match route.reserve(self.agent()) {
            Ok(reserved) => {
                QueuedJob::Transfer(SharedTransfer::new(job, reserved, &self.context, &self.queue))
            }
            Err(cause) => QueuedJob::Refused(job, cause),
        });
    }
}

impl Drop for NixlEngine {
    fn drop(&mut self) {
        if process::is_forked() {
            // The thread and its state belong to the parent process.
            let parents = (self.thread.take(), Arc::clone(&self.context), Arc::clone(&self.queue));
            let _parents = ManuallyDrop::new(parents);
            return;
        }
        self.queue.close();
        threads::join(self.thread.take());
    }
}

terrane_core::debug_fields!(NixlEngine, |it| { agent: it.agent() });

/// The required durability of written files.
fn durability(plan: &TransferPlan, options: &TransferOptions) -> Durability {
    let of_files = plan.destination().bases().iter().filter_map(|base| match base {
        Location::File(position) => Some(position.file.durability),
        _ => None,
    });
    of_files.fold(options.durability, Ord::max)
}
