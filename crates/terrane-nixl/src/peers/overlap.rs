//! Layouts that share bytes.

use terrane_wire::LayoutDescriptor;

/// The first region of a layout that shares bytes with `others`, which share no bytes among
/// themselves.
pub(super) fn first_shared<'a>(
    others: impl Iterator<Item = &'a LayoutDescriptor>,
    described: &LayoutDescriptor,
) -> Option<u32> {
    let mut others: Vec<_> = others
        .flat_map(LayoutDescriptor::regions)
        .map(|region| (region.space(), region.address(), region.length()))
        .collect();
    others.sort_unstable();
    // The last region that begins before another one ends also ends last.
    (0_u32..).zip(described.regions()).find_map(|(number, region)| {
        // Validated: the sum fits in 64 bits.
        let end = region.address().saturating_add(region.length().get());
        let before =
            others.partition_point(|&(space, address, _)| (space, address) < (region.space(), end));
        let (space, address, length) = *others.get(before.checked_sub(1)?)?;
        let shares =
            space == region.space() && address.saturating_add(length.get()) > region.address();
        shares.then_some(number)
    })
}
