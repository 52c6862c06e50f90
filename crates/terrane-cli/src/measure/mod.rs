//! Copies of a model's blocks, and their times. `bench` and `doctor --measure` share them.

pub(crate) mod bus;
pub(crate) mod disk;
pub(crate) mod fio;
pub(crate) mod host;
pub(crate) mod pytorch;
pub(crate) mod store;

use std::time::Instant;

use serde::{Deserialize, Serialize};
use terrane_core::convert::to_usize;
use terrane_core::{Alignment, Allocate, ByteCount, Limits};
use terrane_layout::{
    BlockDimension, Geometry, LayoutBuilder, LayoutConfig, LayoutKind, LayoutPlan,
};
use terrane_plan::{PlanRequest, TierKind};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use crate::error::Failure;

/// The median of repeated measurements, with the minimum and the maximum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        let last = values.len().saturating_sub(1);
        let median = f64::midpoint(at(last / 2), at(values.len() / 2));
        Self { median, min: at(0), max: at(last) }
    }

    /// Converts seconds to a rate. The slowest pass has the lowest rate.
    pub(crate) fn rate(self, amount: f64) -> Self {
        Self { median: amount / self.median, min: amount / self.max, max: amount / self.min }
    }

    pub(crate) fn scaled(self, factor: f64) -> Self {
        Self { median: self.median * factor, min: self.min * factor, max: self.max * factor }
    }
}

/// Measures passes. `pass` returns its seconds. The first pass does not count.
pub(crate) fn times(
    passes: u32,
    mut pass: impl FnMut() -> Result<f64, Failure>,
) -> Result<Spread, Failure> {
    pass()?;
    let seconds: Vec<f64> = (0..passes.max(1)).map(|_| pass()).collect::<Result<_, _>>()?;
    Ok(Spread::of(seconds))
}

/// Measures passes of a case and of its limit in alternation, so that interference affects both.
pub(crate) fn times_interleaved(
    passes: u32,
    mut case: impl FnMut() -> Result<f64, Failure>,
    mut limit: impl FnMut() -> Result<f64, Failure>,
) -> Result<(Spread, Spread), Failure> {
    let (mut cases, mut limits) = (Vec::new(), Vec::new());
    for round in 0..=passes.max(1) {
        let (one, other) = (case()?, limit()?);
        if round > 0 {
            cases.push(one);
            limits.push(other);
        }
    }
    Ok((Spread::of(cases), Spread::of(limits)))
}

/// The seconds of a call.
pub(crate) fn seconds_of_call<T>(
    call: impl FnOnce() -> Result<T, Failure>,
) -> Result<f64, Failure> {
    let begun = Instant::now();
    call()?;
    Ok(begun.elapsed().as_secs_f64())
}

/// The blocks of one group of a model in the tiers, as many as fit in a number of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub blocks: u32,
    /// One region for each layer.
    pub device: Geometry,
    /// Contiguous blocks.
    pub host: Geometry,
    /// Contiguous blocks that begin at multiples of 4,096 bytes.
    pub disk: Geometry,
}

impl Shape {
    /// The blocks of a group, counted from 0; `None` if the group does not exist.
    pub(crate) fn of_group(
        request: &PlanRequest,
        group: usize,
        bytes: ByteCount,
    ) -> Result<Option<Self>, Failure> {
        let Some(one) = request.layouts(TierKind::Host, 1)?.into_iter().nth(group) else {
            return Ok(None);
        };
        let blocks = count(one.geometry().block_bytes(), bytes)?;
        let geometry = |kind| -> Result<Option<Geometry>, Failure> {
            let plan: Option<LayoutPlan> = request.layouts(kind, blocks)?.into_iter().nth(group);
            Ok(plan.map(|plan| plan.geometry().clone()))
        };
        let (device, host, disk) =
            (geometry(TierKind::Device)?, geometry(TierKind::Host)?, geometry(TierKind::Disk)?);
        Ok(match (device, host, disk) {
            (Some(device), Some(host), Some(disk)) => Some(Self { blocks, device, host, disk }),
            _ => None,
        })
    }

    /// The blocks of a configuration.
    pub(crate) fn of_config(config: &LayoutConfig, bytes: ByteCount) -> Result<Self, Failure> {
        let blocks = count(config.block_bytes(), bytes)?;
        let config = config.with_num_blocks(blocks)?;
        let aligned = config.with_block_alignment(Alignment::PAGE)?;
        let layers = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
        let geometry = |config: &LayoutConfig, kind| -> Result<Geometry, Failure> {
            Ok(LayoutPlan::new(config, kind, Limits::NONE)?.geometry().clone())
        };
        Ok(Self {
            blocks,
            device: geometry(&config, layers)?,
            host: geometry(&config, LayoutKind::FullyContiguous)?,
            disk: geometry(&aligned, LayoutKind::FullyContiguous)?,
        })
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.host.block_bytes().get()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.host.total_bytes().get()
    }

    /// All block ids, and the same ids in another order, so that no two blocks are adjacent at both
    /// ends.
    pub(crate) fn ids(&self) -> Ids {
        let ids: Vec<u32> = (0..self.blocks).collect();
        let backwards = ids.iter().rev().copied().collect();
        (ids, backwards)
    }
}

/// Block ids of both ends of a transfer.
type Ids = (Vec<u32>, Vec<u32>);

/// An endpoint and its blocks.
type End<'a> = (&'a Endpoint, &'a [u32]);

/// The first ids of both ends.
fn first_ids((source, destination): &Ids, blocks: u32) -> (&[u32], &[u32]) {
    let count = to_usize(blocks.into());
    (source.get(..count).unwrap_or(source), destination.get(..count).unwrap_or(destination))
}

fn count(block: ByteCount, bytes: ByteCount) -> Result<u32, Failure> {
    let blocks = bytes.get() / block.get().max(1);
    // At least two blocks, because one block is not a transfer of several.
    match u32::try_from(blocks) {
        Ok(blocks) if blocks >= 2 => Ok(blocks),
        _ => {
            let needed = ByteCount::new(block.get().saturating_mul(2));
            Err(Failure::TooSmall { what: "data", size: bytes, needed })
        }
    }
}

/// Blocks in memory of an allocator.
pub(crate) fn endpoint(
    geometry: &Geometry,
    allocator: &impl Allocate,
) -> Result<Endpoint, Failure> {
    let builder = LayoutBuilder::from_geometry(geometry.clone()).allocate(allocator);
    Ok(Endpoint::new(builder.unregistered().build()?)?)
}

/// The seconds of a transfer, from submit to the end of the wait.
fn seconds_of_blocks(
    manager: &TransferManager,
    (source, from): End<'_>,
    (destination, to): End<'_>,
) -> Result<f64, Failure> {
    seconds_of_transfer(manager, Transfer::new(source, destination).blocks(from, to))
}

/// The seconds of this transfer, from its submission to the end of the wait.
fn seconds_of_transfer(manager: &TransferManager, transfer: Transfer) -> Result<f64, Failure> {
    seconds_of_call(|| {
        let completion = manager.submit(transfer, ()).map_err(|rejected| rejected.cause)?;
        completion.wait().result?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_have_the_median_and_the_extremes() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![8.0, 1.0, 2.0, 4.0]).median, 3.0);
        let rate = Spread { median: 2.0, min: 1.0, max: 4.0 }.rate(8.0);
        assert_eq!(rate, Spread { median: 4.0, min: 2.0, max: 8.0 });
    }

    #[test]
    fn the_first_pass_does_not_count() {
        let mut next = 100.0;
        let spread = times(3, || {
            next /= 10.0;
            Ok(next)
        });
        assert_eq!(spread.unwrap().max, 1.0);
    }
}
