//! Checks the caller's regions before they become a layout.

use terrane_core::{AgentName, ByteCount, Memory, Region, Span, StorageKind};

use crate::error::{LayoutError, Part, RegionRole};
use crate::plan::{LayoutPlan, PaddingReport};

/// Checks count, storage kind, size, alignment and overlap.
pub(crate) fn check_regions(
    plan: &LayoutPlan,
    regions: &[Region],
) -> Result<(StorageKind, PaddingReport), LayoutError> {
    let geometry = plan.geometry();
    let expected = geometry.region_count();
    let first = regions.first().filter(|_| u32::try_from(regions.len()) == Ok(expected));
    let Some(first) = first.map(Memory::kind) else {
        let role = match expected {
            1 => RegionRole::AllLayers,
            count if count == geometry.num_layers() => RegionRole::Layer,
            _ => RegionRole::Region,
        };
        return Err(LayoutError::RegionCount { expected, actual: regions.len(), role });
    };

    let alignment = plan.limits().alignment.max(geometry.block_alignment());
    for (number, region) in numbered(regions) {
        let actual = region.kind();
        if actual != first {
            return Err(LayoutError::MixedStorage { region: number, first, actual });
        }
        let part = Part::Region(number);
        part.check(region, geometry.region_bytes(number), alignment)?;
        plan.check_size(part, region.length())?;
    }

    // Compares each pair: a layout has as many regions as a model has layers, a few dozen.
    for (second, region) in numbered(regions) {
        let span = used(plan, second, region);
        let others = numbered(regions).take_while(|&(first, _)| first < second);
        for (first, other) in others {
            if span.overlaps(&used(plan, first, other)) {
                return Err(LayoutError::RegionsOverlap { first, second });
            }
        }
    }
    let held: Result<ByteCount, _> = regions.iter().map(Memory::length).collect();
    Ok((first, PaddingReport::new(geometry, held?)))
}

/// Checks that every region is within a registration of `agent`.
pub(crate) fn check_registrations(
    plan: &LayoutPlan,
    regions: &[Region],
    agent: &AgentName,
) -> Result<(), LayoutError> {
    for (number, region) in numbered(regions) {
        let (mut found, mut covered) = (Vec::new(), false);
        region.visit_registrations(&mut |record| {
            covered |= record.agent == *agent && record.span.covers(&used(plan, number, region));
            found.push(record.agent.clone());
        });
        if covered {
            continue;
        }
        let agent = agent.clone();
        return Err(if found.contains(&agent) {
            LayoutError::NotCovered { region: number, agent }
        } else {
            LayoutError::NotRegistered { region: number, agent, found }
        });
    }
    Ok(())
}

/// The bytes of a region that the layout uses. Other code may use the rest of an adopted region.
fn used(plan: &LayoutPlan, number: u32, region: &Region) -> Span {
    Span { length: plan.geometry().region_bytes(number), ..region.span() }
}

fn numbered(regions: &[Region]) -> impl Iterator<Item = (u32, &Region)> {
    (0_u32..).zip(regions)
}
