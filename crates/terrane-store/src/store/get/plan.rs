//! The plan of a get: the place of each block, and the way by which it reaches the destination.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::KeyHash;
use crate::error::StoreError;
use crate::store::claims::Claim;
use crate::store::copy::transfers::{BlockCopy, CopyList};
use crate::store::get::Get;
use crate::store::job::result::BlockResult;
use crate::store::open::builder::WritePolicy;
use crate::store::query::presence::TierId;
use crate::store::shared::StoreCore;
use crate::store::slot_table::PinnedSlot;
use crate::store::tier::count;

/// The place of a block.
enum Located {
    Pinned(PinnedSlot),
    /// No tier has it, and a job with this claim writes it.
    Writing(Arc<Claim>),
    Absent,
}

/// The blocks of a get, by the way that they take.
#[derive(Default)]
pub(super) struct Plan {
    /// From the disk tier into the destination.
    pub(super) from_disk: Vec<(usize, PinnedSlot)>,
    /// From host memory into the destination, on this thread.
    pub(super) on_thread: Vec<(usize, PinnedSlot)>,
    /// By a copy engine, from each tier.
    pub(super) by_engine: CopyList<PinnedSlot>,
    /// By way of the host tier.
    pub(super) relayed: Vec<usize>,
    /// Keys that other jobs write.
    pub(super) waits: Vec<(usize, Arc<Claim>)>,
    /// The number of keys that were found in each tier.
    hits: SmallVec<[u64; 4]>,
}

impl Plan {
    /// Puts the blocks in the order of the keys.
    fn reverse(&mut self) {
        self.from_disk.reverse();
        self.on_thread.reverse();
        self.by_engine.reverse();
        self.relayed.reverse();
        self.waits.reverse();
    }

    fn count_hit(&mut self, tier: TierId) {
        let index = tier.index();
        if self.hits.len() <= index {
            self.hits.resize(index + 1, 0);
        }
        if let Some(hits) = self.hits.get_mut(index) {
            *hits += 1;
        }
    }
}

impl Get<'_> {
    fn locate(&self, index: usize) -> Located {
        let (core, group) = (&self.task.core, self.task.group);
        let key = self.keys.hash(index);
        let found = match core.pin(group, key) {
            Some(pin) => pin,
            None => match core.claims.get(key) {
                Some(claim) => return Located::Writing(claim),
                // A put may have ended between the two looks.
                None => match core.pin(group, key) {
                    Some(pin) => pin,
                    None => return Located::Absent,
                },
            },
        };
        if core.is_name(key, self.keys.bytes(index)) {
            Located::Pinned(found)
        } else {
            Located::Absent
        }
    }

    pub(super) fn plan(&mut self, pending: &[usize]) -> Plan {
        let mut plan = Plan::default();
        // The head of a prefix is used last, so that its tail is evicted first.
        for &index in pending.iter().rev() {
            match self.locate(index) {
                Located::Pinned(pin) => self.add(&mut plan, index, pin),
                Located::Writing(claim) => plan.waits.push((index, claim)),
                Located::Absent => {
                    self.task.core.count_absent(self.task.group, self.keys.hash(index));
                    self.set(index, BlockResult::Absent);
                }
            }
        }
        if pending.len() > 1 {
            plan.reverse();
        }
        for (tier, &hits) in self.task.core.tiers.iter().zip(&plan.hits) {
            if hits > 0 {
                tier.counters.hits(hits);
            }
        }
        plan
    }

    fn add(&mut self, plan: &mut Plan, index: usize, pin: PinnedSlot) {
        let (core, group) = (&self.task.core, self.task.group);
        let (stored, requested) = (pin.block.length, self.destination.length(index));
        if stored != requested {
            count(&core.counters.missed_length, 1);
            return self.set(index, BlockResult::WrongLength { stored, requested });
        }
        let Some(tier) = core.tiers.get(pin.table.tier.index()) else { return };
        plan.count_hit(tier.id);
        count_use(core, self.keys.hash(index), &pin);
        let Some(memory) = tier.blocks(group) else {
            if self.destination.is_host() {
                plan.from_disk.push((index, pin));
            } else {
                plan.relayed.push(index);
            }
            return;
        };
        let tokens = core
            .group(group)
            .ok()
            .zip(self.destination.facts())
            .and_then(|(info, to)| info.transfer_tokens((&memory.facts, to), stored));
        match (tokens, self.destination.block(index)) {
            (Some(tokens), Some(to)) => {
                let copy = BlockCopy { index, from: pin.block.slot, to, tokens, keeps: pin };
                plan.by_engine.add(tier.id, copy);
            }
            _ if memory.facts.is_host && self.destination.is_host() => {
                plan.on_thread.push((index, pin))
            }
            _ if core.host_tier(group).is_some() => plan.relayed.push(index),
            _ => self.set(
                index,
                BlockResult::failed(StoreError::NeedsHostTier { kind: memory.endpoint.kind() }),
            ),
        }
    }
}

/// Slower tiers count this many first uses of a block, too. S3-FIFO keeps a block after two.
const FIRST_USES: u8 = 2;

/// After the first uses, slower tiers count one in this many. Few gets then search them.
const USES_BELOW: u8 = 16;

/// Counts a use of a block, which the write policy may write down then.
pub(crate) fn count_use(core: &Arc<StoreCore>, key: KeyHash, pin: &PinnedSlot) {
    let uses = pin.table.hit(pin.block.slot);
    if uses != 0 && (uses <= FIRST_USES || uses.is_multiple_of(USES_BELOW)) {
        // Otherwise the slower tiers would evict the blocks that are used most.
        core.touch_below(pin.table.tier, pin.table.group, key);
    }
    if core.policy == WritePolicy::AfterUses(uses)
        && pin.table.is_pin_dirty(pin)
        && let Some(own) = pin.table.pin(key)
    {
        core.write_used(pin.table.tier, key, own);
    }
}
