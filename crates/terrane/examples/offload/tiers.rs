//! The tiers: a layout for each, and the expected content of each block.
//!
//! A block of a tier holds either computed bytes or poison, which is a pattern of another seed. So a
//! byte that strays into an unwritten block is found. The expected content follows the blocks through
//! the transfers, and a tier is verified as a whole.

use terrane::core::{Allocate, ByteCount};
use terrane::layout::{LayoutBuilder, LayoutConfig, LayoutKind};
use terrane::storage::SystemAllocator;
use terrane::transfer::Endpoint;
use terrane_testkit::pattern::{InProcess, Pattern, Verification};
use terrane_testkit::random::Seeded;

use crate::device::{Gpu, Image};
use crate::failure::Failure;

/// The two patterns that a block can hold.
#[derive(Clone, Copy)]
pub struct Patterns {
    pub data: Pattern,
    pub poison: Pattern,
}

/// The content of a block: a pattern, and the number of the block that the pattern is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Data(u32),
    Poison(u32),
}

/// Memory of one kind, the blocks in it, and what they hold.
pub struct Tier {
    pub name: &'static str,
    pub endpoint: Endpoint,
    /// How the processor reaches the bytes where it cannot do so itself.
    image: Option<Image>,
    ledger: Vec<Held>,
    /// Where the blocks that were computed are now, in their order.
    current: Vec<u32>,
}

impl Tier {
    /// Brings up a tier of so many blocks from any allocator: the system's, the disk's, or a
    /// device's. What its bytes are is unknown yet.
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
        let ledger = (0..blocks).map(Held::Poison).collect();
        let endpoint = Endpoint::new(layout)?;
        Ok(Self { name, endpoint, image: None, ledger, current: Vec::new() })
    }

    /// The same tier, of a device, whose bytes the processor reaches through a copy.
    pub fn seen_through_a_copy(self, gpu: &Gpu, memory: &SystemAllocator) -> Result<Self, Failure> {
        let image = Some(Image::new(gpu, &self.endpoint, memory)?);
        Ok(Self { image, ..self })
    }

    /// Fills in blocks, by the processor.
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

    /// Looks at blocks that the processor can read, here or in the copy that was fetched.
    fn look(
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

    /// Poisons all blocks, by the processor.
    pub fn poison(&mut self, patterns: &Patterns) -> Result<(), Failure> {
        let all: Vec<u32> = (0..self.endpoint.layout().geometry().num_blocks()).collect();
        self.fill(&patterns.poison, &all)
    }

    /// Computes so many blocks: fills them with data. Which ones they are is drawn.
    pub fn compute(
        &mut self,
        blocks: usize,
        patterns: &Patterns,
        random: &mut Seeded,
    ) -> Result<(), Failure> {
        let chosen = self.choose(blocks, random);
        self.fill(&patterns.data, &chosen)?;
        self.enter(&chosen, &chosen.iter().copied().map(Held::Data).collect::<Vec<_>>());
        self.current = chosen;
        Ok(())
    }

    /// Where the computed blocks are.
    pub fn current(&self) -> &[u32] {
        &self.current
    }

    /// Draws so many blocks, in no order; others than the computed ones are in now, if there are
    /// enough of them.
    pub fn choose(&self, blocks: usize, random: &mut Seeded) -> Vec<u32> {
        let is_taken = self.taken();
        let mut free: Vec<u32> =
            (0_u32..).zip(&is_taken).filter(|(_, taken)| !**taken).map(|(id, _)| id).collect();
        if free.len() < blocks {
            free = (0_u32..).zip(&is_taken).map(|(id, _)| id).collect();
        }
        random.shuffle(&mut free);
        free.truncate(blocks);
        free
    }

    fn taken(&self) -> Vec<bool> {
        let mut taken = vec![false; self.ledger.len()];
        for &block in &self.current {
            if let Some(entry) = taken.get_mut(index(block)) {
                *entry = true;
            }
        }
        taken
    }

    /// Notes that the computed blocks of `source` are now in these blocks too.
    pub fn received(&mut self, source: &Self, blocks: Vec<u32>) {
        self.enter(&blocks, &source.held(&source.current));
        self.current = blocks;
    }

    /// Notes that these blocks hold what those of `source` do, poison as it is.
    pub fn received_poison(&mut self, source: &Self, blocks: &[u32]) {
        self.enter(blocks, &source.held(blocks));
    }

    fn held(&self, blocks: &[u32]) -> Vec<Held> {
        blocks.iter().filter_map(|&block| self.ledger.get(index(block)).copied()).collect()
    }

    fn enter(&mut self, blocks: &[u32], held: &[Held]) {
        for (&block, &held) in blocks.iter().zip(held) {
            if let Some(entry) = self.ledger.get_mut(index(block)) {
                *entry = held;
            }
        }
    }

    /// Looks at every byte of every block: those that were written, and those that were not.
    /// Answers with what was found among the data and among the poison.
    pub fn verify(&self, patterns: &Patterns) -> Result<[Verification; 2], Failure> {
        if let Some(image) = &self.image {
            image.fetch()?;
        }
        let held_as = |select: fn(Held) -> Option<u32>| -> (Vec<u32>, Vec<u32>) {
            (0_u32..).zip(&self.ledger).filter_map(|(id, &held)| Some((id, select(held)?))).unzip()
        };
        let (data, data_of) = held_as(|held| match held {
            Held::Data(of) => Some(of),
            Held::Poison(_) => None,
        });
        let (poison, poison_of) = held_as(|held| match held {
            Held::Data(_) => None,
            Held::Poison(of) => Some(of),
        });
        Ok([
            self.look(&patterns.data, &data, &data_of)?,
            self.look(&patterns.poison, &poison, &poison_of)?,
        ])
    }

    /// A line about the layout: its kind, its size, its padding, what the machine granted.
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
