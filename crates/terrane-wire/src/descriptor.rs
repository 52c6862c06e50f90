//! The description of a layout: what it is, where its regions are, and whose.

use terrane_core::{AgentName, ByteCount, RemoteSpace, StorageKind};
use terrane_layout::{Fingerprint, Geometry, LayoutConfig, LayoutKind};

use crate::frame::{self, Content};
use crate::{
    GeometryMismatch, Part, RegionDescriptor, WireError, WireLimits, first_difference,
    first_shape_difference, v1,
};

/// A layout in an agent's memory, as the agent's process describes it to others.
///
/// Every value of this type has been checked, whether it was made here or came over the wire: the
/// geometry exists, its fingerprint is right, and there are as many regions as it has, each as long
/// as it says, aligned to blocks, within its address space, of one storage kind, and disjoint. What
/// cannot be checked here is whether the memory is there, and whether the metadata speaks of it:
/// that is for the agent that takes it.
///
/// Two descriptions of one layout are equal, and so are their [encodings](Self::encode).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutDescriptor {
    config: LayoutConfig,
    kind: LayoutKind,
    fingerprint: Fingerprint,
    storage: StorageKind,
    agent: AgentName,
    metadata: Vec<u8>,
    regions: Vec<RegionDescriptor>,
}

impl LayoutDescriptor {
    /// Describes a layout of `config` in the order `kind`, in memory of kind `storage`, at `regions`
    /// of `agent`. The `metadata` is what the agent tells other agents so that they can reach the
    /// regions; nothing here looks into it.
    ///
    /// # Errors
    ///
    /// [`WireError`] says which of the parts does not fit.
    pub fn new(
        config: LayoutConfig,
        kind: LayoutKind,
        storage: StorageKind,
        agent: AgentName,
        metadata: Vec<u8>,
        regions: Vec<RegionDescriptor>,
    ) -> Result<Self, WireError> {
        let geometry = Geometry::new(&config, kind)?;
        v1::check_name(Part::Agent, agent.as_str())?;
        check_regions(&geometry, storage, &regions)?;
        let fingerprint = Fingerprint::new(&config, kind)?;
        Ok(Self { config, kind, fingerprint, storage, agent, metadata, regions })
    }

    /// The dimensions.
    #[must_use]
    pub const fn config(&self) -> &LayoutConfig {
        &self.config
    }

    /// The order in which they are laid out.
    #[must_use]
    pub const fn kind(&self) -> LayoutKind {
        self.kind
    }

    /// The name of config and kind.
    #[must_use]
    pub const fn fingerprint(&self) -> Fingerprint {
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

    /// The regions, one or one a layer.
    #[must_use]
    pub fn regions(&self) -> &[RegionDescriptor] {
        &self.regions
    }

    /// The bytes that travel: framed, of version 1, with a checksum.
    ///
    /// # Errors
    ///
    /// [`WireError::OverLimit`] past 4 GiB.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        frame::seal(Content::Layout, |frame| v1::write_layout(self, frame))
    }

    /// Reads what [`encode`](Self::encode) wrote, and nothing else.
    ///
    /// No byte is believed: memory is spent on nothing that exceeds `limits` or that the input is
    /// too short for, and whatever can be computed is computed and compared.
    ///
    /// # Errors
    ///
    /// [`WireError`] says what of the bytes is wrong.
    pub fn decode(bytes: &[u8], limits: &WireLimits) -> Result<Self, WireError> {
        let opened = frame::open(Content::Layout, bytes, limits)?;
        let layout = v1::read_layout(&opened, limits)?;
        v1::check_canonical(bytes, &layout.encode()?)?;
        Ok(layout)
    }

    /// Whether the layout is laid out exactly as one of `config` in the order `kind`: every field,
    /// and so every offset and the [fingerprint](Self::fingerprint).
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] names the first field that differs, and both values.
    pub fn expect(&self, config: &LayoutConfig, kind: LayoutKind) -> Result<(), GeometryMismatch> {
        GeometryMismatch::unless_none(first_difference((config, kind), (&self.config, self.kind)))
    }

    /// Whether whole blocks can be moved between the layout and one of `config`, in whatever order
    /// either is laid out: what a transfer asks of its two ends, asked before there is one.
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] names the first field that differs, and both values.
    pub fn expect_shape(&self, config: &LayoutConfig) -> Result<(), GeometryMismatch> {
        GeometryMismatch::unless_none(first_shape_difference(config, &self.config))
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
        return Err(WireError::RegionCount { expected, actual });
    }
    let (length, alignment) = (geometry.region_bytes(), geometry.block_alignment().get());
    for (number, region) in (0_u32..).zip(regions) {
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
        v1::check_set(number, region.backends())?;
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
