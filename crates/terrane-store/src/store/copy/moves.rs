//! Copies of pinned blocks to slots of another tier of memory.

use std::sync::Arc;

use crate::error::StoreError;
use crate::store::copy::copies::YieldingCopies;
use crate::store::copy::transfers::{BlockCopy, CopyList, StartedCopy};
use crate::store::job::result::BlockResult;
use crate::store::job::task::JobTask;
use crate::store::slot_table::{PinnedSlot, SharedSlots, TakenSlots};
use crate::store::tier::TierBlocks;

/// The values that live until a copy has ended: the pin of its source, and the slots of its job.
type Keeps = (Arc<PinnedSlot>, Arc<SharedSlots>);

impl JobTask {
    /// Starts copies of blocks of a group. `blocks` has the place of each block in the job, its
    /// source, and its slot in `to`. Copies that no engine can do are done on this thread, which
    /// yields to other tasks.
    pub(crate) async fn start_moves<'a>(
        &self,
        group: u16,
        (to, taken): (&TierBlocks, &TakenSlots),
        blocks: impl Iterator<Item = (usize, &'a Arc<PinnedSlot>, u32)> + Send,
    ) -> Vec<StartedCopy<Keeps>> {
        let source_of = |tier| self.core.tier(tier).ok().and_then(|tier| tier.blocks(group));
        let (mut started, mut copies, mut on_thread) =
            (Vec::new(), CopyList::default(), Vec::new());
        for (index, pin, slot) in blocks {
            let (block, tier) = (pin.block, pin.table.tier);
            let (Some(from), Ok(info)) = (source_of(tier), self.core.group(group)) else {
                let closed = Err(BlockResult::failed(StoreError::Closed));
                started.push(StartedCopy::ended(tier, index, closed));
                continue;
            };
            if let Some(tokens) = info.transfer_tokens((&from.facts, &to.facts), block.length) {
                let keeps = (Arc::clone(pin), taken.share());
                copies.add(tier, BlockCopy { index, from: block.slot, to: slot, tokens, keeps });
                continue;
            }
            if from.facts.is_host && to.facts.is_host {
                let bytes = from.buffers(info, block.slot, block.length);
                on_thread.push((index, pin, (slot, info), bytes));
            } else {
                let error = StoreError::OtherShape { group: group.into() };
                started.push(StartedCopy::ended(tier, index, Err(BlockResult::failed(error))));
            }
        }
        for each in copies {
            if let Some(from) = source_of(each.tier) {
                started.push(self.start_copy((&from.endpoint, &to.endpoint), each, None));
            }
        }
        let mut yielding = YieldingCopies::new(&self.control);
        for (index, pin, (slot, info), from) in on_thread {
            // SAFETY: the pin keeps the source, and the other slot is this job's alone.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            let copied =
                unsafe { to.copy_in(&mut yielding, info, (slot, pin.block.length), &from).await };
            started.push(StartedCopy::ended(pin.table.tier, index, copied));
        }
        started
    }
}
