//! The arenas of a rank as one endpoint: a block is a page in all arenas.

use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use terrane::core::{DeviceAddress, HostAddress, Location};
use terrane::interop::tensors::{StridedForm, StridedTensor, adopt_strided_parts};
use terrane::layout::{Axis, SectionName, TensorAxis};
use terrane::prelude::*;

use crate::contract::ArenaSpec;

/// The memory that arenas are in. Their addresses are only numbers.
#[derive(Clone, Copy, Debug)]
pub enum ArenaMemory<'a> {
    /// The memory of a device. Terrane checks with the driver that each arena is in it.
    Device(&'a Context),
    /// Host memory, for an engine without a device. Its pointers were
    /// [exposed](std::ptr::NonNull::expose_provenance).
    Host,
}

/// Adopts the arenas of a rank in place. `owner` keeps their memory, and drops with the endpoint and
/// the last copy.
///
/// Arenas of equal shape are layers of one section, in the order in which they are given. So the
/// latents and the index keys of a model are two sections. If a shape has fewer arenas than another
/// one, each of them is a section.
///
/// # Errors
///
/// Sizes of zero or outside the arena, memory of another device, or arenas that overlap.
///
/// # Safety
///
/// While `owner` lives, the bytes of each arena are valid, and stay at their addresses. Code that
/// reads or writes a page is ordered with the tier's copies of that page. The contract of the tier
/// ensures this: guards keep pages that are saved, and reservations keep pages that are loaded.
pub unsafe fn adopt_arenas<O: Send + Sync + 'static>(
    memory: ArenaMemory<'_>,
    arenas: &[ArenaSpec],
    owner: O,
) -> anyhow::Result<Endpoint> {
    let owner = Arc::new(owner);
    let mut classes: Vec<Class<'_>> = Vec::new();
    for arena in arenas {
        check(arena).with_context(|| format!("arena {:?}", arena.name))?;
        let at = place(memory, arena).with_context(|| format!("arena {:?}", arena.name))?;
        let sizes = [arena.num_blocks, arena.segments, arena.segment_bytes];
        let strides = [arena.block_stride_bytes, arena.kv_stride_bytes, 1];
        // SAFETY: the caller promises it for the arena, which the tensor does not exceed.
        let tensor = unsafe { StridedTensor::from_raw(at, 1, sizes, strides, Arc::clone(&owner)) };
        let tensor = tensor.with_context(|| format!("arena {:?}", arena.name))?;
        match classes.iter_mut().find(|class| class.has_shape_of(arena)) {
            Some(class) => class.tensors.push(tensor),
            None => classes.push(Class { first: arena, tensors: vec![tensor] }),
        }
    }
    // All sections of a layout have equally many layers, or none.
    let layers = classes.iter().map(|class| class.tensors.len()).max().unwrap_or(1);
    let parts = classes.iter().flat_map(|class| {
        let count = class.tensors.len();
        let at_once = if count == layers { count } else { 1 };
        class.tensors.chunks(at_once).map(|tensors| (class.first.segments, tensors))
    });
    let parts = parts
        .enumerate()
        .map(|(number, (segments, tensors))| Ok((form(number, segments, tensors.len())?, tensors)));
    let parts: Vec<(StridedForm, &[StridedTensor])> = parts.collect::<anyhow::Result<_>>()?;
    let parts: Vec<_> = parts.iter().map(|(form, tensors)| (form, *tensors)).collect();
    Ok(Endpoint::new(adopt_strided_parts(&parts)?.unregistered().build()?)?)
}

/// Arenas of one shape.
struct Class<'a> {
    first: &'a ArenaSpec,
    tensors: Vec<StridedTensor>,
}

impl Class<'_> {
    fn has_shape_of(&self, arena: &ArenaSpec) -> bool {
        let shape = |arena: &ArenaSpec| {
            let strides = (arena.kv_stride_bytes, arena.block_stride_bytes);
            (arena.num_blocks, arena.segments, arena.segment_bytes, strides)
        };
        shape(self.first) == shape(arena)
    }
}

/// Pages, segments and bytes. Each segment is a section.
fn form(number: usize, segments: usize, layers: usize) -> anyhow::Result<StridedForm> {
    let name = |segment| SectionName::new(&format!("{number}.{segment}"));
    let names: Vec<SectionName> = (0..segments).map(name).collect::<Result<_, _>>()?;
    Ok(StridedForm::new(&names)
        .tensors(Axis::Layer, u32::try_from(layers)?)
        .dim(Axis::Block)
        .dim(TensorAxis::Outer)
        .dim(Axis::Element))
}

fn check(arena: &ArenaSpec) -> anyhow::Result<()> {
    let last = |count: usize, stride: usize| count.checked_sub(1)?.checked_mul(stride);
    let reach = last(arena.num_blocks, arena.block_stride_bytes)
        .zip(last(arena.segments, arena.kv_stride_bytes))
        .and_then(|(pages, segments)| {
            pages.checked_add(segments)?.checked_add(arena.segment_bytes)
        });
    match reach {
        Some(reach) if arena.segment_bytes > 0 => ensure!(
            reach <= arena.size_bytes,
            "the pages reach over {reach} bytes, and the arena has {}; state fewer pages",
            arena.size_bytes
        ),
        _ => bail!("the arena has no pages, no segments or no bytes; state 1 or more of each"),
    }
    ensure!(arena.segments <= 2, "{} segments of a page; state 1 or 2", arena.segments);
    Ok(())
}

fn place(memory: ArenaMemory<'_>, arena: &ArenaSpec) -> anyhow::Result<(StorageKind, Location)> {
    let length = ByteCount::from_usize(arena.size_bytes);
    match memory {
        ArenaMemory::Device(context) => {
            let address = DeviceAddress::new(arena.base_device_ptr);
            let span = context.device_span(address, length)?;
            Ok((span.kind, span.location))
        }
        ArenaMemory::Host => {
            let address = usize::try_from(arena.base_device_ptr)?;
            let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address);
            let pointer = std::ptr::NonNull::new(pointer).context("the address is null")?;
            Ok((StorageKind::System, Location::Host(HostAddress::new(pointer))))
        }
    }
}
