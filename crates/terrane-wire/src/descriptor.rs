//! The description of a layout: what it is, where its regions are, and whose.

use terrane_core::{AgentName, ByteCount, RemoteSpace, StorageKind};
use terrane_layout::{Geometry, LayoutFingerprint};

use crate::frame::{self, Content};
use crate::input::{check_canonical, check_name, check_set};
use crate::layout_form::{read_layout, write_layout};
use crate::{
    GeometryMismatch, Part, RegionDescriptor, WireError, WireLimits, first_difference,
    first_shape_difference,
};

/// A layout in an agent's memory, as the agent's process describes it to others.
///
/// Every value of this type has been checked, whether it was made here or decoded. The strides are
/// proved, and the fingerprint is theirs. There are as many regions as the geometry has, each of its
/// length, aligned to blocks, within its address space, of one storage kind, and disjoint. Whether the
/// memory is there, and whether the metadata fits it, the agent that takes the description has to check.
///
/// Two descriptions of one layout are equal, and so are their [encodings](Self::encode).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutDescriptor {
    geometry: Geometry,
    fingerprint: LayoutFingerprint,
    storage: StorageKind,
    agent: AgentName,
    metadata: Vec<u8>,
    regions: Vec<RegionDescriptor>,
}

impl LayoutDescriptor {
    /// Describes a layout of `geometry` in memory of kind `storage`, at `regions` of `agent`. The
    /// `metadata` is what the agent tells other agents so that they can reach the regions; it is not
    /// read here.
    ///
    /// # Errors
    ///
    /// [`WireError`] names the part that does not fit.
    pub fn new(
        geometry: Geometry,
        storage: StorageKind,
        agent: AgentName,
        metadata: Vec<u8>,
        regions: Vec<RegionDescriptor>,
    ) -> Result<Self, WireError> {
        check_name(Part::Agent, agent.as_str())?;
        check_regions(&geometry, storage, &regions)?;
        let fingerprint = LayoutFingerprint::new(&geometry);
        Ok(Self { geometry, fingerprint, storage, agent, metadata, regions })
    }

    /// The sections and their strides.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The fingerprint of the geometry.
    #[must_use]
    pub const fn fingerprint(&self) -> LayoutFingerprint {
        self.fingerprint
    }

    /// What the regions are in, over there.
    #[must_use]
    pub const fn storage(&self) -> StorageKind {
        self.storage
    }

    /// The agent that registered the regions.
    #[must_use]
    pub const fn agent(&self) -> &AgentName {
        &self.agent
    }

    /// What the agent tells other agents. Of a peer's, nothing here has been checked but the
    /// length.
    #[must_use]
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// The regions, in the order of the geometry.
    #[must_use]
    pub fn regions(&self) -> &[RegionDescriptor] {
        &self.regions
    }

    /// The bytes that travel: framed, of version 2, with a checksum.
    ///
    /// # Errors
    ///
    /// [`WireError::OverLimit`] past 4 GiB.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        frame::seal(Content::Layout, |frame| write_layout(self, frame))
    }

    /// Reads what [`encode`](Self::encode) wrote, and nothing else.
    ///
    /// No byte is trusted. Nothing that exceeds `limits`, or that the input is too short for, takes
    /// memory. Strides pass the proof of
    /// [`Geometry::from_sections_in`](terrane_layout::Geometry::from_sections_in).
    ///
    /// # Errors
    ///
    /// [`WireError`] names what is wrong with the bytes; [`WireError::Version1`] if they are of
    /// version 1.
    pub fn decode(bytes: &[u8], limits: &WireLimits) -> Result<Self, WireError> {
        let opened = frame::open(Content::Layout, bytes, limits)?;
        let layout = read_layout(&opened, limits)?;
        check_canonical(bytes, &layout.encode()?)?;
        Ok(layout)
    }

    /// Checks that each element lies where one of `geometry` lies: same sections, strides and regions,
    /// and so the same [fingerprint](Self::fingerprint).
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] names the first difference, and both values.
    pub fn expect(&self, geometry: &Geometry) -> Result<(), GeometryMismatch> {
        GeometryMismatch::unless_none(first_difference(geometry, &self.geometry))
    }

    /// Checks that whole blocks can be moved between the layout and one of `geometry`, whatever their
    /// strides are. A transfer checks the same of its two ends.
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] names the first difference, and both values.
    pub fn expect_shape(&self, geometry: &Geometry) -> Result<(), GeometryMismatch> {
        GeometryMismatch::unless_none(first_shape_difference(geometry, &self.geometry))
    }
}

fn check_regions(
    geometry: &Geometry,
    storage: StorageKind,
    regions: &[RegionDescriptor],
) -> Result<(), WireError> {
    let expected = geometry.region_count();
    if u32::try_from(regions.len()) != Ok(expected) {
        let actual = ByteCount::from_usize(regions.len()).get();
        return Err(WireError::RegionCount { expected: expected.into(), actual });
    }
    let alignment = geometry.block_alignment().get();
    for (number, region) in (0_u32..).zip(regions) {
        let length = geometry.region_bytes(number);
        let (space, address) = (region.space(), region.address());
        let fits = match (storage, space) {
            (StorageKind::System | StorageKind::Pinned, RemoteSpace::Host)
            | (StorageKind::Disk, RemoteSpace::File(_)) => true,
            (StorageKind::Device(ours), RemoteSpace::Device(theirs)) => ours == theirs,
            (
                StorageKind::System
                | StorageKind::Pinned
                | StorageKind::Disk
                | StorageKind::Device(_),
                _,
            ) => false,
            (storage, _) => return Err(WireError::NotOurs { storage }),
        };
        if !fits {
            return Err(WireError::WrongSpace { region: number, space, storage });
        }
        if region.length() != length {
            let actual = region.length();
            return Err(WireError::RegionLength { region: number, expected: length, actual });
        }
        if !region.is_addressable() {
            return Err(WireError::AddressOverflow { region: number, address, length });
        }
        if !address.is_multiple_of(alignment) {
            return Err(WireError::RegionMisaligned { region: number, address, alignment });
        }
        check_set(number, region.backends())?;
    }
    check_disjoint(regions)
}

/// Regions in order of address only touch those beside them.
fn check_disjoint(regions: &[RegionDescriptor]) -> Result<(), WireError> {
    let mut order: Vec<(u32, &RegionDescriptor)> = (0_u32..).zip(regions).collect();
    order.sort_by_key(|(_, region)| (region.space(), region.address()));
    for pair in order.windows(2) {
        let [(first, a), (second, b)] = pair else { continue };
        // In one space the second begins no earlier, and neither ends beyond the last address.
        let distance = b.address().checked_sub(a.address());
        if a.space() == b.space() && distance.is_some_and(|bytes| bytes < a.length().get()) {
            let (first, second) = (*first.min(second), *first.max(second));
            return Err(WireError::RegionsOverlap { first, second });
        }
    }
    Ok(())
}
