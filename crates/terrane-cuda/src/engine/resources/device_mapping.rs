//! The device's access to the two ends of a transfer, determined once for each endpoint.

use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUpointer_attribute;
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, DeviceAddress, HostAddress, Location, Memory, Region, StorageKind};
use terrane_transfer::{Endpoint, EndpointCache, GridEnd, Side, TransferPlan};

use crate::driver::capture::RelaxedCaptureMode;
use crate::engine::geometry::index;
use crate::engine::resources::base_tables::{BaseTable, BaseTables, ENTRY_BYTES};
use crate::engine::resources::peer_contexts::Peers;
use crate::error::CudaError;
use crate::memory::pinned::chunks::device_pointer;
use crate::runtime::context::Context;
use crate::runtime::stream::Stream;

/// The locations of an endpoint's regions for a device.
#[derive(Debug)]
pub(crate) struct DeviceMapping {
    /// The base of each region for the driver's copies.
    copies: Box<[u64]>,
    /// Addresses at which a copy must be split, ascending; nearly always none.
    splits: Box<[u64]>,
    kernels: KernelBases,
    /// The number of locked bytes of each region, counted from the first, while memory is still in
    /// preparation; `None` if all of it is locked.
    locked: Option<Box<[u64]>>,
}

/// The regions' locations for kernels.
#[derive(Debug)]
enum KernelBases {
    /// Kernels cannot access this memory.
    Unreachable,
    /// At regular distances.
    Regular { first: u64, step: u64 },
    /// Anywhere.
    Listed { bases: Box<[u64]>, tables: Mutex<Vec<(u32, Arc<BaseTable>)>> },
}

/// A layer's region, in the form of a kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelBase {
    /// The base of the first layer.
    pub(crate) base: u64,
    /// The distance between the regions of consecutive layers, if it is regular.
    pub(crate) layer_step: u64,
    /// The device's list of bases, starting at the first layer, if there is one; or null.
    pub(crate) table: u64,
    /// The bits that are set in any base of the list.
    pub(crate) table_bits: u64,
}

impl DeviceMapping {
    /// Queries how `context`'s device accesses the endpoint; `None` if it cannot.
    fn of(
        context: &Context,
        peers: &Peers,
        endpoint: &Endpoint,
    ) -> Result<Option<Self>, CudaError> {
        let regions = endpoint.layout().regions();
        let mut copies = Vec::with_capacity(regions.len());
        let mut kernels = Some(Vec::with_capacity(regions.len()));
        let mut splits = Vec::new();
        let mut locked = Vec::with_capacity(regions.len());
        for region in regions {
            let (copy, kernel) = match region.location() {
                Location::Device { device, address } => {
                    let reached = device == context.device().id
                        || reaches_peer(context, peers, region.kind(), address)?;
                    locked.push(region.length().get());
                    (address.get(), reached.then_some(address.get()))
                }
                Location::Host(address) => {
                    if !is_pinned(context, region, address)? {
                        return Ok(None);
                    }
                    let before = splits.len();
                    let bytes = find_splits(context, region, address, &mut splits);
                    locked.push(bytes);
                    let is_whole = splits.len() == before;
                    // Kernels must not access bytes beyond the locked ones.
                    let is_up = bytes >= region.length().get();
                    let alias =
                        if is_up { alias(context, region, address, is_whole) } else { None };
                    (host_number(address), alias)
                }
                _ => return Ok(None),
            };
            copies.push(copy);
            kernels = kernels.zip(kernel).map(|(mut bases, base)| {
                bases.push(base);
                bases
            });
        }
        splits.sort_unstable();
        let kernels = kernels.map_or(KernelBases::Unreachable, KernelBases::of);
        let is_up =
            locked.iter().zip(regions).all(|(&bytes, region)| bytes >= region.length().get());
        let locked = (!is_up).then(|| locked.into());
        Ok(Some(Self { copies: copies.into(), splits: splits.into(), kernels, locked }))
    }

    /// Whether all bytes that a plan copies at this end are locked.
    pub(crate) fn covers(&self, plan: &TransferPlan, side: Side) -> bool {
        let Some(locked) = &self.locked else { return true };
        plan.runs().iter().all(|run| {
            let at = run.at(side);
            let end = at.offset.checked_add(run.bytes().get());
            locked.get(index(at.region)).zip(end).is_some_and(|(&locked, end)| end <= locked)
        })
    }

    pub(crate) fn has_kernels(&self) -> bool {
        !matches!(self.kernels, KernelBases::Unreachable)
    }

    /// The location of a region's offset for copies.
    pub(crate) fn copy_address(&self, region: u32, offset: u64) -> Option<u64> {
        self.copies.get(index(region))?.checked_add(offset)
    }

    /// The number of bytes that one copy starting at `address` may have, at most `bytes`.
    pub(crate) fn unsplit(&self, address: u64, bytes: u64) -> u64 {
        let Some(next) = self.splits.get(self.splits.partition_point(|&split| split <= address))
        else {
            return bytes;
        };
        bytes.min(next - address)
    }

    /// The regions of `end` for kernels, starting at `layer` of the transfer. If a list is needed,
    /// later work of `stream` can read it.
    pub(crate) fn kernel_base(
        &self,
        tables: &BaseTables,
        end: &GridEnd,
        layer: u32,
        stream: &Stream,
    ) -> Result<Option<KernelBase>, CudaError> {
        let first =
            u64::from(end.first_region) + u64::from(end.regions_per_layer) * u64::from(layer);
        let Some(first) = usize::try_from(first).ok() else { return Ok(None) };
        Ok(match &self.kernels {
            KernelBases::Unreachable => None,
            KernelBases::Regular { first: base, step } => {
                let number = to_u64(first);
                let layer_step = step.wrapping_mul(u64::from(end.regions_per_layer));
                let base = base.wrapping_add(step.wrapping_mul(number));
                Some(KernelBase { base, layer_step, table: 0, table_bits: 0 })
            }
            KernelBases::Listed { bases, .. } if end.regions_per_layer == 0 => {
                let base = bases.get(first).copied();
                base.map(|base| KernelBase { base, layer_step: 0, table: 0, table_bits: 0 })
            }
            KernelBases::Listed { bases, tables: uploaded } => {
                let step = index(end.regions_per_layer);
                let table = table_of_step(uploaded, end.regions_per_layer, tables, bases)?;
                table.ready_for(stream)?;
                let rest = bases.get(first..).unwrap_or_default();
                // The list has the regions of each remainder one after the other.
                let before = (0..first % step).map(|rest| (bases.len() - rest).div_ceil(step));
                let place = before.sum::<usize>() + first / step;
                let offset = to_u64(place) * ENTRY_BYTES;
                Some(KernelBase {
                    base: 0,
                    layer_step: 0,
                    table: table.address + offset,
                    table_bits: rest.iter().step_by(step).fold(0, |bits, base| bits | base),
                })
            }
        })
    }
}

/// The device's list of bases for layers that are `step` regions apart.
fn table_of_step(
    uploaded: &Mutex<Vec<(u32, Arc<BaseTable>)>>,
    step: u32,
    tables: &BaseTables,
    bases: &[u64],
) -> Result<Arc<BaseTable>, CudaError> {
    let known = |uploaded: &[(u32, Arc<BaseTable>)]| {
        let found = uploaded.iter().find(|(known, _)| *known == step);
        found.map(|(_, table)| Arc::clone(table))
    };
    if let Some(table) = known(&lock(uploaded)) {
        return Ok(table);
    }
    let every = index(step);
    let of_remainder = |rest: usize| bases.iter().skip(rest).step_by(every).copied();
    let ordered: Vec<u64> = (0..every).flat_map(of_remainder).collect();
    // The driver is not called under the lock. If another thread was faster, this table drops
    // after the lock, because its drop calls the driver.
    let table = Arc::new(tables.upload(&ordered)?);
    let mut uploaded = lock(uploaded);
    let earlier = known(&uploaded);
    if earlier.is_none() {
        uploaded.push((step, Arc::clone(&table)));
    }
    drop(uploaded);
    Ok(earlier.unwrap_or(table))
}

impl KernelBases {
    fn of(bases: Vec<u64>) -> Self {
        let (first, second) = (bases.first().copied(), bases.get(1).copied());
        let Some(first) = first else { return Self::Unreachable };
        let step = second.map_or(0, |second| second.wrapping_sub(first));
        let is_regular = bases.windows(2).all(|pair| match pair {
            [a, b] => b.wrapping_sub(*a) == step,
            _ => true,
        });
        if is_regular {
            return Self::Regular { first, step };
        }
        Self::Listed { bases: bases.into(), tables: Mutex::default() }
    }
}

/// The driver accepts host and device addresses as the same kind of number.
fn host_number(address: HostAddress) -> u64 {
    // The driver converts the number back to a pointer.
    to_u64(address.as_ptr().expose_provenance())
}

/// Whether the driver reports the host memory as locked.
fn is_pinned(context: &Context, region: &Region, address: HostAddress) -> Result<bool, CudaError> {
    /// `CU_MEMORYTYPE_HOST`.
    const HOST: u64 = 1;
    if region.kind() != StorageKind::Pinned {
        return Ok(false);
    }
    if region.length().is_zero()
        || region.device_alias().is_some()
        || region.copyable_from(ByteCount::ZERO).is_some()
    {
        return Ok(true);
    }
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    match context.pointer_attribute(DeviceAddress::new(host_number(address)), attribute) {
        Ok(kind) => Ok(kind & u64::from(u32::MAX) == HOST),
        Err(error) if error.is_context_lost() => Err(error),
        // The driver returns "invalid value" for an address that it does not know.
        Err(_) => Ok(false),
    }
}

/// The maximum number of locked stretches of a region that the driver reports. Beyond it, its
/// answers are not plausible. The answers of the memory itself have no limit.
const MAX_SPLITS: usize = 4096;

/// Finds the boundaries between locked stretches of a region. They come from the memory, or from
/// the driver if the memory does not know them. Returns the number of locked bytes, counted from
/// the first.
fn find_splits(
    context: &Context,
    region: &Region,
    address: HostAddress,
    splits: &mut Vec<u64>,
) -> u64 {
    let (start, length) = (host_number(address), region.length().get());
    let before = splits.len();
    let mut at = 0;
    while at < length {
        let known = region.copyable_from(ByteCount::new(at));
        let stretch = match known {
            Some(bytes) => Some(bytes.get()),
            None => stretch_of_driver(context, start + at),
        };
        let stretch = match stretch {
            Some(0) => return at,
            Some(stretch) => stretch,
            // A driver that knows the first byte knows every one that is locked.
            None if at > 0 => return at,
            None => return length,
        };
        at = at.saturating_add(stretch);
        if at < length {
            splits.push(start + at);
        }
        if known.is_none() && splits.len() - before > MAX_SPLITS {
            splits.truncate(before);
            return length;
        }
    }
    length
}

/// The number of bytes starting at an address that are one allocation or registration, according to
/// the driver.
fn stretch_of_driver(context: &Context, address: u64) -> Option<u64> {
    let ask = |attribute| context.pointer_attribute(DeviceAddress::new(address), attribute).ok();
    let start = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
    let size = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
    start.checked_add(size)?.checked_sub(address)
}

/// The device address of a region of host memory, if kernels can access all of it.
fn alias(context: &Context, region: &Region, address: HostAddress, is_whole: bool) -> Option<u64> {
    if let Some(alias) = region.device_alias() {
        return Some(alias.get());
    }
    // The driver's address is valid for one stretch; the next stretch may have another one.
    let may_ask = is_whole || context.device().uses_host_addresses;
    may_ask.then(|| device_pointer(context, address).ok()).flatten().map(DeviceAddress::get)
}

/// Whether kernels of `context`'s device can access another device's memory at this address.
///
/// A kernel that touches inaccessible memory loses the context, so access must be certain. Peers
/// can access plain allocations once access is enabled. They can access allocations of a pool only
/// if the pool permits it.
fn reaches_peer(
    context: &Context,
    peers: &Peers,
    kind: StorageKind,
    address: DeviceAddress,
) -> Result<bool, CudaError> {
    let StorageKind::Device(device) = kind else { return Ok(false) };
    let peer = peers.get(device)?;
    // Legacy handles for other processes exist only for plain allocations.
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    let plain = peer.pointer_attribute(address, attribute).is_ok_and(|plain| plain & 0xFF != 0);
    if !plain || !context.reach_peer(&peer)? {
        return Ok(false);
    }
    Ok(true)
}

/// The device's access to endpoints, determined once for each.
#[derive(Debug)]
pub(crate) struct MappingCache {
    context: Context,
    peers: Arc<Peers>,
    known: EndpointCache<Arc<DeviceMapping>>,
    known_ends: EndpointCache<MappedEnds, 2>,
}

/// The device's access to the source and to the destination of a transfer.
pub(crate) type MappedEnds = Arc<[Arc<DeviceMapping>; 2]>;

impl MappingCache {
    pub(crate) fn new(context: &Context, peers: &Arc<Peers>) -> Self {
        let (context, peers) = (context.clone(), Arc::clone(peers));
        let (known, known_ends) = (EndpointCache::default(), EndpointCache::default());
        Self { context, peers, known, known_ends }
    }

    /// Returns how the device accesses both ends of a plan; `None` if it cannot.
    pub(crate) fn ends(&self, plan: &TransferPlan) -> Result<Option<MappedEnds>, CudaError> {
        let ends = [plan.source(), plan.destination()];
        if let Some(known) = self.known_ends.get_together(ends) {
            return Ok(Some(known));
        }
        let [source, destination] = ends.map(|end| self.get(end));
        let Some(found) = source?.zip(destination?) else { return Ok(None) };
        let found = Arc::new(<[Arc<DeviceMapping>; 2]>::from(found));
        let is_known = found.iter().all(|end| end.locked.is_none());
        Ok(Some(if is_known { self.known_ends.insert_together(ends, found) } else { found }))
    }

    /// Returns how the device accesses an endpoint; `None` if it cannot.
    fn get(&self, endpoint: &Endpoint) -> Result<Option<Arc<DeviceMapping>>, CudaError> {
        if let Some(known) = self.known.get(endpoint) {
            return Ok(Some(known));
        }
        // The mode is changed once, not at each query of a region.
        let _relaxed = RelaxedCaptureMode::new(self.context.driver());
        let found = DeviceMapping::of(&self.context, &self.peers, endpoint)?.map(Arc::new);
        // Memory that is not locked yet may be locked at the next query.
        Ok(match found {
            Some(found) if found.locked.is_none() => Some(self.known.insert(endpoint, found)),
            found => found,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_bases_need_no_list() {
        let regular = KernelBases::of(vec![100, 300, 500]);
        assert!(matches!(regular, KernelBases::Regular { first: 100, step: 200 }));
        let falling = KernelBases::of(vec![500, 300, 100]);
        assert!(matches!(falling, KernelBases::Regular { first: 500, .. }));
        assert!(matches!(KernelBases::of(vec![7]), KernelBases::Regular { first: 7, step: 0 }));
        assert!(matches!(KernelBases::of(vec![1, 2, 4]), KernelBases::Listed { .. }));
    }

    #[test]
    fn copies_are_split_where_registrations_end() {
        let mapping = DeviceMapping {
            copies: [0x1000].into(),
            splits: [0x2000, 0x3000].into(),
            kernels: KernelBases::Unreachable,
            locked: None,
        };
        assert_eq!(mapping.unsplit(0x1000, 0x1000), 0x1000);
        assert_eq!(mapping.unsplit(0x1800, 0x1000), 0x800);
        assert_eq!(mapping.unsplit(0x2000, 0x5000), 0x1000);
        assert_eq!(mapping.unsplit(0x3000, 0x5000), 0x5000);
        assert_eq!(mapping.copy_address(0, 16), Some(0x1010));
        assert_eq!(mapping.copy_address(1, 16), None);
    }
}
