//! Blocks between the memory of two agents.

use std::io::{self, Write};

use anyhow::{Context, Result};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::ByteCount;

use crate::MOST_TIME;
use crate::agents::{Agents, over_sets};
use crate::ours::Way;
use crate::rig::{Rig, Times};

/// The pieces: what one layer of a block has with 2, 16 and 512 heads of 128, and a whole block of
/// Llama 3.1 8B.
const PIECES: [(ByteCount, &str); 4] = [
    (ByteCount::kib(4), "4 KiB"),
    (ByteCount::kib(32), "32 KiB"),
    (ByteCount::mib(1), "1 MiB"),
    (ByteCount::mib(2), "whole blocks of 2 MiB"),
];

/// Whether each piece is a descriptor, or all can be joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Scattered,
    Neighbours,
}

/// Blocks that are moved one way, and what that took with each set of agents.
struct Case {
    name: String,
    way: Way,
    order: Order,
    times: Vec<Times>,
}

/// Moves so many bytes in pieces of each size: scattered, so that each piece is a descriptor, and in
/// order, so that all can be joined.
pub fn measure<W: Write>(
    bytes: ByteCount,
    agents: Agents,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    for (piece, name) in PIECES {
        let mut cases = cases(&format!("{bytes} in {name}"));
        cases.retain(|case| reporter.wants(&case.name));
        if cases.is_empty() {
            continue;
        }
        for first in agents.sets() {
            let rig = Rig::new(bytes, piece, agents, first)?;
            for case in &mut cases {
                let times = match case.order {
                    Order::Scattered => rig.scattered(case.way, settings),
                    Order::Neighbours => rig.neighbours(case.way, settings),
                };
                case.times.push(times.with_context(|| case.name.clone())?);
            }
        }
        for case in cases {
            case.report(bytes.get() / piece.get(), reporter)?;
        }
    }
    Ok(())
}

fn cases(what: &str) -> Vec<Case> {
    let orders = [(Order::Scattered, "scattered"), (Order::Neighbours, "neighbours")];
    let of_way = |way: Way| {
        orders.map(|(order, which)| {
            let name = format!("{what}, {}, {which}", way.name());
            Case { name, way, order, times: Vec::new() }
        })
    };
    Way::ALL.into_iter().flat_map(of_way).collect()
}

impl Case {
    /// The target is what the bindings reach at best.
    fn report<W: Write>(self, pieces: u64, reporter: &mut Reporter<W>) -> Result<()> {
        let Self { name, order, times, .. } = self;
        let [ours, one, other] = over_sets(&times)?;
        let mut report = |case: String, beside: &str, time: Spread, has_target: bool| {
            let value = ours.scaled(1e3);
            let row = Measurement::new(case, value, "ms", Direction::LowerIsBetter)
                .beside(beside, time.scaled(1e3).median);
            let row = if has_target { row.at_least(1.0 / MOST_TIME) } else { row };
            reporter.report(&row)
        };
        match order {
            Order::Scattered => scattered(name, one, other, &mut report)?,
            Order::Neighbours => {
                report(name.clone(), &format!("nixl-sys, {pieces} descriptors"), one, false)?;
                report(format!("{name}, joined"), "nixl-sys, joined by hand", other, true)?;
            }
        }
        Ok(())
    }
}

/// Beside the faster one of the two ways to use the bindings, and beside the slower.
fn scattered(
    name: String,
    listed: Spread,
    prepared: Spread,
    report: &mut impl FnMut(String, &str, Spread, bool) -> io::Result<()>,
) -> io::Result<()> {
    let mut ways = [
        ("nixl-sys, descriptors listed anew", listed),
        ("nixl-sys, descriptors prepared", prepared),
    ];
    ways.sort_by(|(_, one), (_, other)| one.median.total_cmp(&other.median));
    let [(fast, faster), (slow, slower)] = ways;
    report(name.clone(), fast, faster, true)?;
    report(format!("{name}, the slower way"), slow, slower, false)
}
