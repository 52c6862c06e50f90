//! Copies of blocks between the device and memory that the device cannot access (files and system
//! memory), through pinned memory. The baseline of a relay is both of its hops at once. Each hop
//! copies the same number of bytes without waiting for the other. The difference is the overhead of
//! the relay.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::ByteCount;
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::conformance::copy_engine::ordered;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{Completion, CopyEngine, Endpoint, Transfer, TransferManager};

use crate::setup::{Setup, endpoint, interleaved};
use crate::shapes::{ON_DEVICE, ON_HOST, USUAL};

/// The minimum share of the rate of both hops at once.
const LEAST_SHARE: f64 = 0.95;

/// The memory that the device cannot access.
#[derive(Clone, Copy)]
enum Far {
    System,
    File,
}

pub fn report<W: Write>(
    setup: &Setup,
    directory: &Path,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    for (far, name) in [(Far::System, "system memory"), (Far::File, "a file")] {
        let case = |is_out: bool| match is_out {
            true => format!("{}, device to {name} by a relay", USUAL.title()),
            false => format!("{}, {name} to device by a relay", USUAL.title()),
        };
        if !reporter.wants(&case(true)) && !reporter.wants(&case(false)) {
            continue;
        }
        let settings = match far {
            Far::System => settings.clone(),
            Far::File => setup.few(settings),
        };
        let relay = Relay::new(setup, far, directory)?;
        for is_out in [true, false] {
            relay.measure(&case(is_out), is_out, &settings, reporter)?;
        }
    }
    Ok(())
}

/// Both ends, the pinned memory between them, and the transfer managers.
struct Relay<'setup> {
    relayed: TransferManager,
    /// Copies between the device and pinned memory.
    near_hop: &'setup TransferManager,
    /// Copies between pinned memory and the far end.
    far_hop: TransferManager,
    device: Endpoint,
    /// Pinned memory with the layout of the relay's slots, one for each hop.
    pinned: [Endpoint; 2],
    far: Endpoint,
    ids: Vec<u32>,
    bytes: ByteCount,
}

impl<'setup> Relay<'setup> {
    fn new(setup: &'setup Setup, far: Far, directory: &Path) -> Result<Self> {
        let shape = &USUAL;
        let blocks = shape.blocks_of(setup.moved)?;
        // Separate engines, because each engine learns from its transfers.
        let engines = || -> Result<Arc<dyn CopyEngine>> {
            Ok(match far {
                Far::System => Arc::new(HostEngine::new(HostEngineOptions::default())?),
                Far::File => Arc::new(DiskEngine::new(&DiskEngineOptions::default())?),
            })
        };
        let options = RelayOptions::default();
        let relay = RelayEngine::new(setup.engine()?, engines()?, setup.pinned.clone(), &options)?;
        let far = match far {
            Far::System => {
                endpoint(shape, blocks, ON_HOST, &SystemAllocator::new(SystemOptions::default()))?
            }
            Far::File => {
                let files = DiskAllocator::new(directory, DiskOptions::default());
                let files = files.with_context(|| format!("no file in {}", directory.display()))?;
                endpoint(shape, blocks, ON_HOST, &files)?
            }
        };
        let pinned = || setup.in_pinned(shape, blocks, ON_HOST);
        Ok(Self {
            relayed: TransferManager::new([Arc::new(relay) as _]),
            near_hop: &setup.manager,
            far_hop: TransferManager::new([engines()?]),
            device: setup.on_device(shape, blocks, ON_DEVICE)?,
            pinned: [pinned()?, pinned()?],
            far,
            ids: (0..blocks).collect(),
            bytes: ByteCount::new(shape.block_bytes().get() * u64::from(blocks)),
        })
    }

    fn measure<W: Write>(
        &self,
        case: &str,
        is_out: bool,
        settings: &Settings,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let [near, far] = &self.pinned;
        let relayed = || self.submit(&self.relayed, &self.device, &self.far, is_out);
        let near_hop = || self.submit(self.near_hop, &self.device, near, is_out);
        let far_hop = || self.submit(&self.far_hop, far, &self.far, is_out);
        let ended = |completion: Completion<()>| -> Result<()> {
            completion.wait().result.context("the transfer failed").map(drop)
        };
        // These passes write the reserved disk blocks for the first time, and the engines learn
        // which method is faster.
        for _ in 0..3 {
            ended(far_hop()?)?;
            ended(relayed()?)?;
        }
        let spreads = interleaved(
            settings,
            &mut [
                &mut || ended(relayed()?),
                &mut || {
                    let both = [near_hop()?, far_hop()?];
                    both.into_iter().try_for_each(ended)
                },
                &mut || ended(near_hop()?),
                &mut || ended(far_hop()?),
            ],
        )?;
        let rate = |spread: Spread| spread.rate(self.bytes.get() as f64 * 1e-9);
        let [relayed, both, near, far] = spreads.as_slice() else { return Ok(()) };
        let (both, near, far) = (rate(*both), rate(*near), rate(*far));
        let higher = Direction::HigherIsBetter;
        let measured = Measurement::new(case, rate(*relayed), "GB/s", higher);
        let measured = measured.with_baseline("both hops at once", both.median);
        reporter.report(&measured.at_least(LEAST_SHARE))?;
        let (name, slower) = match near.median < far.median {
            true => ("the device's hop alone", near.median),
            false => ("the other hop alone", far.median),
        };
        let measured = Measurement::new(format!("{case}, both hops at once"), both, "GB/s", higher);
        let measured = measured.with_baseline(name, slower);
        Ok(reporter.report(&measured.without_target("the baseline of the relay"))?)
    }

    /// Submits a transfer of all blocks from `nearer` to `farther` if `is_out`, otherwise back.
    fn submit(
        &self,
        manager: &TransferManager,
        nearer: &Endpoint,
        farther: &Endpoint,
        is_out: bool,
    ) -> Result<Completion<()>> {
        let (from, to) = if is_out { (nearer, farther) } else { (farther, nearer) };
        let transfer = ordered(Transfer::new(from, to), from, to).blocks(&self.ids, &self.ids);
        manager.submit(transfer, ()).map_err(|rejected| anyhow!(rejected.cause))
    }
}
