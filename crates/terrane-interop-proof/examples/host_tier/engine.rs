//! The part of an engine that a tier sees: arenas in its memory, and pages in them.

use std::ptr::NonNull;

use anyhow::Context as _;
use terrane::core::{HostAddress, Location, RegionRequest};
use terrane::prelude::*;

use crate::arenas::{ArenaMemory, adopt_arenas};
use crate::contract::ArenaSpec;

/// An engine with a cache on a device, or in host memory.
pub struct Engine {
    arenas: Vec<ArenaSpec>,
    /// The memory of each arena.
    memory: Vec<Region>,
    /// The device, and the stream on which the engine reads and writes.
    device: Option<(Context, Stream)>,
}

impl Engine {
    /// An engine of `layers` layers with this many pages. Each layer has K and V of `segment_bytes`
    /// bytes in one arena. The first layer also has an index in a second arena, with gaps.
    pub fn new(
        device: Option<&Context>,
        (layers, pages, segment_bytes): (usize, usize, usize),
    ) -> anyhow::Result<Self> {
        let keys_and_values = |layer| ArenaSpec {
            name: format!("layer {layer}"),
            base_device_ptr: 0,
            size_bytes: pages * 2 * segment_bytes,
            num_blocks: pages,
            segment_bytes,
            segments: 2,
            kv_stride_bytes: segment_bytes,
            block_stride_bytes: 2 * segment_bytes,
        };
        let index = ArenaSpec {
            name: "index of layer 0".into(),
            base_device_ptr: 0,
            size_bytes: pages * 96,
            num_blocks: pages,
            segment_bytes: 64,
            segments: 1,
            kv_stride_bytes: 0,
            block_stride_bytes: 96,
        };
        let mut arenas: Vec<ArenaSpec> = (0..layers).map(keys_and_values).collect();
        arenas.insert(1.min(layers), index);
        let mut memory = Vec::new();
        for arena in &mut arenas {
            let request = RegionRequest::new(ByteCount::from_usize(arena.size_bytes));
            let region = match device {
                Some(context) => Region::new(DeviceAllocator::new(context).allocate(&request)?),
                None => {
                    Region::new(SystemAllocator::new(SystemOptions::default()).allocate(&request)?)
                }
            };
            arena.base_device_ptr = match region.location() {
                Location::Device { address, .. } => address.get(),
                Location::Host(address) => u64::try_from(address.as_ptr().expose_provenance())?,
                other => anyhow::bail!("an arena at {other}"),
            };
            memory.push(region);
        }
        let device = match device {
            Some(context) => Some((context.clone(), Stream::new(context)?)),
            None => None,
        };
        let engine = Self { arenas, memory, device };
        for page in 0..pages {
            engine.write(page, 0)?;
        }
        Ok(engine)
    }

    /// The memory of the arenas, for [`adopt_arenas`].
    pub fn memory(&self) -> ArenaMemory<'_> {
        match &self.device {
            Some((context, _)) => ArenaMemory::Device(context),
            None => ArenaMemory::Host,
        }
    }

    /// Adopts all arenas, as an engine does when it starts.
    pub fn cache(&self) -> anyhow::Result<Endpoint> {
        // SAFETY: the regions keep the arenas' memory. The engine uses a page only when no copy of
        // it runs.
        unsafe { adopt_arenas(self.memory(), &self.arenas, self.memory.clone()) }
    }

    /// Writes bytes that follow from a number to a page.
    pub fn write(&self, page: usize, number: u64) -> anyhow::Result<()> {
        let bytes = self.content(number);
        let mut rest = bytes.as_slice();
        for (location, length) in self.spans(page)? {
            let (span, others) = rest.split_at_checked(length).context("too few bytes")?;
            let host = Location::Host(HostAddress::new(NonNull::from(span).cast::<u8>()));
            self.copy(host, location, length)?;
            rest = others;
        }
        Ok(())
    }

    /// The bytes of a page that was written with this number.
    pub fn content(&self, number: u64) -> Vec<u8> {
        let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        };
        std::iter::repeat_with(next).take(self.page_bytes()).collect()
    }

    /// The bytes of a page in all arenas.
    pub fn read(&self, page: usize) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for (location, length) in self.spans(page)? {
            let mut span = vec![0_u8; length];
            let host = HostAddress::new(NonNull::from(span.as_mut_slice()).cast::<u8>());
            self.copy(location, Location::Host(host), length)?;
            bytes.extend(span);
        }
        Ok(bytes)
    }

    /// The number of bytes of a page in all arenas.
    pub fn page_bytes(&self) -> usize {
        self.arenas.iter().map(|arena| arena.segments * arena.segment_bytes).sum()
    }

    /// The spans of a page: each segment of each arena.
    fn spans(&self, page: usize) -> anyhow::Result<Vec<(Location, usize)>> {
        let mut spans = Vec::new();
        for (arena, memory) in self.arenas.iter().zip(&self.memory) {
            anyhow::ensure!(page < arena.num_blocks, "page {page} of {}", arena.num_blocks);
            for segment in 0..arena.segments {
                let offset = page * arena.block_stride_bytes + segment * arena.kv_stride_bytes;
                let at = memory.location().checked_add(ByteCount::from_usize(offset));
                spans.push((at.context("an address past the end")?, arena.segment_bytes));
            }
        }
        Ok(spans)
    }

    fn copy(&self, from: Location, to: Location, length: usize) -> anyhow::Result<()> {
        if let Some((_, stream)) = &self.device {
            // SAFETY: both spans exist until the stream was waited for, and nothing else uses them.
            unsafe { stream.copy(from, to, ByteCount::from_usize(length)) }?;
            return Ok(stream.synchronize()?);
        }
        let (from, to) = (from.as_host(), to.as_host());
        let (from, to) = from.zip(to).context("memory of a device, and no device")?;
        // SAFETY: as above; a buffer of this program and an arena do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), length) };
        Ok(())
    }
}
