//! The checked keys and blocks of a job.

use smallvec::SmallVec;
use terrane_storage::{IoBuffer, IoMemory};
use terrane_transfer::{Endpoint, Hold, TransferError};

use crate::KeyHash;
use crate::error::StoreError;
use crate::slab::SlabBuffers;
use crate::store::group::{EndpointFacts, GroupInfo, host_buffers};
use crate::store::job::blocks::{Blocks, BlocksKind, EndpointBlocks, Spans};
use crate::store::shared::StoreCore;

/// The keys of a job: their hashes, and their bytes if the job needs them.
pub(crate) struct Keys {
    pub(crate) hashes: SmallVec<[KeyHash; 1]>,
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Keys {
    pub(crate) fn new<K: AsRef<[u8]>>(
        core: &StoreCore,
        group: u16,
        keys: &[K],
    ) -> Result<Self, StoreError> {
        let mut new = Self::hashed(core, group, keys)?;
        new.bytes.reserve(keys.iter().map(|key| key.as_ref().len()).sum());
        for key in keys {
            new.bytes.extend_from_slice(key.as_ref());
            new.ends.push(new.bytes.len());
        }
        Ok(new)
    }

    /// The keys of a job that finds blocks: with their bytes if the store compares these.
    pub(crate) fn to_find<K: AsRef<[u8]>>(
        core: &StoreCore,
        group: u16,
        keys: &[K],
    ) -> Result<Self, StoreError> {
        if core.names.keeps_all {
            Self::new(core, group, keys)
        } else {
            Self::hashed(core, group, keys)
        }
    }

    fn hashed<K: AsRef<[u8]>>(
        core: &StoreCore,
        group: u16,
        keys: &[K],
    ) -> Result<Self, StoreError> {
        let mut hashes = SmallVec::with_capacity(keys.len());
        for (index, key) in keys.iter().enumerate() {
            let hash = core.hasher.hash_in_group(group, key.as_ref());
            hashes.push(hash.map_err(|source| StoreError::Key { index, source })?);
        }
        Ok(Self { hashes, bytes: Vec::new(), ends: Vec::new() })
    }

    pub(crate) fn len(&self) -> usize {
        self.hashes.len()
    }

    pub(crate) fn hash(&self, index: usize) -> KeyHash {
        self.hashes.get(index).copied().unwrap_or(KeyHash::new(0))
    }

    pub(crate) fn bytes(&self, index: usize) -> &[u8] {
        let begin = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied();
        let end = self.ends.get(index).copied().unwrap_or(0);
        self.bytes.get(begin.unwrap_or(0)..end).unwrap_or_default()
    }
}

/// The checked source or destination of a job.
pub(crate) struct Payload {
    memory: BlocksKind,
    /// The facts about the endpoint; `None` if the memory is spans.
    facts: Option<EndpointFacts>,
    lengths: SmallVec<[u32; 4]>,
}

/// Whether a job reads or writes the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadUse {
    Source,
    Destination,
}

impl Payload {
    pub(crate) fn new(
        core: &StoreCore,
        group: u16,
        (keys, blocks): (usize, Blocks),
        usage: PayloadUse,
    ) -> Result<Self, StoreError> {
        let info = core.group(group)?;
        if blocks.len() != keys {
            return Err(StoreError::Counts { keys, blocks: blocks.len() });
        }
        let (facts, lengths) = match &blocks.kind {
            BlocksKind::Spans(spans) => (None, lengths_of_spans(spans)?),
            BlocksKind::Endpoint(blocks) => {
                let facts = info.facts(&blocks.endpoint);
                (Some(facts), lengths_in_endpoint(core, (group, info), blocks, &facts)?)
            }
        };
        let payload = Self { memory: blocks.kind, facts, lengths };
        for (index, &length) in payload.lengths.iter().enumerate() {
            if length == 0 || u64::from(length) > info.block_bytes {
                let (bytes, limit) = (length.into(), info.block_bytes);
                return Err(StoreError::BlockLength { index, bytes, limit });
            }
        }
        if usage == PayloadUse::Destination {
            payload.check_distinct()?;
        }
        Ok(payload)
    }

    /// Refuses a destination that is named twice.
    fn check_distinct(&self) -> Result<(), StoreError> {
        let mut ranges: Vec<(u64, u64, usize)> = match &self.memory {
            BlocksKind::Endpoint(blocks) if blocks.ids.len() < 2 => return Ok(()),
            BlocksKind::Endpoint(blocks) => {
                let ids = blocks.ids.iter().map(|&id| u64::from(id)).enumerate();
                ids.map(|(index, id)| (id, id + 1, index)).collect()
            }
            BlocksKind::Spans(spans) => {
                let of_block = |index| spans.block(index).iter().map(move |span| (index, span));
                let spans = (0..spans.len()).flat_map(of_block);
                let range = |(index, span): (usize, &IoBuffer)| {
                    let begin = span.address.get();
                    (begin, begin.saturating_add(span.length.get()), index)
                };
                spans.map(range).collect()
            }
        };
        ranges.sort_by_key(|(begin, ..)| *begin);
        for pair in ranges.windows(2) {
            if let &[(_, end, first), (begin, _, second)] = pair
                && begin < end
            {
                return Err(StoreError::DestinationNamedTwice { first, second });
            }
        }
        Ok(())
    }

    /// Copies of device memory need a stated order, and those of host memory have none.
    pub(crate) fn check_order(&self, is_stated: bool) -> Result<(), StoreError> {
        let device = self.endpoint().map(Endpoint::kind).filter(|kind| kind.is_device());
        match (device, is_stated) {
            (Some(kind), false) => Err(StoreError::DeviceOrderNotStated { kind }),
            (None, true) => Err(StoreError::DeviceOrderWithoutDevice),
            _ => Ok(()),
        }
    }

    pub(crate) fn length(&self, index: usize) -> u32 {
        self.lengths.get(index).copied().unwrap_or(0)
    }

    /// Whether the host can address the memory.
    pub(crate) fn is_host(&self) -> bool {
        self.facts.is_none_or(|facts| facts.is_host)
    }

    /// The facts about the endpoint, unless the memory is spans.
    pub(crate) const fn facts(&self) -> Option<&EndpointFacts> {
        self.facts.as_ref()
    }

    const fn in_endpoint(&self) -> Option<&EndpointBlocks> {
        match &self.memory {
            BlocksKind::Endpoint(blocks) => Some(blocks),
            BlocksKind::Spans(_) => None,
        }
    }

    /// The endpoint and the block, unless the memory is spans.
    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        self.in_endpoint().map(|blocks| &blocks.endpoint)
    }

    /// The layers of a block. Spans have one.
    pub(crate) fn num_layers(&self) -> u32 {
        self.endpoint().map_or(1, |endpoint| endpoint.layout().geometry().num_layers())
    }

    pub(crate) fn block(&self, index: usize) -> Option<u32> {
        self.blocks().get(index).copied()
    }

    /// The blocks of the endpoint; none if the memory is spans.
    pub(crate) fn blocks(&self) -> &[u32] {
        self.in_endpoint().map_or(&[], |blocks| &blocks.ids)
    }

    /// The host memory of a block, in canonical order.
    pub(crate) fn buffers(&self, index: usize) -> SlabBuffers {
        match &self.memory {
            BlocksKind::Spans(spans) => SlabBuffers::from_slice(spans.block(index)),
            BlocksKind::Endpoint(blocks) => {
                let block = blocks.ids.get(index).copied().unwrap_or(0);
                host_buffers(&blocks.endpoint, block, (self.length(index), blocks.tokens(index)))
            }
        }
    }

    /// The memory of the blocks, which an I/O queue may register; of an endpoint, its first range.
    pub(crate) fn io_memory(&self) -> Option<IoMemory> {
        match &self.memory {
            BlocksKind::Spans(spans) => spans.memory().cloned(),
            BlocksKind::Endpoint(blocks) => blocks.endpoint.io_memory().first().cloned(),
        }
    }

    /// Keeps transfers from blocks of an endpoint while other code uses them.
    pub(crate) fn hold(
        &self,
        indices: impl Iterator<Item = usize>,
        usage: PayloadUse,
    ) -> Result<Option<Hold>, TransferError> {
        let Some(endpoint) = self.endpoint() else { return Ok(None) };
        let held: Vec<u32> = indices.filter_map(|index| self.block(index)).collect();
        if held.is_empty() {
            return Ok(None);
        }
        let hold = match usage {
            PayloadUse::Source => endpoint.hold_for_read(&held),
            PayloadUse::Destination => endpoint.hold_for_write(&held),
        };
        hold.map(Some)
    }
}

fn lengths_of_spans(spans: &Spans) -> Result<SmallVec<[u32; 4]>, StoreError> {
    let length = |index| {
        let bytes: u64 = spans.block(index).iter().map(|span| span.length.get()).sum();
        let limit = u32::MAX.into();
        u32::try_from(bytes).map_err(|_| StoreError::BlockLength { index, bytes, limit })
    };
    (0..spans.len()).map(length).collect()
}

fn lengths_in_endpoint(
    core: &StoreCore,
    (group, info): (u16, &GroupInfo),
    blocks: &EndpointBlocks,
    facts: &EndpointFacts,
) -> Result<SmallVec<[u32; 4]>, StoreError> {
    let EndpointBlocks { endpoint, ids, tokens } = blocks;
    let geometry = endpoint.layout().geometry();
    if !info.fits(facts) {
        return Err(StoreError::OtherShape { group: group.into() });
    }
    if let Some(tokens) = tokens.as_ref().filter(|tokens| tokens.len() != ids.len()) {
        return Err(StoreError::Counts { keys: ids.len(), blocks: tokens.len() });
    }
    let (num_blocks, whole) = (geometry.num_blocks(), u32::try_from(facts.block_bytes).ok());
    let mut lengths = SmallVec::with_capacity(ids.len());
    for (index, &block) in ids.iter().enumerate() {
        let tokens = blocks.tokens(index);
        let bytes = tokens.map_or(whole, |tokens| info.bytes_of(geometry, tokens));
        let bytes = bytes.filter(|_| block < num_blocks);
        let none = || StoreError::NoSuchBlock { block, tokens, num_blocks };
        lengths.push(bytes.ok_or_else(none)?);
    }
    if !facts.is_host && core.host_tier(group).is_none() {
        return Err(StoreError::NeedsHostTier { kind: endpoint.kind() });
    }
    Ok(lengths)
}
