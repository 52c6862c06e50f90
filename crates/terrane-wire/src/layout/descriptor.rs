//! The description of a layout: its geometry, its regions, and their owner.

use terrane_core::convert::to_u64;
use terrane_core::{AgentName, RemoteSpace, StorageKind};
use terrane_layout::{Geometry, LayoutFingerprint};

use super::encoding::{read_layout, write_layout};
use crate::difference::{GeometryMismatch, first_difference, first_shape_difference};
use crate::error::{Part, WireError};
use crate::frame::input::{check_canonical, check_name, check_set};
use crate::frame::{self, Content};
use crate::limits::WireLimits;
use crate::region::descriptor::RegionDescriptor;

/// A layout in an agent's memory, as the agent's process describes it to others.
///
/// Every value of this type has been checked, whether it was created or decoded:
/// - the strides are proved, and the fingerprint matches them;
/// - the number and lengths of the regions match the geometry;
/// - the regions are aligned to blocks, within their address space, of one storage kind, and
///   disjoint.
///
/// The importing agent must check that the memory exists and that the metadata gives access to it.
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
    /// Describes a layout of `geometry` in memory of kind `storage`, in `regions` of `agent`. Other
    /// agents reach the regions with `metadata`, which this crate does not parse.
    ///
    /// # Errors
    ///
    /// [`WireError`] names the invalid part.
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

    /// The kind of memory of the regions in the owner's process.
    #[must_use]
    pub const fn storage(&self) -> StorageKind {
        self.storage
    }

    /// The agent that registered the regions.
    #[must_use]
    pub const fn agent(&self) -> &AgentName {
        &self.agent
    }

    /// The metadata by which other agents reach the regions. Decoding checks only its length.
    #[must_use]
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// The regions, in the order of the geometry.
    #[must_use]
    pub fn regions(&self) -> &[RegionDescriptor] {
        &self.regions
    }

    /// Encodes the description in a frame of version 2, with a checksum.
    ///
    /// # Errors
    ///
    /// [`WireError::OverLimit`] if the encoding exceeds 4 GiB.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        frame::seal(Content::Layout, |frame| write_layout(self, frame))
    }

    /// Decodes bytes that [`encode`](Self::encode) returned; refuses all others.
    ///
    /// No byte is trusted. No memory is allocated for items that exceed `limits` or the input.
    /// Strides must pass the proof of
    /// [`Geometry::from_sections_in`](terrane_layout::Geometry::from_sections_in).
    ///
    /// # Errors
    ///
    /// [`WireError`] names the first error in the bytes; [`WireError::Version1`] for version 1.
    pub fn decode(bytes: &[u8], limits: &WireLimits) -> Result<Self, WireError> {
        let payload = frame::open(Content::Layout, bytes, limits)?;
        let layout = read_layout(&payload, limits)?;
        check_canonical(bytes, &layout.encode()?)?;
        Ok(layout)
    }

    /// Checks that each element has the same position as in `geometry`. Sections, strides and regions
    /// are then equal, and so is the [fingerprint](Self::fingerprint).
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] with the first difference and both values.
    pub fn expect(&self, geometry: &Geometry) -> Result<(), GeometryMismatch> {
        GeometryMismatch::unless_none(first_difference(geometry, &self.geometry))
    }

    /// Checks that whole blocks can be copied between the layout and one of `geometry`, whatever their
    /// strides are. A transfer makes the same check of its two ends.
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] with the first difference and both values.
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
        let actual = to_u64(regions.len());
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

/// Checks that no two regions overlap. In address order, a region can overlap only the next one.
fn check_disjoint(regions: &[RegionDescriptor]) -> Result<(), WireError> {
    let mut order: Vec<(u32, &RegionDescriptor)> = (0_u32..).zip(regions).collect();
    order.sort_by_key(|(_, region)| (region.space(), region.address()));
    for pair in order.windows(2) {
        let [(first, a), (second, b)] = pair else { continue };
        // In one space, the second region does not begin earlier, and neither exceeds the space.
        let distance = b.address().checked_sub(a.address());
        if a.space() == b.space() && distance.is_some_and(|bytes| bytes < a.length().get()) {
            let (first, second) = (*first.min(second), *first.max(second));
            return Err(WireError::RegionsOverlap { first, second });
        }
    }
    Ok(())
}
