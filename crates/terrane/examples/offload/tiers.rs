//! The tiers: a layout for each, and the expected content of each block.
//!
//! A block of a tier contains either computed bytes or poison, which is a pattern of another seed.
//! So the check finds a byte that was written to the wrong block. The expected content is updated
//! with each transfer, and the check covers the whole tier.

use terrane::core::{Allocate, ByteCount};
use terrane::layout::{LayoutBuilder, LayoutConfig, LayoutKind};
use terrane::storage::SystemAllocator;
use terrane::transfer::Endpoint;
use terrane_testkit::pattern::{InProcess, Pattern, Verification};
use terrane_testkit::random::Seeded;

use crate::device::{Gpu, Image};
use crate::failure::Failure;

/// The two patterns that a block can contain.
#[derive(Clone, Copy)]
pub struct Patterns {
    pub data: Pattern,
    pub poison: Pattern,
}

/// The expected content of a block: a pattern, and the number of the block that the pattern is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Data(u32),
    Poison(u32),
}

/// Memory of one kind, its blocks, and their expected contents.
pub struct Tier {
    pub name: &'static str,
    pub endpoint: Endpoint,
    /// A host copy through which the processor accesses the bytes, if it cannot do so directly.
    image: Option<Image>,
    ledger: Vec<Content>,
    /// The current ids of the computed blocks, in their order.
    current: Vec<u32>,
}

impl Tier {
    /// Allocates a tier of this many blocks from any allocator: the system's, the disk's, or a
    /// device's. The content of its bytes is still unknown.
    pub fn allocate<A: Allocate>(
        name: &'static str,
        config: &LayoutConfig,
        blocks: u32,
        kind: LayoutKind,
        allocator: &A,
    ) -> Result<Self, Failure> {
        let build = || {
            let config = config.with_num_blocks(blocks)?;
            LayoutBuilder::new(config).kind(kind).allocate(allocator).unregistered().build()
        };
        let layout = build().map_err(|source| Failure::Tier { tier: name, source })?;
        let ledger = (0..blocks).map(Content::Poison).collect();
        let endpoint = Endpoint::new(layout)?;
        Ok(Self { name, endpoint, image: None, ledger, current: Vec::new() })
    }

    /// The same device tier, which the processor accesses through a host copy.
    pub fn with_host_copy(self, gpu: &Gpu, memory: &SystemAllocator) -> Result<Self, Failure> {
        let image = Some(Image::new(gpu, &self.endpoint, memory)?);
        Ok(Self { image, ..self })
    }

    /// Fills blocks from the processor.
    fn fill(&self, pattern: &Pattern, blocks: &[u32]) -> Result<(), Failure> {
        match &self.image {
            None => Ok(pattern.fill_with(&self.endpoint, blocks, &InProcess)?),
            Some(image) => {
                image.fetch()?;
                pattern.fill_with(&self.endpoint, blocks, image)?;
                image.put()
            }
        }
    }

    /// Verifies blocks that the processor can read, directly or in the host copy.
    fn verify_blocks(
        &self,
        pattern: &Pattern,
        blocks: &[u32],
        filled_as: &[u32],
    ) -> Result<Verification, Failure> {
        let layers = 0..self.endpoint.layout().geometry().num_layers();
        let end = &self.endpoint;
        Ok(match &self.image {
            None => pattern.verify_with(end, blocks, filled_as, layers, &InProcess)?,
            Some(image) => pattern.verify_with(end, blocks, filled_as, layers, image)?,
        })
    }

    /// Poisons all blocks from the processor.
    pub fn poison(&mut self, patterns: &Patterns) -> Result<(), Failure> {
        let all: Vec<u32> = (0..self.endpoint.layout().geometry().num_blocks()).collect();
        self.fill(&patterns.poison, &all)
    }

    /// Fills this many random blocks with data, as if they were computed.
    pub fn compute(
        &mut self,
        blocks: usize,
        patterns: &Patterns,
        random: &mut Seeded,
    ) -> Result<(), Failure> {
        let chosen = self.choose(blocks, random);
        self.fill(&patterns.data, &chosen)?;
        self.enter(&chosen, &chosen.iter().copied().map(Content::Data).collect::<Vec<_>>());
        self.current = chosen;
        Ok(())
    }

    /// The ids of the computed blocks.
    pub fn current(&self) -> &[u32] {
        &self.current
    }

    /// Draws this many random block ids. If there are enough other blocks, they are not those of
    /// the computed blocks.
    pub fn choose(&self, blocks: usize, random: &mut Seeded) -> Vec<u32> {
        let is_computed = self.is_computed();
        let mut free: Vec<u32> = (0_u32..)
            .zip(&is_computed)
            .filter(|(_, is_computed)| !**is_computed)
            .map(|(id, _)| id)
            .collect();
        if free.len() < blocks {
            free = (0_u32..).zip(&is_computed).map(|(id, _)| id).collect();
        }
        random.shuffle(&mut free);
        free.truncate(blocks);
        free
    }

    fn is_computed(&self) -> Vec<bool> {
        let mut is_computed = vec![false; self.ledger.len()];
        for &block in &self.current {
            if let Some(entry) = is_computed.get_mut(index(block)) {
                *entry = true;
            }
        }
        is_computed
    }

    /// Records that the computed blocks of `source` were copied to these blocks.
    pub fn received(&mut self, source: &Self, blocks: Vec<u32>) {
        self.enter(&blocks, &source.contents(&source.current));
        self.current = blocks;
    }

    /// Records that these blocks have the contents of the blocks of `source`, including poison.
    pub fn received_poison(&mut self, source: &Self, blocks: &[u32]) {
        self.enter(blocks, &source.contents(blocks));
    }

    fn contents(&self, blocks: &[u32]) -> Vec<Content> {
        blocks.iter().filter_map(|&block| self.ledger.get(index(block)).copied()).collect()
    }

    fn enter(&mut self, blocks: &[u32], contents: &[Content]) {
        for (&block, &content) in blocks.iter().zip(contents) {
            if let Some(entry) = self.ledger.get_mut(index(block)) {
                *entry = content;
            }
        }
    }

    /// Verifies every byte of every block, written or not. Returns the results for data and for
    /// poison.
    pub fn verify(&self, patterns: &Patterns) -> Result<[Verification; 2], Failure> {
        if let Some(image) = &self.image {
            image.fetch()?;
        }
        let blocks_with = |select: fn(Content) -> Option<u32>| -> (Vec<u32>, Vec<u32>) {
            (0_u32..)
                .zip(&self.ledger)
                .filter_map(|(id, &content)| Some((id, select(content)?)))
                .unzip()
        };
        let (data, data_of) = blocks_with(|content| match content {
            Content::Data(of) => Some(of),
            Content::Poison(_) => None,
        });
        let (poison, poison_of) = blocks_with(|content| match content {
            Content::Data(_) => None,
            Content::Poison(of) => Some(of),
        });
        Ok([
            self.verify_blocks(&patterns.data, &data, &data_of)?,
            self.verify_blocks(&patterns.poison, &poison, &poison_of)?,
        ])
    }

    /// Describes the layout in one line: kind, size, padding, and capabilities.
    pub fn describe(&self) -> String {
        let layout = self.endpoint.layout();
        let padding = layout.padding();
        let padded = ByteCount::new(padding.block_padding.get() + padding.region_padding.get());
        let mut line = format!(
            "{}: {}, {}: {} blocks, {}, {padded} of padding ({:.4} %)",
            self.name,
            layout.storage_kind(),
            layout.geometry().label(),
            layout.geometry().num_blocks(),
            padding.block_bytes,
            padding.ratio() * 100.0,
        );
        let capabilities = layout.capabilities();
        if !capabilities.outcomes().is_empty() {
            line.push_str(&format!("; {capabilities}"));
        }
        line
    }
}

fn index(block: u32) -> usize {
    ByteCount::new(block.into()).to_usize()
}
