//! Copies between endpoints by copy engines.

use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Instant;

use smallvec::{SmallVec, smallvec};
use terrane_transfer::{CompletionFuture, DeviceOrder, Endpoint, Transfer, TransferError};

use crate::error::StoreError;
use crate::store::job::executor::Executor;
use crate::store::job::layers::LayerArrivals;
use crate::store::job::one_shot::OneShot;
use crate::store::job::result::BlockResult;
use crate::store::job::task::{GuardCell, JobTask};
use crate::store::query::presence::TierId;

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

/// Blocks that one transfer copies. They are in one tier and have equally many tokens.
pub(crate) struct BlockCopies<K> {
    /// The tier of the blocks.
    pub(crate) tier: TierId,
    tokens: Option<u32>,
    indices: SmallVec<[usize; 1]>,
    from: SmallVec<[u32; 2]>,
    to: SmallVec<[u32; 2]>,
    keeps: SmallVec<[K; 1]>,
}

/// The blocks of a job, grouped by transfer. Often there is one.
pub(crate) struct CopyList<K>(SmallVec<[BlockCopies<K>; 1]>);

impl<K> CopyList<K> {
    /// Adds a block of a tier.
    pub(crate) fn add(&mut self, tier: TierId, copy: BlockCopy<K>) {
        let BlockCopy { index, from, to, tokens, keeps } = copy;
        let is_same = |copies: &&mut BlockCopies<K>| copies.tier == tier && copies.tokens == tokens;
        let Some(copies) = self.0.iter_mut().find(is_same) else {
            return self.0.push(BlockCopies {
                tier,
                tokens,
                indices: smallvec![index],
                from: smallvec![from],
                to: smallvec![to],
                keeps: smallvec![keeps],
            });
        };
        copies.indices.push(index);
        copies.from.push(from);
        copies.to.push(to);
        copies.keeps.push(keeps);
    }

    /// Reverses the order of the blocks.
    pub(crate) fn reverse(&mut self) {
        for copies in &mut self.0 {
            copies.indices.reverse();
            copies.from.reverse();
            copies.to.reverse();
            copies.keeps.reverse();
        }
        self.0.reverse();
    }
}

impl<K> Default for CopyList<K> {
    fn default() -> Self {
        Self(SmallVec::new())
    }
}

impl<K> IntoIterator for CopyList<K> {
    type Item = BlockCopies<K>;
    type IntoIter = smallvec::IntoIter<[BlockCopies<K>; 1]>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// A copy of some blocks that was started, or refused.
pub(crate) struct StartedCopy<K> {
    /// The tier of the blocks.
    pub(crate) tier: TierId,
    pub(crate) indices: SmallVec<[usize; 1]>,
    state: CopyState<K>,
}

enum CopyState<K> {
    Ended(Result<(), BlockResult>),
    /// Its `keeps` drop when the task awaits it.
    Running(CopyEnd<K>),
    /// Another task awaits it, so that its `keeps` drop at once.
    Watched(Arc<OneShot<Result<(), BlockResult>>>),
}

/// A copy in flight, which owns the values that have to live until its end.
type CopyEnd<K> = CompletionFuture<(SmallVec<[K; 1]>, GuardCell)>;

impl JobTask {
    /// Starts a copy between two endpoints. It does not wait. If `layers` is set, the copy is layer by
    /// layer, and added there.
    pub(crate) fn start_copy<K: Send + 'static>(
        &self,
        (from, to): (&Endpoint, &Endpoint),
        copies: BlockCopies<K>,
        layers: Option<&LayerArrivals>,
    ) -> StartedCopy<K> {
        let BlockCopies { tier, tokens, indices, from: sources, to: destinations, keeps } = copies;
        let blocks = (&sources[..], &destinations[..]);
        let options = (tokens, self.control.deadline, self.device_order.as_ref());
        let mut transfer = transfer((from, to), blocks, options);
        if layers.is_some() {
            transfer = transfer.layer_by_layer();
        }
        let refused = |result| {
            if let Some(layers) = layers {
                layers.fail();
            }
            CopyState::Ended(Err(result))
        };
        let Some(manager) = &self.core.manager else {
            let result = BlockResult::failed(StoreError::NeedsHostTier { kind: from.kind() });
            return StartedCopy { tier, indices, state: refused(result) };
        };
        let state = match manager.submit(transfer, (keeps, Arc::clone(&self.guard))) {
            Ok(completion) => {
                self.control.add_ticket(completion.ticket());
                if let Some((arrivals, layers)) = layers.zip(completion.layers()) {
                    arrivals.add(layers);
                }
                CopyState::Running(completion.into_future())
            }
            Err(rejected) => refused(failed(rejected.cause)),
        };
        StartedCopy { tier, indices, state }
    }
}

/// A transfer of blocks between two endpoints.
pub(crate) fn transfer(
    (from, to): (&Endpoint, &Endpoint),
    (sources, destinations): (&[u32], &[u32]),
    (tokens, deadline, order): (Option<u32>, Option<Instant>, Option<&DeviceOrder>),
) -> Transfer {
    let mut transfer = Transfer::new(from, to).blocks(sources, destinations);
    if let Some(tokens) = tokens {
        transfer = transfer.tokens(0..tokens, 0..tokens);
    }
    if let Some(deadline) = deadline {
        transfer = transfer.deadline(deadline);
    }
    if from.kind().is_device() || to.kind().is_device() {
        // A job with blocks of a device states an order. Copies between tiers need none.
        transfer =
            transfer.device_order(order.cloned().unwrap_or(DeviceOrder::AlreadySynchronised));
    }
    transfer
}

impl<K> StartedCopy<K> {
    /// A copy that has ended.
    pub(crate) fn ended(tier: TierId, index: usize, result: Result<(), BlockResult>) -> Self {
        Self { tier, indices: smallvec![index], state: CopyState::Ended(result) }
    }

    /// Spawns a task that awaits the end and drops the `keeps` then. This job waits for slots
    /// meanwhile, which their pins may occupy.
    pub(crate) fn watched(mut self, executor: &Executor) -> Self
    where
        K: Send + 'static,
    {
        if let CopyState::Running(copy) = self.state {
            let watched = Arc::new(OneShot::new());
            let shared = Arc::clone(&watched);
            executor.spawn(async move {
                let result = copy.await.result.map(|_| ()).map_err(failed);
                shared.send(result);
            });
            self.state = CopyState::Watched(watched);
        }
        self
    }

    /// Waits for the end. It is called once: a second call may not return.
    pub(crate) async fn end(&mut self) -> Result<(), BlockResult> {
        match &mut self.state {
            CopyState::Ended(result) => result.clone(),
            CopyState::Running(copy) => copy.await.result.map(|_| ()).map_err(failed),
            CopyState::Watched(watched) => watched.receive().await,
        }
    }
}

/// The result of a block whose transfer failed.
pub(crate) fn failed(error: TransferError) -> BlockResult {
    match error {
        TransferError::DeadlineExceeded { .. } => BlockResult::TimedOut,
        TransferError::Cancelled { .. } => BlockResult::Cancelled,
        error => BlockResult::failed(error),
    }
}
