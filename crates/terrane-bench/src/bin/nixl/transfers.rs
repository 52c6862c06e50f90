//! Copies of blocks between the memory of two agents.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::ByteCount;

use crate::MOST_TIME;
use crate::agents::{Agents, Times, over_sets};
use crate::setup::Setup;
use crate::terrane::Way;

/// The amount of a case.
#[derive(Debug, Clone, Copy)]
pub struct Amount {
    pub bytes: ByteCount,
    /// The idle time before each call.
    pub idle: Duration,
    /// The sizes of the pieces, with their names.
    pub pieces: &'static [(ByteCount, &'static str)],
    /// Whether the time of the transfer has a target.
    pub has_target: bool,
}

/// The bytes of one layer of a block with 2, 16 and 512 heads of 128, and of a block of Llama 3.1 8B.
const PIECES: [(ByteCount, &str); 4] = [
    (ByteCount::kib(4), "4 KiB"),
    OF_A_LAYER,
    (ByteCount::mib(1), "1 MiB"),
    (ByteCount::mib(2), "whole blocks of 2 MiB"),
];

/// The bytes of K or V of one layer of a block of Llama 3.1 8B.
const OF_A_LAYER: (ByteCount, &str) = (ByteCount::kib(32), "32 KiB");

/// For pieces of this size, a transfer takes longer for its descriptors than for its bytes.
const SHORT: ByteCount = ByteCount::kib(4);

/// The minimum speedup of joined pieces of that size. The speedup is below the reduction in
/// descriptors, because the number of bytes stays the same.
const FASTER: f64 = 2.0;

/// Why the case of one block has no target.
const ONE_BLOCK: &str = "the fixed cost of a call; the larger amounts have the targets";

impl Amount {
    /// One block of Llama 3.1 8B, which shows the fixed cost of a transfer. The time between two
    /// submits is below a millisecond, so the engine's thread still polls and needs no wake-up.
    pub const BLOCK: Self = Self {
        bytes: ByteCount::mib(2),
        idle: Duration::ZERO,
        pieces: &[OF_A_LAYER],
        has_target: false,
    };

    /// The same block after an idle time, when the engine's thread and the processor sleep.
    pub const LONE_BLOCK: Self = Self { idle: Duration::from_millis(3), ..Self::BLOCK };

    /// An amount of `bytes`, in pieces of all sizes.
    pub const fn of(bytes: ByteCount) -> Self {
        Self { bytes, idle: Duration::ZERO, pieces: &PIECES, has_target: true }
    }
}

/// Whether each piece is a descriptor, or all pieces can be joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Scattered,
    Neighbours,
}

/// The transfers in one direction, with their times for each set of agents.
struct Case {
    name: String,
    way: Way,
    order: Order,
    has_target: bool,
    times: Vec<Times<2>>,
}

/// Measures pieces of each size in two orders: scattered, so that each piece is a descriptor, and
/// adjacent, so that all can be joined.
pub fn measure<W: Write>(
    amount: Amount,
    agents: Agents,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let Amount { bytes, idle, pieces, has_target } = amount;
    for &(piece, name) in pieces {
        let mut what = format!("{bytes} in {name}");
        if !idle.is_zero() {
            what += &format!(", {} ms apart", idle.as_millis());
        }
        let mut cases = cases(&what, has_target);
        cases.retain(|case| reporter.wants(&case.name));
        if cases.is_empty() {
            continue;
        }
        for first in agents.sets() {
            let setup = Setup::new(amount, piece, agents, first)?;
            for case in &mut cases {
                let times = match case.order {
                    Order::Scattered => setup.scattered(case.way, settings),
                    Order::Neighbours => setup.neighbours(case.way, settings),
                };
                case.times.push(times.with_context(|| case.name.clone())?);
            }
        }
        for case in cases {
            case.report(bytes, piece, reporter)?;
        }
    }
    Ok(())
}

fn cases(what: &str, has_target: bool) -> Vec<Case> {
    let orders = [(Order::Scattered, "scattered"), (Order::Neighbours, "neighbours")];
    let of_way = |way: Way| {
        orders.map(|(order, which)| {
            let name = format!("{what}, {}, {which}", way.name());
            Case { name, way, order, has_target, times: Vec::new() }
        })
    };
    Way::ALL.into_iter().flat_map(of_way).collect()
}

impl Case {
    /// Reports both orders. The baselines are the best programs with the bindings alone: both
    /// alternatives for scattered pieces, and one joined descriptor for adjacent pieces. Joining
    /// must also be faster than one descriptor for each piece.
    fn report<W: Write>(
        self,
        bytes: ByteCount,
        piece: ByteCount,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let Self { name, order, has_target, times, .. } = self;
        let (terrane, [one, other]) = over_sets(&times)?;
        let as_fast = 1.0 / MOST_TIME;
        let mut report = |case: String, beside: &str, time: f64, least: f64| {
            let value = terrane.scaled(1e3);
            let row = Measurement::new(case, value, "ms", Direction::LowerIsBetter)
                .with_baseline(beside, time * 1e3);
            let row = if has_target { row.at_least(least) } else { row.without_target(ONE_BLOCK) };
            reporter.report(&row)
        };
        match order {
            Order::Scattered => {
                let by_number = format!("{name}, by number");
                report(name, "nixl-sys, descriptors listed again", one, as_fast)?;
                report(by_number, "nixl-sys, descriptors prepared", other, as_fast)?;
            }
            Order::Neighbours => {
                let joined = format!("{name}, joined");
                let each = format!("nixl-sys, {} descriptors", bytes.get() / piece.get());
                let least = if piece > SHORT { as_fast } else { FASTER };
                report(name, &each, one, least)?;
                report(joined, "nixl-sys, joined by hand", other, as_fast)?;
            }
        }
        Ok(())
    }
}
