//! The same memory for Terrane and for the bindings, and the copied blocks.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use terrane_bench::Settings;
use terrane_core::ByteCount;
use terrane_layout::PhysicalLayout;

use crate::agents::{Agents, First, Times};
use crate::bindings::{self, Pair, Piece, Span};
use crate::interleave::{Turn, interleaved, timed};
use crate::terrane::{self, Ends, Way};
use crate::transfers::Amount;

/// A set of agents, and memory that they know.
pub struct Setup {
    // Drops before the layouts free the memory. There are two pairs, so that both alternatives with
    // the bindings and Terrane have equally warm memory.
    bindings: [Pair; 2],
    ends: Ends,
    bytes: ByteCount,
    idle: Duration,
    piece: usize,
    blocks: u32,
    first: First,
}

impl Setup {
    /// Allocates this amount on both sides, in blocks of one piece each.
    pub fn new(amount: Amount, piece: ByteCount, agents: Agents, first: First) -> Result<Self> {
        let Amount { bytes, idle, .. } = amount;
        let blocks = u32::try_from(bytes.get() / piece.get())?;
        agents.start(|| {
            let bindings =
                || Ok([bindings::pair("one", agents)?, bindings::pair("other", agents)?]);
            let (terrane, [one, other]) = first.create(|| terrane::pair(agents), bindings)?;
            let ends = Ends::new(terrane::pieces(blocks, piece)?, terrane)?;
            let (here, there) = (span(ends.local.layout())?, span(&ends.target)?);
            let bindings = [Pair::new(one, here, there)?, Pair::new(other, here, there)?];
            Ok(Self { bindings, ends, bytes, idle, piece: piece.to_usize(), blocks, first })
        })
    }

    /// Transfers in which every piece is a descriptor, because neighbours on one side are far apart
    /// on the other. The baselines list descriptors for each transfer, or use prepared descriptors.
    pub fn scattered(&self, way: Way, settings: &Settings) -> Result<Times<2>> {
        let (local, remote) = (self.strewn(5, 8), self.strewn(3, 8));
        let runs = self.ends.transfer(way, &local, &remote)?;
        if runs != u64::from(self.blocks) {
            bail!("{} pieces became {runs} descriptors", self.blocks);
        }
        let pieces = self.pieces(&local, &remote);
        let [listing, preparing] = &self.bindings;
        let prepared = preparing.prepare(self.piece)?;
        let (from, to) = (numbers(&local)?, numbers(&remote)?);
        self.times(
            settings,
            [
                &mut || self.alone(|| self.ends.transfer(way, &local, &remote)),
                &mut || self.alone(|| listing.transfer(way, &pieces)),
                &mut || self.alone(|| prepared.transfer(way, &from, &to)),
            ],
        )
    }

    /// Transfers of pieces that are adjacent on both sides. The baselines use one descriptor for
    /// each piece, or the one descriptor that a program can join them to.
    pub fn neighbours(&self, way: Way, settings: &Settings) -> Result<Times<2>> {
        let ids: Vec<u32> = (0..self.blocks).collect();
        let runs = self.ends.transfer(way, &ids, &ids)?;
        if runs != 1 {
            bail!("{} neighbours became {runs} descriptors", self.blocks);
        }
        let pieces = self.pieces(&ids, &ids);
        let [one, other] = &self.bindings;
        let joined = [Piece { local: 0, remote: 0, bytes: self.bytes.to_usize() }];
        self.times(
            settings,
            [
                &mut || self.alone(|| self.ends.transfer(way, &ids, &ids)),
                &mut || self.alone(|| one.transfer(way, &pieces)),
                &mut || self.alone(|| other.transfer(way, &joined)),
            ],
        )
    }

    fn times(&self, settings: &Settings, calls: [Turn<'_>; 3]) -> Result<Times<2>> {
        let [terrane, bindings @ ..] = interleaved(settings, self.first, calls)?;
        Ok(Times { terrane, bindings })
    }

    /// Returns the time of a call after the idle time of the case.
    fn alone<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<Duration> {
        if !self.idle.is_zero() {
            thread::sleep(self.idle);
        }
        let (taken, _) = timed(call)?;
        Ok(taken)
    }

    /// All blocks, in steps of about `part / of` of their number. An odd step through a power of
    /// two visits each block once.
    fn strewn(&self, part: u32, of: u32) -> Vec<u32> {
        let step = u64::from((self.blocks / of * part) | 1);
        let blocks = u64::from(self.blocks);
        (0..blocks).filter_map(|n| u32::try_from(n * step % blocks).ok()).collect()
    }

    fn pieces(&self, local: &[u32], remote: &[u32]) -> Vec<Piece> {
        let offset = |block: u32| ByteCount::new(block.into()).to_usize() * self.piece;
        let pairs = local.iter().zip(remote);
        let piece = |(&local, &remote): (&u32, &u32)| Piece {
            local: offset(local),
            remote: offset(remote),
            bytes: self.piece,
        };
        pairs.map(piece).collect()
    }
}

/// The span of the only region of a contiguous layout.
fn span(layout: &PhysicalLayout) -> Result<Span> {
    let region = layout.regions().first().context("a layout has a region")?;
    Span::of(region)?.first(layout.geometry().region_bytes(0).to_usize())
}

fn numbers(blocks: &[u32]) -> Result<Vec<i32>> {
    blocks.iter().map(|&block| Ok(i32::try_from(block)?)).collect()
}
