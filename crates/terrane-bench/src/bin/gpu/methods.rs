//! The raw methods that copy the same blocks as a transfer: one copy for each piece, one batch of
//! copies, and one kernel.

use anyhow::{Context as _, Result};
use terrane_core::{Allocate, ByteCount, HostAddress, Location, Memory, RegionRequest};
use terrane_cuda::{BlockIds, DeviceMemory, GridLaunch, LaunchEnd, Stream};
use terrane_transfer::{DeviceOrder, Endpoint, GridEnd, Planner, Side, Transfer};

use crate::bindings::Pieces;
use crate::setup::{Setup, address, device_address};

/// The number of thread blocks of the kernel, the same as of the engine's kernel: enough to
/// saturate the bus.
pub const THREAD_BLOCKS: u32 = 32;

/// The raw methods for one transfer.
pub struct Methods {
    pieces: Pieces,
    batch: Pieces,
    pub grid: GridLaunch,
    /// Keeps the tables and lists of the grid allocated.
    _tables: Vec<DeviceMemory>,
}

/// The names of the raw methods in reports.
pub const NAMES: [&str; 3] = ["copy each", "batched copies", "kernel"];

impl Methods {
    pub fn new(
        setup: &Setup,
        (source, from): (&Endpoint, &[u32]),
        (destination, to): (&Endpoint, &[u32]),
    ) -> Result<Self> {
        let pieces = pieces((source, from), (destination, to))?;
        let batch = pieces.clone();
        let mut tables = Vec::new();
        let grid = grid(setup, (source, from), (destination, to), &mut tables)?;
        Ok(Self { pieces, batch, grid, _tables: tables })
    }

    pub fn copy_each(&self, setup: &Setup) -> Result<()> {
        // SAFETY: the addresses are those of live layouts. No other code accesses the blocks before
        // the stream has completed.
        unsafe { self.pieces.copy_each(&setup.bindings, &setup.stream) }?;
        Ok(setup.stream.synchronize()?)
    }

    pub fn copy_batch(&mut self, setup: &Setup) -> Result<()> {
        // SAFETY: as above.
        unsafe { setup.bindings.copy_batch(&setup.stream, &mut self.batch) }?;
        Ok(setup.stream.synchronize()?)
    }

    pub fn kernel(&self, setup: &Setup) -> Result<()> {
        Self::kernels_at_once(setup, &[(self, &setup.stream)])
    }

    /// Runs the kernels of several transfers, each on a separate stream.
    pub fn kernels_at_once(setup: &Setup, all: &[(&Self, &Stream)]) -> Result<()> {
        for (methods, stream) in all {
            // SAFETY: as above; `all` owns the tables and lists.
            unsafe { setup.kernels.copy(stream, &methods.grid, THREAD_BLOCKS) }?;
        }
        for (_, stream) in all {
            stream.synchronize()?;
        }
        Ok(())
    }
}

/// Returns the pieces of a transfer, one for each layer and outer index of a block.
pub fn pieces(
    (source, from): (&Endpoint, &[u32]),
    (destination, to): (&Endpoint, &[u32]),
) -> Result<Pieces> {
    let mut pieces = Pieces::default();
    let geometry = source.layout().geometry();
    let bytes = geometry.pieces().context("pieces of equal length")?.piece_bytes();
    for (&from, &to) in from.iter().zip(to) {
        for layer in 0..geometry.num_layers() {
            for outer in 0..geometry.section_count() {
                let at = |end: &Endpoint, block| -> Result<u64> {
                    address(end.layout().location(block, layer, outer)?)
                };
                pieces.push(at(destination, to)?, at(source, from)?, bytes);
            }
        }
    }
    Ok(pieces)
}

/// Returns the transfer as the kernel's argument, with tables and lists in device memory.
fn grid(
    setup: &Setup,
    (source, from): (&Endpoint, &[u32]),
    (destination, to): (&Endpoint, &[u32]),
    tables: &mut Vec<DeviceMemory>,
) -> Result<GridLaunch> {
    let transfer = Transfer::new(source, destination)
        .blocks(from, to)
        .device_order(DeviceOrder::AlreadySynchronised);
    let plan = Planner::new().plan(&transfer)?;
    let grids = plan.grids().context("a plan of even strides")?;
    let [grid] = **grids else { anyhow::bail!("{} grids, expected one", grids.len()) };
    let mut keep = |table: DeviceMemory| {
        let at = table.address().get();
        tables.push(table);
        at
    };
    let mut end = |end: &GridEnd, at: &Endpoint, blocks: &[u32]| -> Result<LaunchEnd> {
        let layers = if end.regions_per_layer == 0 { 1 } else { grid.layers };
        let mut bases = Vec::new();
        for layer in 0..layers {
            let region = ByteCount::new((end.first_region + layer).into()).to_usize();
            let region = at.layout().regions().get(region);
            let region = region.ok_or_else(|| anyhow::anyhow!("a grid beyond its regions"))?;
            bases.push(device_address(region)?);
        }
        let ids: Vec<u8> = blocks.iter().flat_map(|id| id.to_ne_bytes()).collect();
        let (base, bases_at) = match bases.as_slice() {
            [only] => (end.offset + only, 0),
            many => {
                let bytes: Vec<u8> = many.iter().flat_map(|base| base.to_ne_bytes()).collect();
                (end.offset, keep(put(setup, &bytes)?))
            }
        };
        Ok(LaunchEnd {
            base,
            bases: bases_at,
            bases_bits: bases.iter().fold(0, |bits, base| bits | base),
            blocks: keep(put(setup, &ids)?),
            block_ids: BlockIds::Listed,
            first_inline: 0,
            block_stride: end.block_stride,
            // With a region for each layer, the table has the address of each layer.
            layer_stride: if end.regions_per_layer == 0 { end.layer_stride } else { 0 },
            outer_stride: end.outer_stride,
            row_stride: end.row_stride,
            column_stride: end.column_stride,
        })
    };
    Ok(GridLaunch {
        pairs: u32::try_from(plan.source_blocks().len())?,
        layers: grid.layers,
        outers: grid.outers,
        rows: grid.rows,
        columns: grid.columns,
        bytes: grid.bytes.get(),
        source: end(&grid.source, source, plan.grid_blocks(Side::Source))?,
        destination: end(&grid.destination, destination, plan.grid_blocks(Side::Destination))?,
        ..GridLaunch::default()
    })
}

/// Copies bytes into new device memory.
pub fn put(setup: &Setup, bytes: &[u8]) -> Result<DeviceMemory> {
    let length = ByteCount::from_usize(bytes.len());
    let memory = setup.device.allocate(&RegionRequest::new(length).labelled("table"))?;
    let from = HostAddress::new(std::ptr::NonNull::from(bytes).cast::<u8>());
    // SAFETY: both live until the stream has completed, and no other code uses them.
    unsafe { setup.stream.copy(Location::Host(from), memory.location(), length) }?;
    setup.stream.synchronize()?;
    Ok(memory)
}
