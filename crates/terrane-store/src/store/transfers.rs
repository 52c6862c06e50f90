//! Copies between endpoints, for the tasks of jobs.

use std::future::IntoFuture;
use std::sync::Arc;

use terrane_transfer::{CompletionFuture, DeviceOrder, Endpoint, Transfer, TransferError};

use crate::error::StoreError;
use crate::store::result::BlockResult;
use crate::store::submit::{GuardCell, JobTask};

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
    indices: Vec<usize>,
    /// `None` for a copy that is done.
    copy: Option<Result<CopyEnd<K>, BlockResult>>,
}

/// The end of a copy, which owns what has to live until then.
type CopyEnd<K> = CompletionFuture<(Vec<K>, GuardCell)>;

impl JobTask {
    /// Starts copies between two endpoints. It does not wait.
    pub(crate) fn start_copies<K: Send + 'static>(
        &self,
        (from, to): (&Endpoint, &Endpoint),
        blocks: Vec<BlockCopy<K>>,
    ) -> Vec<StartedCopy<K>> {
        let mut by_tokens: Vec<(Option<u32>, Vec<BlockCopy<K>>)> = Vec::new();
        for block in blocks {
            match by_tokens.iter_mut().find(|(tokens, _)| *tokens == block.tokens) {
                Some((_, list)) => list.push(block),
                None => by_tokens.push((block.tokens, vec![block])),
            }
        }
        let start = |(tokens, blocks)| self.start_copy((from, to), tokens, blocks);
        by_tokens.into_iter().map(start).collect()
    }

    fn start_copy<K: Send + 'static>(
        &self,
        (from, to): (&Endpoint, &Endpoint),
        tokens: Option<u32>,
        blocks: Vec<BlockCopy<K>>,
    ) -> StartedCopy<K> {
        let indices: Vec<usize> = blocks.iter().map(|block| block.index).collect();
        let sources: Vec<u32> = blocks.iter().map(|block| block.from).collect();
        let destinations: Vec<u32> = blocks.iter().map(|block| block.to).collect();
        let mut transfer = Transfer::new(from, to).blocks(&sources, &destinations);
        if let Some(tokens) = tokens {
            transfer = transfer.tokens(0..tokens, 0..tokens);
        }
        if let Some(deadline) = self.control.deadline() {
            transfer = transfer.deadline(deadline);
        }
        if from.kind().is_device() || to.kind().is_device() {
            let order = self.device_order.clone();
            transfer = transfer.device_order(order.unwrap_or(DeviceOrder::AlreadySynchronised));
        }
        if self.layer_by_layer {
            transfer = transfer.layer_by_layer();
        }
        let Some(manager) = &self.core.manager else {
            let result = BlockResult::failed(StoreError::NeedsHostTier { kind: from.kind() });
            return StartedCopy { indices, copy: Some(Err(result)) };
        };
        let keeps = blocks.into_iter().map(|block| block.keeps).collect();
        let copy = match manager.submit(transfer, (keeps, Arc::clone(&self.guard))) {
            Ok(completion) => {
                self.control.add_ticket(completion.ticket());
                Ok(completion.into_future())
            }
            Err(rejected) => Err(failed(rejected.cause)),
        };
        StartedCopy { indices, copy: Some(copy) }
    }
}

impl<K> StartedCopy<K> {
    /// A copy that has ended.
    pub(crate) fn done(index: usize) -> Self {
        Self { indices: vec![index], copy: None }
    }

    /// Waits for the end, and returns the result of each block.
    pub(crate) async fn end(self) -> Vec<(usize, Result<(), BlockResult>)> {
        let result = match self.copy {
            None => Ok(()),
            Some(Err(result)) => Err(result),
            Some(Ok(copy)) => copy.await.result.map(|_| ()).map_err(failed),
        };
        self.indices.into_iter().map(|index| (index, result.clone())).collect()
    }
}

fn failed(error: TransferError) -> BlockResult {
    match error {
        TransferError::DeadlineExceeded { .. } => BlockResult::TimedOut,
        TransferError::Cancelled { .. } => BlockResult::Cancelled,
        error => BlockResult::failed(error),
    }
}
