//! Submits 16 scattered blocks of a cache with one tensor for each layer, to or from pinned memory
//! with whole blocks: `submit [staged|direct] [to-host|to-device] [ROUNDS]`.
//!
//! The instructions of the submitting thread are counted by this command, over a device or the
//! simulated driver. The driver's own functions are in the object `libcuda.so.1`.
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='submit::submit' submit staged to-host 1000
//! ```

#![allow(clippy::print_stdout, reason = "printing is what an example is for")]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{Allocate, DeviceId};
use terrane_cuda::{
    Calibration, Context, CopyPath, DeviceAllocator, DeviceEngine, DeviceEngineOptions,
    PinnedAllocator, PinnedOptions,
};
use terrane_layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_transfer::calibration::{Direction, PathCost};
use terrane_transfer::{Completion, DeviceOrder, Endpoint, Transfer, TransferManager};

/// The number of blocks of each end.
const BLOCKS: u32 = 32;
/// The first transfers allocate buffers, and are not measured.
const WARM_UP: usize = 20;
const LAYERS: LayoutKind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn endpoint(kind: LayoutKind, memory: &impl Allocate) -> Result<Endpoint> {
    // The pieces are short, because a simulated device interprets its kernels.
    let config = LayoutConfig::builder()
        .num_blocks(BLOCKS)
        .num_layers(32)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(16)
        .element(ElementFormat::Width(1))
        .build()?;
    let layout = LayoutBuilder::new(config).kind(kind).allocate(memory);
    Ok(Endpoint::new(layout.unregistered().build()?)?)
}

/// A manager that predicts this path to be the fastest.
fn manager(context: &Context, path: CopyPath) -> Result<TransferManager> {
    let mut calibration = Calibration::built_in();
    let (fixed, bytes_per_second) = (Duration::from_micros(1), 1e12);
    let cost = PathCost { fixed, per_piece_ns: 0.0, per_short_piece_ns: 0.0, bytes_per_second };
    for direction in [Direction::ToHost, Direction::ToDevice] {
        for other in CopyPath::ALL {
            let fixed = if other == path { fixed } else { Duration::from_millis(1) };
            if calibration.cost(direction, other).is_some() {
                calibration.set(direction, other, PathCost { fixed, ..cost });
            }
        }
    }
    let calibration = Some(calibration);
    let options = DeviceEngineOptions { calibration, learns: false, ..Default::default() };
    Ok(TransferManager::new([Arc::new(DeviceEngine::new(context, options)?) as _]))
}

#[inline(never)]
fn submit(manager: &TransferManager, transfer: Transfer) -> Result<Completion<()>> {
    Ok(manager.submit(transfer, ()).map_err(|rejected| rejected.cause)?)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |number: usize| arguments.get(number).map_or("", String::as_str);
    let path = if argument(0) == "direct" { CopyPath::Direct } else { CopyPath::Staged };
    let is_to_device = argument(1) == "to-device";
    let rounds = argument(2).parse().unwrap_or(1000_usize);
    let context = Context::primary(DeviceId::new(0))?;
    let manager = manager(&context, path)?;
    let device = endpoint(LAYERS, &DeviceAllocator::new(&context))?;
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?;
    let host = endpoint(LayoutKind::FullyContiguous, &pinned)?;
    // Factors that are coprime to the number of blocks scatter the ids.
    let [on_device, on_host] =
        [5, 11].map(|factor| (0..16).map(|id| id * factor % BLOCKS).collect::<Vec<u32>>());
    let mut times = Vec::new();
    for round in 0..WARM_UP + rounds {
        let transfer = if is_to_device {
            Transfer::new(&host, &device).blocks(&on_host, &on_device)
        } else {
            Transfer::new(&device, &host).blocks(&on_device, &on_host)
        };
        let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
        let begun = Instant::now();
        let completion = if round < WARM_UP {
            manager.submit(transfer, ()).map_err(|rejected| rejected.cause)?
        } else {
            submit(&manager, transfer)?
        };
        if round >= WARM_UP {
            times.push(begun.elapsed());
        }
        let report = completion.wait().result?;
        if report.explanation.path() != path.name() {
            return Err(format!("copied by {}", report.explanation.path()).into());
        }
    }
    times.sort_unstable();
    println!("{path}: {:?}", times.get(times.len() / 2).copied().unwrap_or_default());
    Ok(())
}
