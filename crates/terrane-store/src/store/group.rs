//! The blocks of a group: their lengths, and the bytes of a block in an endpoint.

use smallvec::SmallVec;
use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, Memory};
use terrane_layout::{Axis, AxisSteps, BlockFingerprint, Geometry, LayoutError, Section};
use terrane_storage::IoBuffer;
use terrane_transfer::{Endpoint, EndpointId};

use crate::slab::SlabBuffers;
use crate::store::open::builder::BlockGroup;
use crate::sync::{RwLock, read, write};

/// The alignment of a block in a tier that the store allocates: direct I/O needs no bounce buffer.
const SLOT_ALIGNMENT: u64 = 4096;

/// The shape of the blocks of a group.
pub(crate) struct GroupInfo {
    /// The most bytes of a block.
    pub(crate) block_bytes: u64,
    /// The bytes of a slot on disk.
    pub(crate) slot_bytes: u64,
    weight: u32,
    /// `None` for opaque blocks.
    geometry: Option<Geometry>,
    shape: Option<BlockFingerprint>,
    /// The bytes of a block of so many tokens, from 1 token on. Empty for opaque blocks.
    token_bytes: Vec<u32>,
    /// The facts about the endpoints that recent jobs named.
    known: RwLock<SmallVec<[(EndpointId, EndpointFacts); MOST_KNOWN]>>,
}

/// A serving engine has fewer endpoints for a group.
const MOST_KNOWN: usize = 8;

/// The facts about an endpoint that take long to compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndpointFacts {
    shape: BlockFingerprint,
    pub(crate) block_bytes: u64,
    /// Whether the host can address its memory.
    pub(crate) is_host: bool,
}

impl EndpointFacts {
    pub(crate) fn of(endpoint: &Endpoint) -> Self {
        let geometry = endpoint.layout().geometry();
        let block_bytes = geometry.block_bytes().get();
        Self { shape: shape_of(geometry), block_bytes, is_host: is_host(endpoint) }
    }
}

/// The share of each group in the bytes of a tier.
pub(crate) fn shares(groups: &[GroupInfo], bytes: ByteCount) -> impl Iterator<Item = u64> {
    let all: u128 = groups.iter().map(|group| u128::from(group.weight)).sum();
    let share =
        move |group: &GroupInfo| u128::from(bytes.get()) * u128::from(group.weight) / all.max(1);
    groups.iter().map(move |group| u64::try_from(share(group)).unwrap_or(u64::MAX))
}

impl GroupInfo {
    pub(crate) fn new(group: &BlockGroup) -> Self {
        let geometry = group.geometry.clone();
        Self {
            block_bytes: group.block_bytes,
            slot_bytes: group.block_bytes,
            weight: group.weight,
            shape: geometry.as_ref().map(shape_of),
            token_bytes: geometry.as_ref().map(token_bytes).unwrap_or_default(),
            geometry,
            known: RwLock::default(),
        }
    }

    /// The facts about an endpoint of a job. Jobs name the same few endpoints.
    pub(crate) fn facts(&self, endpoint: &Endpoint) -> EndpointFacts {
        let id = endpoint.id();
        let known = read(&self.known).iter().find(|(other, _)| *other == id).copied();
        if let Some((_, facts)) = known {
            return facts;
        }
        let facts = EndpointFacts::of(endpoint);
        let mut known = write(&self.known);
        if known.len() == MOST_KNOWN {
            known.remove(0);
        }
        known.push((id, facts));
        facts
    }

    /// Whether a block of this endpoint can be a block of the group.
    pub(crate) fn fits(&self, facts: &EndpointFacts) -> bool {
        match self.shape {
            Some(shape) => facts.shape == shape,
            None => facts.block_bytes <= self.block_bytes,
        }
    }

    /// The number of tokens of a block of this length; `None` if no number of tokens has it.
    pub(crate) fn tokens_of(&self, length: u32) -> Option<u32> {
        let index = self.token_bytes.binary_search(&length).ok()?;
        u32::try_from(index + 1).ok()
    }

    /// The bytes of a block of this geometry with `tokens` tokens; `None` if it has fewer, or for
    /// 0.
    pub(crate) fn bytes_of(&self, geometry: &Geometry, tokens: u32) -> Option<u32> {
        let index = to_usize(tokens.into()).checked_sub(1)?;
        if self.token_bytes.is_empty() {
            return token_bytes(geometry).get(index).copied();
        }
        self.token_bytes.get(index).copied()
    }

    /// The tokens that a transfer of a block of this length names between these endpoints:
    /// `Some(None)` for a whole block, and `None` if no copy engine can copy it.
    pub(crate) fn transfer_tokens(
        &self,
        (from, to): (&EndpointFacts, &EndpointFacts),
        length: u32,
    ) -> Option<Option<u32>> {
        let is_whole = from.block_bytes == u64::from(length);
        if self.geometry.is_none() {
            return (is_whole && from.shape == to.shape).then_some(None);
        }
        if is_whole { Some(None) } else { self.tokens_of(length).map(Some) }
    }

    /// The geometry of blocks of this group in memory of the store: a block is one span, in canonical
    /// order.
    pub(crate) fn own_geometry(&self, blocks: u32) -> Result<Geometry, LayoutError> {
        let stride = self.own_stride();
        let mut sections = Vec::new();
        match &self.geometry {
            None => {
                let bytes = u32::try_from(self.block_bytes).unwrap_or(u32::MAX);
                let section = Section::new(terrane_layout::SectionName::OPAQUE, 1)
                    .axis(Axis::Block, AxisSteps::new(blocks, stride))
                    .axis(Axis::Element, AxisSteps::new(bytes, 1));
                sections.push(section);
            }
            Some(geometry) => own_sections(geometry, (blocks, stride), &mut sections),
        }
        let bytes = ByteCount::new(stride).checked_mul("blocks", blocks.into())?;
        Geometry::from_sections_in(sections, &[bytes])
    }

    /// The bytes between two blocks in memory of the store.
    pub(crate) const fn own_stride(&self) -> u64 {
        self.block_bytes.next_multiple_of(SLOT_ALIGNMENT)
    }
}

/// The sections of blocks in canonical order, without gaps between them.
fn own_sections(geometry: &Geometry, (blocks, stride): (u32, u64), all: &mut Vec<Section>) {
    let layers = geometry.num_layers();
    let mut sections: Vec<&Section> = geometry.sections().iter().collect();
    sections.sort_by_key(|section| section.name());
    let has_layers = |section: &Section| layers == 1 || section.shape().layers > 1;
    let layered = sections.iter().filter(|section| has_layers(section));
    let layer_bytes: u64 = layered.map(|section| section.shape().piece_bytes()).sum();
    let (mut in_layer, mut behind) = (0, layer_bytes * u64::from(layers));
    for section in sections {
        let shape = section.shape();
        let row = u64::from(shape.elements) * u64::from(shape.element_bytes);
        let heads = shape.heads.unwrap_or(1);
        let mut own = Section::new(section.name(), shape.element_bytes)
            .axis(Axis::Block, AxisSteps::new(blocks, stride))
            .axis(Axis::Token, AxisSteps::new(shape.tokens, row * u64::from(heads)))
            .axis(Axis::Element, AxisSteps::new(shape.elements, shape.element_bytes.into()));
        if shape.heads.is_some() {
            own = own.axis(Axis::Head, AxisSteps::new(heads, row));
        }
        let at = if has_layers(section) { &mut in_layer } else { &mut behind };
        if has_layers(section) {
            own = own.axis(Axis::Layer, AxisSteps::new(layers, layer_bytes));
        }
        all.push(own.at(0, *at));
        *at += shape.piece_bytes();
    }
}

fn shape_of(geometry: &Geometry) -> BlockFingerprint {
    BlockFingerprint::new(geometry, 0, &[])
}

/// The bytes of a block of 1 token, 2 tokens and so on.
fn token_bytes(geometry: &Geometry) -> Vec<u32> {
    let shapes: Vec<_> = geometry.sections().iter().map(Section::shape).collect();
    let most = shapes.iter().map(|shape| shape.tokens).max().unwrap_or(1);
    let bytes = |tokens: u32| {
        let each = shapes.iter().map(|shape| {
            let row = shape.piece_bytes() / u64::from(shape.tokens.max(1));
            u64::from(shape.layers) * row * u64::from(shape.tokens.min(tokens))
        });
        u32::try_from(each.sum::<u64>()).unwrap_or(u32::MAX)
    };
    (1..=most).map(bytes).collect()
}

/// The host memory of the first `length` bytes of a block in canonical order. `tokens` is their
/// number of tokens, if they are whole tokens.
pub(crate) fn host_buffers(
    endpoint: &Endpoint,
    block: u32,
    (length, tokens): (u32, Option<u32>),
) -> SlabBuffers {
    let layout = endpoint.layout();
    let mut left = u64::from(length);
    let mut buffers = SlabBuffers::new();
    let tokens = tokens.unwrap_or(u32::MAX);
    layout.geometry().canonical_spans(block, tokens, &mut |at, bytes| {
        let bytes = bytes.min(left);
        let address = layout.location_at(at).and_then(|location| location.as_host());
        if let Some(address) = address.filter(|_| bytes > 0) {
            left -= bytes;
            buffers.push(IoBuffer { address, length: ByteCount::new(bytes) });
        }
    });
    buffers
}

/// Whether the host can address the memory of an endpoint.
fn is_host(endpoint: &Endpoint) -> bool {
    let regions = endpoint.layout().regions();
    endpoint.kind().is_host() && regions.iter().all(|region| region.location().as_host().is_some())
}
