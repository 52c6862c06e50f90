//! Copies between endpoints, for the tasks of jobs.

use std::future::{IntoFuture, poll_fn};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use smallvec::SmallVec;
use terrane_core::sync::lock;
use terrane_transfer::{CompletionFuture, DeviceOrder, Endpoint, Transfer, TransferError};

use crate::error::StoreError;
use crate::store::executor::Executor;
use crate::store::result::BlockResult;
use crate::store::task::{GuardCell, JobTask};

/// One block to copy. `keeps` lives until the copy has ended.
pub(crate) struct BlockCopy<K> {
    /// The block's place in the job.
    pub(crate) index: usize,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// `None` for all tokens.
    pub(crate) tokens: Option<u32>,
    pub(crate) keeps: K,
}

/// A copy of some blocks that was started, or refused.
pub(crate) struct StartedCopy<K> {
    indices: SmallVec<[usize; 1]>,
    state: CopyState<K>,
}

enum CopyState<K> {
    Done,
    Refused(BlockResult),
    /// Its end releases what the blocks keep, once it is awaited.
    Running(CopyEnd<K>),
    /// A task awaits its end.
    Watched(Arc<WatchedCopy>),
}

/// A copy whose end a task of its own awaits.
#[derive(Default)]
struct WatchedCopy {
    state: Mutex<WatchedEnd>,
}

/// The result, and the task that waits for it.
type WatchedEnd = (Option<Result<(), BlockResult>>, Option<Waker>);

/// The end of a copy, which owns what has to live until then.
type CopyEnd<K> = CompletionFuture<(SmallVec<[K; 1]>, GuardCell)>;

/// Blocks to copy: often one.
pub(crate) type BlockCopies<K> = SmallVec<[BlockCopy<K>; 1]>;

impl JobTask {
    /// Starts copies between two endpoints. It does not wait.
    pub(crate) fn start_copies<K: Send + 'static>(
        &self,
        (from, to): (&Endpoint, &Endpoint),
        blocks: BlockCopies<K>,
    ) -> SmallVec<[StartedCopy<K>; 1]> {
        let tokens = blocks.first().and_then(|block| block.tokens);
        if blocks.iter().all(|block| block.tokens == tokens) {
            let mut started = SmallVec::new();
            started.push(self.start_copy((from, to), tokens, blocks));
            return started;
        }
        let mut by_tokens: Vec<(Option<u32>, BlockCopies<K>)> = Vec::new();
        for block in blocks {
            match by_tokens.iter_mut().find(|(tokens, _)| *tokens == block.tokens) {
                Some((_, list)) => list.push(block),
                None => by_tokens.push((block.tokens, SmallVec::from_iter([block]))),
            }
        }
        let start = |(tokens, blocks)| self.start_copy((from, to), tokens, blocks);
        by_tokens.into_iter().map(start).collect()
    }

    fn start_copy<K: Send + 'static>(
        &self,
        (from, to): (&Endpoint, &Endpoint),
        tokens: Option<u32>,
        blocks: BlockCopies<K>,
    ) -> StartedCopy<K> {
        let indices = blocks.iter().map(|block| block.index).collect();
        let sources: SmallVec<[u32; 8]> = blocks.iter().map(|block| block.from).collect();
        let destinations: SmallVec<[u32; 8]> = blocks.iter().map(|block| block.to).collect();
        let mut transfer = Transfer::new(from, to).blocks(&sources, &destinations);
        if let Some(tokens) = tokens {
            transfer = transfer.tokens(0..tokens, 0..tokens);
        }
        if let Some(deadline) = self.control.deadline() {
            transfer = transfer.deadline(deadline);
        }
        if from.kind().is_device() || to.kind().is_device() {
            // A job with blocks of a device states an order. Copies between tiers need none.
            let order = self.device_order.clone();
            transfer = transfer.device_order(order.unwrap_or(DeviceOrder::AlreadySynchronised));
        }
        if self.layer_by_layer {
            transfer = transfer.layer_by_layer();
        }
        let Some(manager) = &self.core.manager else {
            let result = BlockResult::failed(StoreError::NeedsHostTier { kind: from.kind() });
            return StartedCopy { indices, state: CopyState::Refused(result) };
        };
        let keeps = blocks.into_iter().map(|block| block.keeps).collect();
        let state = match manager.submit(transfer, (keeps, Arc::clone(&self.guard))) {
            Ok(completion) => {
                self.control.add_ticket(completion.ticket());
                if let Some(layers) = completion.layers() {
                    self.control.add_layers(layers);
                }
                CopyState::Running(completion.into_future())
            }
            Err(rejected) => CopyState::Refused(failed(rejected.cause)),
        };
        StartedCopy { indices, state }
    }
}

impl<K> StartedCopy<K> {
    /// A copy that has ended.
    pub(crate) fn done(index: usize) -> Self {
        Self { indices: SmallVec::from_iter([index]), state: CopyState::Done }
    }

    /// Lets a task of its own await the end, so that what the blocks keep is released at once: this
    /// job waits for slots before it looks at the copy again.
    pub(crate) fn watched(mut self, executor: &Executor) -> Self
    where
        K: Send + 'static,
    {
        if let CopyState::Running(copy) = self.state {
            let watched = Arc::<WatchedCopy>::default();
            let shared = Arc::clone(&watched);
            executor.spawn(async move {
                let result = copy.await.result.map(|_| ()).map_err(failed);
                shared.publish(result);
            });
            self.state = CopyState::Watched(watched);
        }
        self
    }

    /// Waits for the end, and returns the result of each block.
    pub(crate) async fn end(self) -> SmallVec<[(usize, Result<(), BlockResult>); 1]> {
        let result = match self.state {
            CopyState::Done => Ok(()),
            CopyState::Refused(result) => Err(result),
            CopyState::Running(copy) => copy.await.result.map(|_| ()).map_err(failed),
            CopyState::Watched(watched) => watched.end().await,
        };
        self.indices.into_iter().map(|index| (index, result.clone())).collect()
    }
}

impl WatchedCopy {
    fn publish(&self, result: Result<(), BlockResult>) {
        let task = {
            let mut state = lock(&self.state);
            state.0 = Some(result);
            state.1.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }

    async fn end(&self) -> Result<(), BlockResult> {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut state = lock(&self.state);
            if let Some(result) = state.0.take() {
                drop(state);
                return Poll::Ready(result);
            }
            let before = state.1.replace(latest);
            drop(state);
            drop(before);
            Poll::Pending
        })
        .await
    }
}

fn failed(error: TransferError) -> BlockResult {
    match error {
        TransferError::DeadlineExceeded { .. } => BlockResult::TimedOut,
        TransferError::Cancelled { .. } => BlockResult::Cancelled,
        error => BlockResult::failed(error),
    }
}
