//! The copy engine between registered memory and the memory of peers or files.

mod attended;
mod end;
mod error;
mod file_ends;
mod flight;
mod lists;
mod numbering;
mod options;
mod pace;
mod posted;
mod prepared;
mod remains;
mod route;
mod worker;

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread::JoinHandle;

use terrane_core::{ByteCount, Durability, Location};
use terrane_transfer::engines::threads;
use terrane_transfer::{
    CopyEngine, CopyFailure, CopyJob, Declined, DeviceOrder, Quote, Terms, TransferPlan,
};

pub use error::{NixlStep, RequestFailed};
pub use options::NixlEngineOptions;

use crate::{Agent, NixlError, process};
use attended::{Attended, Means};
use prepared::Prepared;
use route::{Operation, Rates, Route, Target};
use worker::{Queue, Submitted};

/// The engine's name in explanations and errors.
pub(crate) const NAME: &str = "nixl";

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
/// The backend is chosen for each transfer, from those that accepted the memory at both ends, by what
/// the registrations say, in the order in which the agent has them; a file that GDS refused never
/// goes through GDS because another backend took it. The quote names it: `"UCX write, 64
/// descriptors"`.
///
/// # What it does not do
///
/// It has no part in a device's order: it takes device memory that is
/// [already synchronised](DeviceOrder::AlreadySynchronised) and declines streams and events, for
/// which a relay has the device's own engine wait. It makes no file durable. It knows of this
/// process's transfers only: the peer whose memory it reads or writes has to keep its hands off those
/// blocks, and is told when it may have them back by a
/// [notification](terrane_transfer::Transfer::notify).
///
/// # Its thread
///
/// NIXL copies where it is called: posting a request can take as long as the copy. So the engine has
/// a thread that posts, looks after what is in flight, and sleeps when there is nothing. Submitting
/// only queues.
///
/// A thread that blocks until the end ([`Completion::wait`](terrane_transfer::Completion::wait),
/// [`Layers::wait`](terrane_transfer::Layers::wait)) may come first, and posts and looks in its place:
/// no other has to be woken then, and the copy runs on the thread that waits for it. Threads that look,
/// tasks that await, and waits until a given time are never kept by a copy.
///
/// # Descriptors
///
/// A request has a descriptor for each run of bytes that is contiguous at both ends. Where pieces cannot
/// be joined, and an end has been used so for a while, its pieces are listed once and for all, and
/// requests name them by number, which is less work
/// ([`prepared_descriptors`](NixlEngineOptions::prepared_descriptors)).
///
/// # When a peer does not answer
///
/// Every transfer has a deadline, its own or that of the [options](NixlEngineOptions::deadline). A
/// request in flight can be stopped neither at once nor surely, so when the deadline passes the
/// transfer ends with its error, and the memory at both ends stays as it is, claimed and alive, until
/// NIXL says that the request has ended too. When the engine drops meanwhile, it waits for that for a
/// while ([`farewell`](NixlEngineOptions::farewell)) and then leaves the memory alone for ever. The peer
/// stays busy in that agent then: it can be forgotten, and is neither refreshed nor disconnected.
///
/// # When a request fails
///
/// NIXL says that it failed, and not which of its parts may go on. So the transfer ends with its error,
/// and the memory at both ends stays as it is until the connection to the peer is closed, which is done
/// as soon as nothing else is in flight with the peer, and no transfer begins meanwhile
/// ([`RequestFailed::PeerLost`]). The next [import](crate::Agent::import) connects again.
///
/// With a file, POSIX (over the kernel's asynchronous I/O, its default) and GDS_MT of NIXL 1.5.1 report a
/// failure once all I/Os of the request have ended, so the memory is free with the error. Other backends
/// and releases may go on, and a file has no connection to close: that memory is never used again. GDS of
/// NIXL 1.5.1 reports no failure of an I/O. The engine fails a write after which the file ends too early
/// ([`RequestFailed::WrittenShort`]); use GDS_MT where other errors must show.
///
/// Dropping the engine ends its thread once it has served what was submitted, and joins it, unless it
/// drops on a thread of an engine.
///
/// # Example
///
/// Two agents, here of one process: what the first one exports, the second one writes to.
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
/// // The bytes of an export go to the other process by whatever means there are.
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
/// let told = decode.wait_for_notifications(Instant::now() + Duration::from_secs(60))?;
/// assert_eq!(told[0].message, b"blocks 5 to 7");
/// # Ok(())
/// # }
/// ```
pub struct NixlEngine {
    means: Arc<Means>,
    known: route::Known,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl NixlEngine {
    /// An engine over this agent.
    ///
    /// # Errors
    ///
    /// [`NixlError::Thread`] if its thread cannot be started.
    pub fn new(agent: &Agent, options: NixlEngineOptions) -> Result<Self, NixlError> {
        process::check()?;
        let rates = Rates::new(agent);
        let prepared = Arc::new(Prepared::new(&options));
        let (agent, options) = (agent.clone(), Arc::new(options));
        let means = Arc::new(Means { agent, options, rates, prepared });
        let queue = Arc::<Queue>::default();
        let worker = worker::Worker::new(Arc::clone(&means), Arc::clone(&queue));
        let thread = threads::spawn("terrane-nixl".to_owned(), move || worker.serve())
            .map_err(|source| NixlError::Thread { source })?;
        Ok(Self { means, known: route::Known::default(), queue, thread: Some(thread) })
    }

    /// The agent that it copies through.
    #[must_use]
    pub fn agent(&self) -> &Agent {
        &self.means.agent
    }

    fn route(&self, plan: &TransferPlan, terms: &Terms) -> Result<Route, Declined> {
        if process::is_forked() {
            return Err(Declined::Forked);
        }
        let route = Route::of(self.agent(), &self.known, plan)?;
        if !matches!(terms.device_order, None | Some(DeviceOrder::AlreadySynchronised)) {
            return Err(Declined::DeviceOrder);
        }
        if durability(plan, terms) > Durability::None {
            return Err(Declined::Durability);
        }
        Ok(route)
    }
}

// SAFETY: requests consist of the runs of the plan and nothing else. A job is finished when all
// of its requests have ended: well, by NIXL's word, or with the connection that they went over. Or it is
// given up, and then its remains are kept until they have ended, or for ever.
unsafe impl CopyEngine for NixlEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined> {
        let route = self.route(plan, terms)?;
        let backend = route.backend_name(self.agent());
        let (operation, runs) = (route.operation, plan.run_count());
        let reason = match &route.target {
            Target::Peer { name: peer, .. } => {
                format!("{backend} accepted both this memory and that of {peer}")
            }
            Target::File => format!("file and memory are registered with {backend}"),
        };
        let predicted = self.means.rates.of(&route).predict(plan.bytes(), runs);
        let path = format!("{backend} {operation}, {runs} descriptors");
        Ok(Quote { path: path.into(), reason: reason.into(), predicted })
    }

    fn submit(&self, job: CopyJob) {
        let route = self.route(job.plan(), job.terms()).map_err(RequestFailed::Declined);
        if let (Err(cause), true) = (&route, process::is_forked()) {
            // Its thread is not there, and its queue may stay locked.
            return job.finish(Err(CopyFailure::Engine { source: cause.clone().into() }));
        }
        self.queue.push(match route.and_then(|route| route.begin(self.agent())) {
            Ok(begun) => Submitted::Flight(Attended::new(job, begun, &self.means, &self.queue)),
            Err(cause) => Submitted::Refused(Box::new(job), cause),
        });
    }
}

impl Drop for NixlEngine {
    fn drop(&mut self) {
        if process::is_forked() {
            // The thread is the parent's, and so is its part of the engine.
            let parents = (self.thread.take(), Arc::clone(&self.means), Arc::clone(&self.queue));
            let _parents = ManuallyDrop::new(parents);
            return;
        }
        self.queue.close();
        threads::join(self.thread.take());
    }
}

impl fmt::Debug for NixlEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlEngine").field("agent", self.agent()).finish_non_exhaustive()
    }
}

/// What is to be true of written files.
fn durability(plan: &TransferPlan, terms: &Terms) -> Durability {
    let of_files = plan.destination().bases().iter().filter_map(|base| match base {
        Location::File(position) => Some(position.file.durability),
        _ => None,
    });
    of_files.fold(terms.durability, Ord::max)
}

/// An index of 32 bits as one of this machine's.
fn index(number: u32) -> usize {
    ByteCount::new(number.into()).to_usize()
}

impl Operation {
    fn raw(self) -> nixl_sys::XferOp {
        match self {
            Self::Read => nixl_sys::XferOp::Read,
            Self::Write => nixl_sys::XferOp::Write,
        }
    }
}
