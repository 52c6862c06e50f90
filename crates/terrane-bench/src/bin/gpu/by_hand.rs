//! The driver calls that submit some blocks, with all arguments prepared: the baseline of a submit.

use anyhow::{Result, anyhow};
use terrane_core::ByteCount;
use terrane_core::convert::to_u64;
use terrane_cuda::{BlockIds, DeviceMemory, GridLaunch, Stream};
use terrane_transfer::Endpoint;

use crate::bindings::{Mark, Pieces};
use crate::blocks::Way;
use crate::methods::{Methods, THREAD_BLOCKS};
use crate::setup::{Setup, address};

/// The size of a buffer of the staged path. A larger transfer is split into parts of this size.
const BUFFER: u64 = 32 << 20;
const FIRST_TO_HOST: u64 = 8 << 20;
/// The thread blocks of the packing kernel when it runs alone. The next constant is for a kernel
/// that runs during copies.
const PACK_ALONE: u32 = 72;
const PACK_DURING_COPIES: u32 = 24;

/// The driver calls of one transfer.
pub struct ByHand<'setup> {
    way: Way,
    grid: GridLaunch,
    thread_blocks: u32,
    /// The copies between the buffer and the host. `None` if the kernel copies everything.
    copies: Option<Pieces>,
    /// The event between copies and kernel, if they are on two streams.
    hand_over: Option<Mark<'setup>>,
    end: Mark<'setup>,
    /// Whether the first call queries if the stream is idle.
    queries_idle: bool,
    _methods: Methods,
    _buffer: DeviceMemory,
}

impl<'setup> ByHand<'setup> {
    /// Prepares the calls of the path that a transfer uses. For a transfer in several parts, these
    /// are the calls of the first part, because the submitting thread makes no others.
    pub fn new(
        setup: &'setup Setup,
        way: Way,
        path: &str,
        (device, on_device): (&Endpoint, &[u32]),
        (host, on_host): (&Endpoint, &[u32]),
        queries_idle: bool,
    ) -> Result<Self> {
        let block = host.layout().geometry().block_bytes().get();
        let buffer = setup.flat(ByteCount::new(BUFFER))?;
        let mut pairs: Vec<(u32, u32)> =
            on_host.iter().copied().zip(on_device.iter().copied()).collect();
        let is_staged = path == "staged";
        let mut in_parts = false;
        if is_staged {
            // In the order of the host blocks, and only the blocks of the first part.
            pairs.sort_unstable();
            let bytes = block * to_u64(pairs.len());
            in_parts = bytes > BUFFER;
            let most = if way == Way::ToHost { FIRST_TO_HOST } else { BUFFER };
            if in_parts {
                pairs.truncate(ByteCount::new((most / block).max(1)).to_usize());
            }
        }
        let (on_host, on_device): (Vec<u32>, Vec<u32>) = pairs.into_iter().unzip();
        let (source, destination) = match way {
            Way::ToHost => ((device, &*on_device), (host, &*on_host)),
            Way::ToDevice => ((host, &*on_host), (device, &*on_device)),
        };
        let methods = Methods::new(setup, source, destination)?;
        let mut grid = methods.grid;
        let thread_blocks = match (is_staged, in_parts && way == Way::ToDevice) {
            (false, _) => THREAD_BLOCKS,
            (true, false) => PACK_ALONE,
            (true, true) => PACK_DURING_COPIES,
        };
        let copies = if is_staged {
            let (near, far) = match way {
                Way::ToHost => (&mut grid.source, &mut grid.destination),
                Way::ToDevice => (&mut grid.destination, &mut grid.source),
            };
            (near.block_ids, near.first_inline) = (BlockIds::Inline, 0);
            (far.block_ids, far.base) = (BlockIds::Identity, buffer.address().get());
            for (place, id) in grid.inline_blocks.iter_mut().zip(&on_device) {
                *place = *id;
            }
            Some(stretches(way, host, &on_host, block, buffer.address().get())?)
        } else {
            for (number, (end, ids)) in
                [(&mut grid.source, source.1), (&mut grid.destination, destination.1)]
                    .into_iter()
                    .enumerate()
            {
                let first = number * ids.len();
                (end.block_ids, end.first_inline) = (BlockIds::Inline, u32::try_from(first)?);
                let places = grid.inline_blocks.get_mut(first..first + ids.len());
                places
                    .ok_or_else(|| anyhow!("more blocks than a launch carries"))?
                    .copy_from_slice(ids);
            }
            None
        };
        let hand_over =
            if in_parts && way == Way::ToDevice { Some(setup.bindings.event()?) } else { None };
        let end = setup.bindings.event()?;
        Ok(Self {
            way,
            grid,
            thread_blocks,
            copies,
            hand_over,
            end,
            queries_idle,
            _methods: methods,
            _buffer: buffer,
        })
    }

    /// Makes the calls.
    pub fn submit(&mut self, setup: &Setup) -> Result<()> {
        let (first, second) = (&setup.second_stream, &setup.third_stream);
        if self.queries_idle {
            setup.bindings.is_idle(&setup.stream)?;
        }
        // SAFETY: the addresses are those of live layouts and of the buffer. No other code accesses
        // them before the end has been passed.
        let launch =
            |stream: &Stream| unsafe { setup.kernels.copy(stream, &self.grid, self.thread_blocks) };
        let Some(copies) = &mut self.copies else {
            launch(first)?;
            return self.end.record(first);
        };
        let copy = |copies: &mut Pieces| match copies.sizes.len() {
            // SAFETY: as above.
            1 => unsafe { copies.copy_each(&setup.bindings, first) },
            // SAFETY: as above.
            _ => unsafe { setup.bindings.copy_batch(first, copies) },
        };
        match (self.way, &self.hand_over) {
            (Way::ToHost, _) => {
                launch(first)?;
                copy(copies)?;
            }
            (Way::ToDevice, None) => {
                copy(copies)?;
                launch(first)?;
            }
            (Way::ToDevice, Some(between)) => {
                copy(copies)?;
                between.record(first)?;
                between.delay(second)?;
                launch(second)?;
                return self.end.record(second);
            }
        }
        self.end.record(first)
    }

    pub fn has_ended(&self) -> Result<bool> {
        self.end.is_passed()
    }
}

/// Returns the copies of blocks that are contiguous on the host. Adjacent blocks become one copy.
fn stretches(way: Way, host: &Endpoint, ids: &[u32], block: u64, buffer: u64) -> Result<Pieces> {
    let mut stretches: Vec<(u64, u64, u64)> = Vec::new();
    let mut at = buffer;
    for &id in ids {
        let place = address(host.layout().location(id, 0, 0)?)?;
        match stretches.last_mut() {
            Some((_, begin, bytes)) if *begin + *bytes == place => *bytes += block,
            _ => stretches.push((at, place, block)),
        }
        at += block;
    }
    let mut pieces = Pieces::default();
    for (near, far, bytes) in stretches {
        let (to, from) = if way == Way::ToHost { (far, near) } else { (near, far) };
        pieces.push(to, from, ByteCount::new(bytes));
    }
    Ok(pieces)
}
