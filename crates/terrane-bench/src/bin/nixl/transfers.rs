//! Blocks between the memory of two agents.

use std::io::Write;

use anyhow::{Context, Result, bail};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::{ByteCount, Location, Memory};
use terrane_layout::PhysicalLayout;

use crate::ours::{Ends, Way, pieces};
use crate::raw::{Pair, Piece, Span};

/// Of the time that the bindings alone take, Terrane's may be so much.
const MOST_TIME: f64 = 1.02;

/// The pieces: what one layer of a block has with 2, 16 and 512 heads of 128, and a whole block of
/// Llama 3.1 8B.
const PIECES: [(ByteCount, &str); 4] = [
    (ByteCount::kib(4), "4 KiB"),
    (ByteCount::kib(32), "32 KiB"),
    (ByteCount::mib(1), "1 MiB"),
    (ByteCount::mib(2), "whole blocks of 2 MiB"),
];

/// The two ways to use the bindings for scattered pieces.
const LISTED: &str = "nixl-sys, descriptors listed anew";
const PREPARED: &str = "nixl-sys, descriptors prepared";

/// Moves so many bytes in pieces of each size: scattered, so that each piece is a descriptor, and in
/// order, so that all can be joined.
pub fn measure<W: Write>(
    bytes: ByteCount,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    for (piece, name) in PIECES {
        let cases = Way::ALL.map(|way| {
            let name = format!("{bytes} in {name}, {}", way.name());
            (way, format!("{name}, scattered"), format!("{name}, neighbours"))
        });
        if !cases.iter().any(|(_, one, other)| reporter.wants(one) || reporter.wants(other)) {
            continue;
        }
        let rig = Rig::new(bytes, piece)?;
        for (way, scattered, neighbours) in cases {
            if reporter.wants(&scattered) {
                rig.scattered(scattered, way, settings, reporter)?;
            }
            if reporter.wants(&neighbours) {
                rig.neighbours(neighbours, way, settings, reporter)?;
            }
        }
    }
    Ok(())
}

/// The same memory, as Terrane and as the bindings are told of it.
struct Rig {
    // Lets go of the memory before the layouts do.
    raw: Pair,
    ends: Ends,
    bytes: ByteCount,
    piece: usize,
    blocks: u32,
}

impl Rig {
    fn new(bytes: ByteCount, piece: ByteCount) -> Result<Self> {
        let blocks = u32::try_from(bytes.get() / piece.get())?;
        let ends = Ends::new(pieces(blocks, piece)?)?;
        let raw = Pair::new(span(ends.local.layout())?, span(&ends.target)?)?;
        Ok(Self { raw, ends, bytes, piece: piece.to_usize(), blocks })
    }

    /// Every piece is a descriptor: neighbours on one side are far apart on the other.
    fn scattered<W: Write>(
        &self,
        case: String,
        way: Way,
        settings: &Settings,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let (local, remote) = (self.strewn(5, 8), self.strewn(3, 8));
        let runs = self.ends.transfer(way, &local, &remote)?;
        if runs != u64::from(self.blocks) {
            bail!("{case}: {} pieces became {runs} descriptors", self.blocks);
        }
        let pieces = self.pieces(&local, &remote);
        let prepared = self.raw.prepare(self.piece)?;
        let (from, to) = (numbers(&local)?, numbers(&remote)?);
        let mut failed = None;
        let mut note = |result: Result<()>| failed = failed.take().or(result.err());
        let note = std::cell::RefCell::new(&mut note);
        let [ours, fresh, prepared] = settings.time_all_in_turns([
            &mut || note.borrow_mut()(self.ends.transfer(way, &local, &remote).map(drop)),
            &mut || note.borrow_mut()(self.raw.transfer(way, &pieces)),
            &mut || note.borrow_mut()(prepared.transfer(way, &from, &to)),
        ]);
        if let Some(error) = failed {
            return Err(error.context(case));
        }
        // The target is the faster of the two ways to use the bindings.
        let (slower, faster) = if fresh.median <= prepared.median {
            ((prepared, PREPARED), (fresh, LISTED))
        } else {
            ((fresh, LISTED), (prepared, PREPARED))
        };
        let ours = ours.scaled(1e3);
        let lower = Direction::LowerIsBetter;
        reporter.report(
            &Measurement::new(case.clone(), ours, "ms", lower)
                .beside(faster.1, faster.0.scaled(1e3).median)
                .at_least(1.0 / MOST_TIME),
        )?;
        reporter.report(
            &Measurement::new(format!("{case}, the slower way"), ours, "ms", lower)
                .beside(slower.1, slower.0.scaled(1e3).median),
        )?;
        Ok(())
    }

    /// All pieces lie behind one another on both sides. A program that uses the bindings alone has a
    /// descriptor for each, or has joined them itself.
    fn neighbours<W: Write>(
        &self,
        case: String,
        way: Way,
        settings: &Settings,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let ids: Vec<u32> = (0..self.blocks).collect();
        let runs = self.ends.transfer(way, &ids, &ids)?;
        if runs != 1 {
            bail!("{case}: {} neighbours became {runs} descriptors", self.blocks);
        }
        let pieces = self.pieces(&ids, &ids);
        let joined = [Piece { local: 0, remote: 0, bytes: self.bytes.to_usize() }];
        let mut failed = None;
        let mut note = |result: Result<()>| failed = failed.take().or(result.err());
        let note = std::cell::RefCell::new(&mut note);
        let [ours, each, one] = settings.time_all_in_turns([
            &mut || note.borrow_mut()(self.ends.transfer(way, &ids, &ids).map(drop)),
            &mut || note.borrow_mut()(self.raw.transfer(way, &pieces)),
            &mut || note.borrow_mut()(self.raw.transfer(way, &joined)),
        ]);
        if let Some(error) = failed {
            return Err(error.context(case));
        }
        let milliseconds = ours.scaled(1e3);
        let lower = Direction::LowerIsBetter;
        let name = format!("nixl-sys, {} descriptors", self.blocks);
        reporter.report(
            &Measurement::new(case.clone(), milliseconds, "ms", lower)
                .beside(name, each.scaled(1e3).median),
        )?;
        reporter.report(
            &Measurement::new(format!("{case}, joined"), milliseconds, "ms", lower)
                .beside("nixl-sys, joined by hand", one.scaled(1e3).median)
                .at_least(1.0 / MOST_TIME),
        )?;
        Ok(())
    }

    /// All blocks, in steps of about `part` of `of` of them: odd steps through a power of two come by
    /// each block once.
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

/// The one region of a contiguous layout.
fn span(layout: &PhysicalLayout) -> Result<Span> {
    let region = layout.regions().first().context("a layout has a region")?;
    let Location::Host(address) = region.location() else {
        bail!("system memory is the host's");
    };
    Span::new(address.get(), layout.geometry().region_bytes().get())
}

fn numbers(blocks: &[u32]) -> Result<Vec<i32>> {
    blocks.iter().map(|&block| Ok(i32::try_from(block)?)).collect()
}
