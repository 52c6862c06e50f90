//! Which keys give access to a layout's regions.

use terrane_core::BackendName;
use terrane_wire::RegionDescriptor;

use super::{KeyLocation, MemoryKey};
use crate::peers::spaces::device_of;

/// The first region that no key of this backend reaches.
pub(in crate::peers) fn uncovered(
    regions: &[RegionDescriptor],
    backend: &BackendName,
    keys: &[MemoryKey<'_>],
) -> Option<u32> {
    covering(regions, backend, keys).err()
}

/// The key of this backend that reaches each region. If several do, it is the one with the highest
/// end among those that begin no later.
///
/// # Errors
///
/// The first region that no key reaches.
pub(in crate::peers) fn covering<'a>(
    regions: &[RegionDescriptor],
    backend: &BackendName,
    keys: &[MemoryKey<'a>],
) -> Result<Vec<MemoryKey<'a>>, u32> {
    let mut keys: Vec<_> =
        keys.iter().filter(|key| key.location.backend == backend.as_str()).copied().collect();
    keys.sort_by_key(|key| (key.location.memory, key.location.device, key.location.address));
    for index in 1..keys.len() {
        let Some([before, key]) = keys.get_mut(index - 1..=index) else { break };
        let (a, b) = (before.location, key.location);
        let end = |place: &KeyLocation<&str>| place.address.saturating_add(place.length);
        if (a.memory, a.device) == (b.memory, b.device) && end(&a) >= end(&b) {
            *key = *before;
        }
    }
    let key_of = |region: &RegionDescriptor| {
        let (memory, device) = device_of(region.space())?;
        let at = (memory, device, region.address());
        let after = keys.partition_point(|key| {
            (key.location.memory, key.location.device, key.location.address) <= at
        });
        let key = keys.get(after.checked_sub(1)?)?;
        let covers = key.location.covers(memory, device, region.address(), region.length());
        covers.then_some(*key)
    };
    (0_u32..).zip(regions).map(|(number, region)| key_of(region).ok_or(number)).collect()
}
