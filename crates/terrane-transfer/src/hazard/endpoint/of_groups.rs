//! Endpoints of cache groups that share memory.

use std::sync::Arc;

use terrane_core::Span;
use terrane_layout::PhysicalLayout;

use super::{Endpoint, OwnedBytes, extents, num_heads};
use crate::hazard::address_claims::AddressClaim;
use crate::hazard::group_overlap::{self, GroupRefusal, GroupsRefused};
use crate::hazard::table::HazardTable;

impl Endpoint {
    /// Creates an endpoint for each of the layouts of cache groups that share memory, in their
    /// order.
    ///
    /// Hybrid models have such groups. Several layouts describe one tensor, and one allocator
    /// assigns the block ids. Block 7 of one group and block 7 of another group then have the same
    /// bytes. Blocks with different ids share none.
    ///
    /// The endpoints share one table of claims. A transfer that writes block 7 of one group
    /// conflicts with every use of block 7 of another group, whatever their layers and heads. If
    /// the transfer fails half-way, the block is [incomplete](crate::TransferError::Incomplete) for
    /// all groups. Another group may read it once either group has written it again.
    ///
    /// The memory of all groups lives until the last of the endpoints and of their transfers has
    /// dropped. A layout without shared memory may be one of them. It shares the table as well.
    ///
    /// ```
    /// use terrane_core::{Allocate, Region, RegionRequest};
    /// use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
    /// use terrane_storage::{SystemAllocator, SystemOptions};
    /// use terrane_transfer::Endpoint;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // A page has 4,096 bytes: 16 tokens of an attention layer, or one state of 2,048 elements.
    /// let page = |tokens: u32, elements: u32| {
    ///     LayoutConfig::builder()
    ///         .num_blocks(100)
    ///         .num_layers(1)
    ///         .outer_dim(1)
    ///         .page_size(tokens)
    ///         .inner_dim(elements)
    ///         .element(ElementFormat::Width(2))
    ///         .build()
    /// };
    /// let (attention, state) = (page(16, 128)?, page(1, 2048)?);
    /// let system = SystemAllocator::new(SystemOptions::default());
    /// let tensor = Region::new(system.allocate(&RegionRequest::new(attention.total_bytes()))?);
    /// let over = |config| {
    ///     let layout = LayoutBuilder::new(config).fully_contiguous().adopt([tensor.clone()]);
    ///     layout.unregistered().build()
    /// };
    /// let groups = Endpoint::of_groups([over(attention)?, over(state)?])?;
    /// let [attention, state] = &groups[..] else { return Err("not two".into()) };
    ///
    /// let computes = attention.hold_for_write(&[7])?;
    /// assert!(state.hold_for_read(&[7]).is_err());
    /// let other = state.hold_for_read(&[8])?;
    /// # drop((computes, other));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`GroupsRefused`] returns the layouts with the reason: two groups with different numbers of
    /// blocks, two groups that may share bytes of different blocks, or bytes that another endpoint
    /// owns.
    pub fn of_groups(
        layouts: impl IntoIterator<Item = PhysicalLayout>,
    ) -> Result<Vec<Self>, GroupsRefused> {
        let layouts: Vec<PhysicalLayout> = layouts.into_iter().collect();
        let Some(num_blocks) = layouts.first().map(|first| first.geometry().num_blocks()) else {
            return Ok(Vec::new());
        };
        let mut all: Vec<_> = layouts.iter().map(extents).collect();
        if let Err(reason) = group_overlap::check(&layouts, &all) {
            return Err(GroupsRefused { layouts, reason });
        }
        let spans: Vec<Span> = all.iter().flatten().copied().collect();
        let claim = match AddressClaim::claim(&spans) {
            Ok(claim) => claim,
            Err(span) => {
                let group = all.iter().position(|extents| extents.contains(&span));
                let reason = GroupRefusal::BytesInUse { group: group.unwrap_or(0), span };
                return Err(GroupsRefused { layouts, reason });
            }
        };
        let regions = layouts.iter().flat_map(|layout| layout.regions().iter().cloned()).collect();
        let bytes = Arc::new(OwnedBytes { _claim: claim, _regions: regions });
        let groups = layouts.iter().map(|each| (each.geometry().num_layers(), num_heads(each)));
        let hazards = HazardTable::of_groups(num_blocks, groups);
        let endpoints = (0_u32..).zip(layouts.into_iter().zip(all.drain(..)));
        let endpoints = endpoints.map(|(group, (layout, extents))| {
            Self::build(Arc::clone(&bytes), extents, layout, hazards.clone(), group)
        });
        Ok(endpoints.collect())
    }
}
