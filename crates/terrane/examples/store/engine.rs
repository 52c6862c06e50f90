//! The cache of a serving engine, in system memory: one region for each layer, as in real engines.

use std::error::Error;

use terrane::core::ByteCount;
use terrane::layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig};
use terrane::storage::{SystemAllocator, SystemOptions};
use terrane::transfer::Endpoint;

/// The blocks that requests compute.
pub(crate) struct Engine {
    endpoint: Endpoint,
}

impl Engine {
    /// Allocates a cache of this many blocks of Llama 3.1 8B: 32 layers, K and V, 16 tokens, 8
    /// heads of 128 elements of 2 bytes.
    pub(crate) fn new(blocks: u32) -> Result<Self, Box<dyn Error>> {
        let config = LayoutConfig::builder()
            .num_blocks(blocks)
            .num_layers(32)
            .outer_dim(2)
            .page_size(16)
            .num_heads(8)
            .inner_dim(8 * 128)
            .element(ElementFormat::Width(2))
            .build()?;
        let system = SystemAllocator::new(SystemOptions::default());
        let layout = LayoutBuilder::new(config).layer_separate(BlockDimension::Second);
        let layout = layout.allocate(&system).unregistered().build()?;
        Ok(Self { endpoint: Endpoint::new(layout)? })
    }

    pub(crate) const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) fn block_bytes(&self) -> ByteCount {
        self.endpoint.layout().geometry().block_bytes()
    }

    /// "Computes" a block: fills it with bytes that follow from its key.
    pub(crate) fn compute(&self, block: u32, key: &str) -> Result<(), Box<dyn Error>> {
        let mut words = Words::new(key);
        let _hold = self.endpoint.hold_for_write(&[block])?;
        self.each_span(block, |span| {
            for chunk in span.chunks_mut(8) {
                chunk.iter_mut().zip(words.next_word()).for_each(|(to, from)| *to = from);
            }
        });
        Ok(())
    }

    /// Whether all bytes of a block are those of its key.
    pub(crate) fn is_right(&self, block: u32, key: &str) -> Result<bool, Box<dyn Error>> {
        let mut words = Words::new(key);
        let mut is_right = true;
        let _hold = self.endpoint.hold_for_write(&[block])?;
        self.each_span(block, |span| {
            for chunk in span.chunks(8) {
                is_right &=
                    chunk.iter().zip(words.next_word()).all(|(actual, word)| *actual == word);
            }
        });
        Ok(is_right)
    }

    /// Overwrites a block, so that the check cannot accept old bytes.
    pub(crate) fn wipe(&self, block: u32) -> Result<(), Box<dyn Error>> {
        let _hold = self.endpoint.hold_for_write(&[block])?;
        self.each_span(block, |span| span.fill(0xee));
        Ok(())
    }

    /// Calls `each` with the memory of a block. The caller must have a write hold on the block.
    fn each_span(&self, block: u32, mut each: impl FnMut(&mut [u8])) {
        let layout = self.endpoint.layout();
        layout.geometry().canonical_spans(block, u32::MAX, &mut |at, bytes| {
            let start = layout.location_at(at).and_then(|location| location.as_host());
            if let Some(start) = start {
                let bytes = ByteCount::new(bytes).to_usize();
                // SAFETY: the span is within the layout's memory. The write hold excludes
                // transfers, and this program has one thread that uses the endpoint.
                each(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) });
            }
        });
    }
}

/// Words that depend on a key: its hash as the seed, and a shortened SplitMix64.
struct Words(u64);

impl Words {
    fn new(key: &str) -> Self {
        Self(key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        }))
    }

    fn next_word(&mut self) -> [u8; 8] {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).to_le_bytes()
    }
}
