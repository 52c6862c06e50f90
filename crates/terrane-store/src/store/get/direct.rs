//! Gets of few blocks from one tier of memory. They have no task, which would take longer to make than to
//! look the blocks up.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use smallvec::{SmallVec, smallvec};
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_transfer::{EndSink, Hold, Report, TransferError};

use crate::store::copy::copies::{self, COPY_BYTES_AT_ONCE};
use crate::store::copy::transfers::{failed, transfer};
use crate::store::get::plan::count_use;
use crate::store::job::Job;
use crate::store::job::options::JobOptions;
use crate::store::job::request::{Keys, Payload};
use crate::store::job::result::BlockResult;
use crate::store::job::task::{EndParts, call_foreign};
use crate::store::query::presence::TierId;
use crate::store::shared::StoreCore;
use crate::store::slot_table::PinnedSlot;

/// In jobs of more blocks, a task is a small part of the work.
const MOST_BLOCKS: usize = 8;

/// The pinned blocks of a get. For all of them, the fastest tier is this memory tier.
pub(crate) struct DirectGet {
    tier: TierId,
    tokens: Option<u32>,
    pins: SmallVec<[PinnedSlot; 1]>,
}

/// A copy of few bytes within host memory, on the store's thread. With a copy engine, two threads
/// would wake: first the engine's, then the store's.
struct ShortCopy {
    // They drop in this order, also after a panic: the blocks and their endpoint are free before the
    // outcome is published.
    hold: Hold,
    destination: Payload,
    end: DirectEnd,
}

/// Receives the end of the transfer of a [`DirectGet`].
struct DirectSink {
    /// `None` once the end has come.
    end: Mutex<Option<DirectEnd>>,
}

/// The values that the end of a [`DirectGet`] needs.
struct DirectEnd {
    pins: SmallVec<[PinnedSlot; 1]>,
    /// The caller's guard.
    guard: Option<Box<dyn Send>>,
    /// `None` once the job has ended.
    parts: Option<EndParts>,
}

/// Pins the blocks of a get if one transfer can copy all of them. Otherwise none stays pinned.
pub(crate) fn find(
    core: &StoreCore,
    options: &JobOptions,
    keys: &Keys,
    destination: &Payload,
) -> Option<DirectGet> {
    let facts = destination.facts()?;
    let has_passed = |deadline: Instant| deadline <= Instant::now();
    if core.manager.is_none()
        || keys.len() > MOST_BLOCKS
        || options.layer_by_layer
        || options.deadline.is_some_and(has_passed)
    {
        return None;
    }
    let (group, info) = (options.group, core.group(options.group).ok()?);
    let mut found: Option<DirectGet> = None;
    for index in 0..keys.len() {
        let (key, length) = (keys.hash(index), destination.length(index));
        let pin = core.pin(group, key)?;
        let tier = core.tiers.get(pin.table.tier.index())?;
        let memory = tier.blocks(group)?;
        let tokens = info.transfer_tokens((&memory.facts, facts), length)?;
        if pin.block.length != length || !core.is_name(key, keys.bytes(index)) {
            return None;
        }
        match &mut found {
            None => found = Some(DirectGet { tier: tier.id, tokens, pins: smallvec![pin] }),
            Some(found) if found.tier == tier.id && found.tokens == tokens => found.pins.push(pin),
            Some(_) => return None,
        }
    }
    found
}

impl DirectGet {
    /// Starts the copy, whose end is that of the job.
    pub(crate) fn start<G: Send + 'static>(
        self,
        core: &Arc<StoreCore>,
        (parts, options): (EndParts, &JobOptions),
        (keys, destination): (&Keys, Payload),
        guard: G,
    ) -> Job {
        let Self { tier, tokens, pins } = self;
        let control = Arc::clone(&parts.control);
        // The head of a prefix is used last, so that its tail is evicted first.
        for (key, pin) in keys.hashes.iter().zip(&pins).rev() {
            count_use(core, *key, pin);
        }
        let end = DirectEnd { pins, guard: Some(Box::new(guard)), parts: Some(parts) };
        let memory = core.tiers.get(tier.index()).and_then(|tier| tier.blocks(options.group));
        let (Some(memory), Some(to)) = (memory, destination.endpoint()) else {
            drop(end);
            return Job { control };
        };
        let is_short =
            memory.facts.is_host && destination.is_host() && end.bytes() <= COPY_BYTES_AT_ONCE;
        if is_short
            && core.executor.has_empty_queue()
            && let Ok(hold) = to.hold_for_write(destination.blocks())
        {
            let copy = ShortCopy { hold, destination, end };
            core.executor.call(move || copy.run());
            return Job { control };
        }
        let mut sources = SmallVec::<[u32; MOST_BLOCKS]>::new();
        end.pins.iter().for_each(|pin| sources.push(pin.block.slot));
        let sink = Arc::new(DirectSink { end: Mutex::new(Some(end)) });
        let options = (tokens, options.deadline, options.device_order.as_ref());
        let blocks = (&sources[..], destination.blocks());
        let transfer = transfer((&memory.endpoint, to), blocks, options);
        let Some(manager) = &core.manager else { return Job { control } };
        let submit = || manager.submit_to(transfer, Arc::clone(&sink));
        match catch_unwind(AssertUnwindSafe(submit)) {
            Ok(Ok(ticket)) => control.add_ticket(ticket),
            Ok(Err(cause)) => {
                let end = lock(&sink.end).take();
                if let Some(end) = end {
                    end.finish(Err(failed(cause)));
                }
            }
            // The job ends when the engine, or this function, drops the sink.
            Err(_) => tracing::error!("a copy engine panicked in a submission"),
        }
        Job { control }
    }
}

impl ShortCopy {
    fn run(self) {
        let result = self.end.copy_to(&self.destination);
        let Self { hold, destination, end } = self;
        drop((hold, destination));
        end.finish(result);
    }
}

impl EndSink for DirectSink {
    /// The rest is done on the store's thread: guards and wakers are foreign code, and an engine has
    /// other transfers to end.
    fn ended(&self, result: Result<Report, TransferError>) {
        let end = lock(&self.end).take();
        let executor = end.as_ref().and_then(|end| Some(end.parts.as_ref()?.core.executor.clone()));
        if let (Some(end), Some(executor)) = (end, executor) {
            let result = result.map(|_| ()).map_err(failed);
            executor.call(move || end.finish(result));
        }
    }
}

impl DirectEnd {
    fn bytes(&self) -> u64 {
        self.pins.iter().map(|pin| u64::from(pin.block.length)).sum()
    }

    /// Copies the blocks on this thread. Both ends are host memory, and the destination is held.
    fn copy_to(&self, destination: &Payload) -> Result<(), BlockResult> {
        let parts = self.parts.as_ref().ok_or(BlockResult::Cancelled)?;
        for (index, pin) in self.pins.iter().enumerate() {
            let from = parts.core.host_memory(pin).ok_or(BlockResult::Cancelled)?;
            // SAFETY: the pin keeps the slot, whose block is only read. The hold keeps the destination,
            // and other transfers from it.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            unsafe {
                copies::copy(&from, &destination.buffers(index));
            }
        }
        Ok(())
    }

    /// Releases the blocks, drops the guard, then publishes the outcome.
    fn finish(mut self, result: Result<(), BlockResult>) {
        let Some(parts) = &self.parts else { return };
        let took = parts.begun.elapsed();
        let tier = self.pins.first().and_then(|pin| parts.core.tiers.get(pin.table.tier.index()));
        if let Some(tier) = tier {
            tier.counters.hits(to_u64(self.pins.len()));
        }
        let mut results = Vec::with_capacity(self.pins.len());
        for pin in &self.pins {
            let bytes = pin.block.length;
            if let Some(tier) = tier {
                tier.counters.copied(&result, bytes, took);
            }
            let done = |()| BlockResult::Done { bytes };
            results.push(result.clone().map_or_else(|result| result, done));
        }
        self.end(results);
    }

    fn end(&mut self, results: Vec<BlockResult>) {
        self.pins.clear();
        let guard = self.guard.take();
        call_foreign("the guard of a caller", || drop(guard));
        if let Some(parts) = self.parts.take() {
            parts.publish(results);
        }
    }
}

impl Drop for DirectEnd {
    fn drop(&mut self) {
        // An engine or the end panicked, before an outcome was published.
        let Some(parts) = &self.parts else { return };
        if parts.core.owner.is_current() {
            let results = vec![BlockResult::Cancelled; parts.keys];
            self.end(results);
        } else {
            // The job is the parent process's.
            let _left = ManuallyDrop::new((self.parts.take(), self.guard.take()));
        }
    }
}
