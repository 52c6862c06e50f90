//! A layout over memory: (block, layer, section) to address.

use std::sync::Arc;

use terrane_core::convert::to_usize;
use terrane_core::{
    AgentName, Alignment, ByteCount, CapabilityReport, DeviceAddress, DeviceId, FilePosition,
    HostAddress, Location, Memory, Region, RegistrationRecord, Span, StorageKind,
};

use crate::error::{LayoutError, Part};
use crate::geometry::{Geometry, RegionOffset};
use crate::plan::{LayoutPlan, PaddingReport};

/// KV blocks in memory: a geometry, and its regions.
///
/// It keeps its memory alive and computes the location of every piece. It never accesses a byte. It
/// is not `Clone`, so that one owner tracks the reads and writes of its blocks.
#[derive(Debug)]
pub struct PhysicalLayout {
    geometry: Geometry,
    regions: Box<[Region]>,
    bases: Bases,
    storage_kind: StorageKind,
    registration: RegistrationState,
    padding: PaddingReport,
}

impl PhysicalLayout {
    /// Combines the parts that the builder has checked: one or more regions, all of one kind, each
    /// large enough.
    pub(crate) fn new(
        plan: &LayoutPlan,
        regions: Vec<Region>,
        storage_kind: StorageKind,
        registration: RegistrationState,
        padding: PaddingReport,
    ) -> Self {
        let bases = Bases::of(&regions);
        Self {
            geometry: plan.geometry().clone(),
            regions: regions.into_boxed_slice(),
            bases,
            storage_kind,
            registration,
            padding,
        }
    }

    /// The strides.
    #[inline]
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The regions, in the order of the geometry. Their starts and [`Geometry::offset`] are enough
    /// to plan many spans.
    #[inline]
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    terrane_core::getters! {
        /// The storage kind of every region.
        storage_kind: StorageKind,
        /// The size of the padding. For adopted regions, region padding includes all bytes that the
        /// geometry does not need.
        padding: PaddingReport,
    }

    /// The location of the rows of (`block`, `layer`, `section`).
    ///
    /// # Errors
    ///
    /// [`LayoutError::IndexOutOfRange`] names the index, its value and its bound.
    #[inline]
    pub fn location(&self, block: u32, layer: u32, section: u32) -> Result<Location, LayoutError> {
        let at = self.geometry.try_offset(block, layer, section)?;
        self.location_at(at).ok_or_else(|| overflow(at))
    }

    /// The location of a position in the regions; `None` if it does not exist.
    #[inline]
    #[must_use]
    pub fn location_at(&self, at: RegionOffset) -> Option<Location> {
        self.bases.location(at.region, ByteCount::new(at.offset))
    }

    /// The piece of (`block`, `layer`, `section`) as a span.
    ///
    /// # Errors
    ///
    /// [`LayoutError::IndexOutOfRange`] names the index, its value and its bound.
    /// [`LayoutError::NoPieces`] if the layout's pieces are not contiguous.
    #[inline]
    pub fn span(&self, block: u32, layer: u32, section: u32) -> Result<Span, LayoutError> {
        let location = self.location(block, layer, section)?;
        let pieces = self.geometry.pieces().ok_or(LayoutError::NoPieces)?;
        Ok(Span { kind: self.storage_kind, location, length: pieces.piece_bytes() })
    }

    /// The host address of the rows of (`block`, `layer`, `section`), in about a nanosecond.
    /// `None` if an index is out of range, or the layout is not in host memory.
    #[inline]
    #[must_use]
    pub fn host_address(&self, block: u32, layer: u32, section: u32) -> Option<HostAddress> {
        let Bases::Host(bases) = &self.bases else { return None };
        let at = self.geometry.try_offset(block, layer, section).ok()?;
        bases.get(to_usize(at.region.into()))?.checked_add(ByteCount::new(at.offset))
    }

    /// The device address of the rows of (`block`, `layer`, `section`), in about a nanosecond.
    /// `None` if an index is out of range, or the layout is not in device memory. For host memory,
    /// see the region's [alias](Memory::device_alias).
    #[inline]
    #[must_use]
    pub fn device_address(&self, block: u32, layer: u32, section: u32) -> Option<DeviceAddress> {
        let Bases::Device(_, bases) = &self.bases else { return None };
        let at = self.geometry.try_offset(block, layer, section).ok()?;
        bases.get(to_usize(at.region.into()))?.checked_add(ByteCount::new(at.offset))
    }

    /// The file position of the rows of (`block`, `layer`, `section`). `None` if an index is out
    /// of range, or the layout is not on disk.
    #[inline]
    #[must_use]
    pub fn file_position(&self, block: u32, layer: u32, section: u32) -> Option<FilePosition> {
        let Bases::File(bases) = &self.bases else { return None };
        let at = self.geometry.try_offset(block, layer, section).ok()?;
        bases.get(to_usize(at.region.into()))?.checked_add(ByteCount::new(at.offset))
    }

    /// The largest power of two that divides the start and the length of every contiguous stretch
    /// at its actual location.
    #[must_use]
    pub fn alignment_class(&self) -> Alignment {
        self.regions
            .iter()
            .map(|region| region.location().alignment())
            .fold(self.geometry.alignment_class(), Ord::min)
    }

    /// The outcome of the registration policy.
    #[must_use]
    pub const fn registration_state(&self) -> &RegistrationState {
        &self.registration
    }

    /// Every active registration, with the regions that it covers: one for the base allocation, or
    /// at least one for each adopted region.
    #[must_use]
    pub fn registrations(&self) -> Vec<RegionRegistration> {
        let mut registrations: Vec<RegionRegistration> = Vec::new();
        let numbered: Vec<(u32, &Region)> = (0_u32..).zip(&self.regions).collect();
        for same in numbered.chunk_by(|(_, one), (_, next)| one.same_memory(next)) {
            let [(first_region, region), ..] = *same else { continue };
            let last_region = same.last().map_or(first_region, |(number, _)| *number);
            region.visit_registrations(&mut |record| {
                let record = record.clone();
                registrations.push(RegionRegistration { first_region, last_region, record });
            });
        }
        registrations
    }

    /// The requested and granted capabilities of the memory. If adopted regions are in several
    /// memories, duplicate entries are removed.
    #[must_use]
    pub fn capabilities(&self) -> CapabilityReport {
        let mut report = CapabilityReport::default();
        let distinct = self.regions.chunk_by(Region::same_memory).filter_map(|same| same.first());
        for region in distinct {
            for outcome in region.capabilities().outcomes() {
                if !report.outcomes().contains(outcome) {
                    report.extend([outcome.clone()]);
                }
            }
        }
        report
    }

    /// Returns the regions with their registrations.
    #[must_use]
    pub fn into_regions(self) -> Vec<Region> {
        self.regions.into_vec()
    }
}

/// The outcome of a layout's registration policy.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RegistrationState {
    /// The caller chose to register nothing.
    Unregistered,
    /// The builder registered the memory. It stays registered while it lives.
    Registered {
        /// The agent that owns the registration.
        agent: AgentName,
    },
    /// The memory was registered when it was adopted.
    Adopted {
        /// The agent that owns the registration.
        agent: AgentName,
    },
    /// Registration was requested if supported, and was refused.
    Refused {
        /// The agent that refused, or whose limits the layout does not meet.
        agent: AgentName,
        /// The reason.
        cause: Arc<LayoutError>,
    },
}

impl RegistrationState {
    /// The agent with which all memory is registered, if any.
    #[must_use]
    pub const fn agent(&self) -> Option<&AgentName> {
        match self {
            Self::Registered { agent } | Self::Adopted { agent } => Some(agent),
            Self::Unregistered | Self::Refused { .. } => None,
        }
    }
}

/// One registration, and the regions in its memory.
#[derive(Clone, Debug)]
pub struct RegionRegistration {
    /// The first of the regions.
    pub first_region: u32,
    /// The last of the regions.
    pub last_region: u32,
    /// The registered bytes and the agent.
    pub record: RegistrationRecord,
}

/// The builder checked that every region ends within its address space. So this error means that
/// the memory breaks its contract.
#[cold]
fn overflow(at: RegionOffset) -> LayoutError {
    LayoutError::AddressOverflow {
        part: Part::Region(at.region),
        offset: ByteCount::new(at.offset),
    }
}

/// The starts of the regions, by their kind of address. A look-up reads nothing else.
#[derive(Debug)]
enum Bases {
    Host(Box<[HostAddress]>),
    Device(DeviceId, Box<[DeviceAddress]>),
    File(Box<[FilePosition]>),
    /// Several kinds, or a kind that this crate does not know.
    Other(Box<[Location]>),
}

impl Bases {
    fn of(regions: &[Region]) -> Self {
        let locations: Box<[Location]> = regions.iter().map(Memory::location).collect();
        let host = locations.iter().map(|location| location.as_host()).collect();
        let file = locations.iter().map(|location| location.as_file()).collect();
        match (host, file, locations.first()) {
            (Some(bases), _, _) => Self::Host(bases),
            (_, Some(bases), _) => Self::File(bases),
            (_, _, Some(&Location::Device { device: first, .. })) => locations
                .iter()
                .map(|location| match location {
                    Location::Device { device, address } if *device == first => Some(*address),
                    _ => None,
                })
                .collect::<Option<_>>()
                .map_or_else(|| Self::Other(locations.clone()), |bases| Self::Device(first, bases)),
            _ => Self::Other(locations),
        }
    }

    #[inline]
    fn location(&self, region: u32, offset: ByteCount) -> Option<Location> {
        let region = to_usize(region.into());
        match self {
            Self::Host(bases) => bases.get(region)?.checked_add(offset).map(Location::Host),
            Self::Device(device, bases) => {
                let address = bases.get(region)?.checked_add(offset)?;
                Some(Location::Device { device: *device, address })
            }
            Self::File(bases) => bases.get(region)?.checked_add(offset).map(Location::File),
            Self::Other(bases) => bases.get(region)?.checked_add(offset),
        }
    }
}
