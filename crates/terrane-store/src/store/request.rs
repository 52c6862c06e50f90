//! The checked keys and blocks of a job.

use smallvec::SmallVec;
use terrane_storage::IoMemory;
use terrane_transfer::{Endpoint, Hold, TransferError};

use crate::KeyHash;
use crate::error::StoreError;
use crate::slab::SlabBuffers;
use crate::store::blocks::{Blocks, BlocksKind, Spans};
use crate::store::group::{EndpointFacts, GroupInfo, host_buffers};
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
    memory: PayloadMemory,
    lengths: SmallVec<[u32; 4]>,
}

enum PayloadMemory {
    Endpoint {
        endpoint: Endpoint,
        facts: EndpointFacts,
        blocks: SmallVec<[u32; 4]>,
        /// `None` for whole blocks.
        tokens: Option<Vec<u32>>,
    },
    Spans(Spans),
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
        let payload = match blocks.kind {
            BlocksKind::Spans(spans) => Self::of_spans(spans)?,
            BlocksKind::Endpoint { endpoint, blocks, tokens } => {
                Self::of_endpoint(core, (group, info), (endpoint, blocks, tokens))?
            }
        };
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

    fn of_spans(spans: Spans) -> Result<Self, StoreError> {
        let length = |index| {
            let bytes: u64 = spans.block(index).iter().map(|span| span.length.get()).sum();
            let limit = u32::MAX.into();
            u32::try_from(bytes).map_err(|_| StoreError::BlockLength { index, bytes, limit })
        };
        let lengths = (0..spans.len()).map(length).collect::<Result<_, _>>()?;
        Ok(Self { memory: PayloadMemory::Spans(spans), lengths })
    }

    fn of_endpoint(
        core: &StoreCore,
        (group, info): (u16, &GroupInfo),
        (endpoint, blocks, tokens): (Endpoint, SmallVec<[u32; 4]>, Option<Vec<u32>>),
    ) -> Result<Self, StoreError> {
        let geometry = endpoint.layout().geometry();
        let facts = info.facts(&endpoint);
        if !info.fits(&facts) {
            return Err(StoreError::OtherShape { group: group.into() });
        }
        if let Some(tokens) = tokens.as_ref().filter(|tokens| tokens.len() != blocks.len()) {
            return Err(StoreError::Counts { keys: blocks.len(), blocks: tokens.len() });
        }
        let (num_blocks, whole) = (geometry.num_blocks(), u32::try_from(facts.block_bytes).ok());
        let mut lengths = SmallVec::with_capacity(blocks.len());
        for (index, &block) in blocks.iter().enumerate() {
            let tokens = tokens.as_ref().and_then(|tokens| tokens.get(index)).copied();
            let bytes = tokens.map_or(whole, |tokens| info.bytes_of(geometry, tokens));
            let bytes = bytes.filter(|_| block < num_blocks);
            let none = || StoreError::NoSuchBlock { block, tokens: tokens.unwrap_or(0) };
            lengths.push(bytes.ok_or_else(none)?);
        }
        if !facts.is_host && core.host_tier(group).is_none() {
            return Err(StoreError::NeedsHostTier { kind: endpoint.kind() });
        }
        Ok(Self { memory: PayloadMemory::Endpoint { endpoint, facts, blocks, tokens }, lengths })
    }

    /// Refuses a destination that is named twice.
    fn check_distinct(&self) -> Result<(), StoreError> {
        match &self.memory {
            PayloadMemory::Endpoint { blocks, .. } if blocks.len() < 2 => Ok(()),
            PayloadMemory::Endpoint { blocks, .. } => {
                let mut order: Vec<usize> = (0..blocks.len()).collect();
                order.sort_by_key(|&index| blocks.get(index));
                twice(&order, |first, second| blocks.get(first) == blocks.get(second))
            }
            PayloadMemory::Spans(spans) => {
                let of_block = |index| spans.block(index).iter().map(move |span| (index, span));
                let mut all: Vec<_> = (0..spans.len()).flat_map(of_block).collect();
                all.sort_by_key(|(_, span)| span.address.get());
                let mut before: Option<(u64, usize)> = None;
                for (index, span) in all {
                    let begin = span.address.get();
                    if let Some((end, first)) = before
                        && begin < end
                    {
                        return Err(StoreError::DestinationNamedTwice { first, second: index });
                    }
                    before = Some((begin.saturating_add(span.length.get()), index));
                }
                Ok(())
            }
        }
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
    pub(crate) const fn is_host(&self) -> bool {
        match &self.memory {
            PayloadMemory::Endpoint { facts, .. } => facts.is_host,
            PayloadMemory::Spans(_) => true,
        }
    }

    /// The endpoint and the block, unless the memory is spans.
    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.memory {
            PayloadMemory::Endpoint { endpoint, .. } => Some(endpoint),
            PayloadMemory::Spans(_) => None,
        }
    }

    pub(crate) fn block(&self, index: usize) -> Option<u32> {
        match &self.memory {
            PayloadMemory::Endpoint { blocks, .. } => blocks.get(index).copied(),
            PayloadMemory::Spans(_) => None,
        }
    }

    /// The blocks of the endpoint; none if the memory is spans.
    pub(crate) fn blocks(&self) -> &[u32] {
        match &self.memory {
            PayloadMemory::Endpoint { blocks, .. } => blocks,
            PayloadMemory::Spans(_) => &[],
        }
    }

    /// The host memory of a block, in canonical order.
    pub(crate) fn buffers(&self, index: usize) -> SlabBuffers {
        match &self.memory {
            PayloadMemory::Spans(spans) => SlabBuffers::from_slice(spans.block(index)),
            PayloadMemory::Endpoint { endpoint, blocks, tokens, .. } => {
                let tokens = tokens.as_ref().and_then(|tokens| tokens.get(index)).copied();
                let block = blocks.get(index).copied().unwrap_or(0);
                host_buffers(endpoint, block, (self.length(index), tokens))
            }
        }
    }

    /// The memory of the blocks, which an I/O queue may register; of an endpoint, its first range.
    pub(crate) fn io_memory(&self) -> Option<IoMemory> {
        match &self.memory {
            PayloadMemory::Spans(spans) => spans.memory().cloned(),
            PayloadMemory::Endpoint { endpoint, .. } => endpoint.io_memory().first().cloned(),
        }
    }

    /// Keeps transfers from blocks of an endpoint while other code uses them.
    pub(crate) fn hold(
        &self,
        indices: impl Iterator<Item = usize>,
        usage: PayloadUse,
    ) -> Result<Option<Hold>, TransferError> {
        let PayloadMemory::Endpoint { endpoint, blocks, .. } = &self.memory else {
            return Ok(None);
        };
        let held: Vec<u32> = indices.filter_map(|index| blocks.get(index).copied()).collect();
        if held.is_empty() {
            return Ok(None);
        }
        let hold = match usage {
            PayloadUse::Source => endpoint.hold_for_read(&held),
            PayloadUse::Destination => endpoint.hold_for_write(&held),
        };
        hold.map(Some)
    }

    /// The facts about the endpoint, unless the memory is spans.
    pub(crate) const fn facts(&self) -> Option<&EndpointFacts> {
        match &self.memory {
            PayloadMemory::Endpoint { facts, .. } => Some(facts),
            PayloadMemory::Spans(_) => None,
        }
    }
}

fn twice(order: &[usize], is_same: impl Fn(usize, usize) -> bool) -> Result<(), StoreError> {
    for pair in order.windows(2) {
        if let &[first, second] = pair
            && is_same(first, second)
        {
            return Err(StoreError::DestinationNamedTwice { first, second });
        }
    }
    Ok(())
}
