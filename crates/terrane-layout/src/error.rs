//! The error type of this crate.

use std::fmt;

use terrane_core::{
    AgentName, Alignment, AllocateError, ByteCount, Location, Memory, RegisterError, SizeOverflow,
    StorageKind, ViewOutOfBounds,
};

use crate::config::field::{Field, LARGEST_LAYOUT};
use crate::geometry::{GeometryError, IndexOutOfRange};
use crate::verify::Violation;

/// Why a layout could not be described, planned, built or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field of the configuration was not set.
    #[error("{field} is not set; set it on the builder")]
    MissingField {
        /// The field.
        field: Field,
    },
    /// A field of the configuration is out of range.
    #[error("{field} is {value}; it must be {}", range(*.least, *.largest))]
    FieldOutOfRange {
        /// The field.
        field: Field,
        /// Its value.
        value: u32,
        /// The smallest valid value.
        least: u32,
        /// The largest valid value.
        largest: u32,
    },
    /// A row is not a multiple of the groups of elements that share a scale.
    #[error(
        "inner_dim is {inner_dim}, which is not a multiple of the {elements} elements that share a \
         scale; choose another format, or state the bytes of a row (ElementFormat::RowBytes)"
    )]
    InnerDimNotGrouped {
        /// Elements per row.
        inner_dim: u32,
        /// Elements per group.
        elements: u32,
    },
    /// The heads do not divide the row.
    #[error(
        "inner_dim is {inner_dim}, which is not a multiple of the {num_heads} heads; it must be \
         heads · head dimension"
    )]
    HeadsNotDivided {
        /// Elements per row.
        inner_dim: u32,
        /// Heads.
        num_heads: u32,
    },
    /// A head is not a whole number of bytes.
    #[error(
        "with {num_heads} heads, a row of {element} does not give each head whole bytes; leave \
         num_heads unset, and pieces are moved whole"
    )]
    HeadNotWhole {
        /// Heads.
        num_heads: u32,
        /// The element format.
        element: crate::ElementFormat,
    },
    /// An operation on heads needs their number.
    #[error(
        "num_heads is not set; head-major layouts, and layouts with another number of heads, need \
         it"
    )]
    HeadsNotStated,
    /// A size does not fit in 64 bits.
    #[error(transparent)]
    Overflow(#[from] SizeOverflow),
    /// The layout exceeds [`LARGEST_LAYOUT`].
    #[error(
        "the layout takes {bytes}, and the maximum is {LARGEST_LAYOUT}; make a dimension or an \
         alignment smaller"
    )]
    TooLarge {
        /// The bytes of all regions.
        bytes: ByteCount,
    },
    /// A region, or the base allocation, exceeds the limits.
    #[error(
        "{part} takes {bytes}, and the largest region has {largest}; {}", smaller(*.part)
    )]
    RegionTooLarge {
        /// The part that is too large.
        part: Part,
        /// Its bytes.
        bytes: ByteCount,
        /// The largest region that the allocator and the registrar accept.
        largest: ByteCount,
    },
    /// An index of a piece is out of range.
    #[error(transparent)]
    IndexOutOfRange(#[from] IndexOutOfRange),
    /// The number of adopted regions does not match the layout.
    #[error("the layout has {expected} regions, and {actual} were passed; pass one {role}")]
    RegionCount {
        /// The number of regions of the layout.
        expected: u32,
        /// The number of regions that were passed.
        actual: usize,
        /// The content of a region.
        role: RegionRole,
    },
    /// A region, or the base allocation, is too small.
    #[error(
        "{part} has {} bytes, and {} are needed; give a larger one, or use fewer blocks",
        .actual.get(), .needed.get()
    )]
    RegionTooSmall {
        /// The part that is too small.
        part: Part,
        /// The bytes that it needs.
        needed: ByteCount,
        /// The bytes that it has.
        actual: ByteCount,
    },
    /// A region, or the base allocation, is misaligned.
    #[error("{part} begins at {location}, and needs an alignment of {needed}; align it")]
    RegionMisaligned {
        /// The misaligned part.
        part: Part,
        /// Its start.
        location: Location,
        /// The required alignment.
        needed: Alignment,
    },
    /// Adopted regions have different storage kinds.
    #[error(
        "region {region} is {actual} memory, and region 0 is {first} memory; a layout has one \
         storage kind, so give regions of one kind"
    )]
    MixedStorage {
        /// The first region that differs.
        region: u32,
        /// The kind of region 0.
        first: StorageKind,
        /// The kind of the region that differs.
        actual: StorageKind,
    },
    /// Two adopted regions overlap.
    #[error("regions {first} and {second} overlap; give each its own bytes")]
    RegionsOverlap {
        /// One of them.
        first: u32,
        /// The other.
        second: u32,
    },
    /// An adopted region is not registered with the required agent.
    #[error(
        "region {region} is not registered with agent {agent}, but with {}; register it with that \
         agent, or adopt it unregistered",
        names(.found)
    )]
    NotRegistered {
        /// The first such region.
        region: u32,
        /// The agent that should own its registration.
        agent: AgentName,
        /// The agents with which it is registered.
        found: Vec<AgentName>,
    },
    /// An adopted region is only partly registered with the agent.
    #[error("region {region} extends past its registration with agent {agent}; register all of it")]
    NotCovered {
        /// The first such region.
        region: u32,
        /// The agent.
        agent: AgentName,
    },
    /// The sections do not form a geometry.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Whole pieces were requested, and the layout's rows are apart.
    #[error(
        "the pieces of this layout are not contiguous, or differ in size; use its sections, or a \
         layout made from a config"
    )]
    NoPieces,
    /// The layout violates its guarantees.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// A model's configuration could not be read.
    #[cfg(feature = "model-config")]
    #[error(transparent)]
    Model(Box<crate::model::ModelError>),
    /// A region's location plus an offset exceeds the address space, which the contract of
    /// [`Memory`] excludes.
    #[error(
        "{} bytes from the start of {part} is outside the address space; its memory breaks the \
         contract of Memory",
        .offset.get()
    )]
    AddressOverflow {
        /// The memory.
        part: Part,
        /// Bytes from its start.
        offset: ByteCount,
    },
    /// A view exceeds its region.
    #[error(transparent)]
    View(#[from] ViewOutOfBounds),
    /// The allocator refused.
    #[error(
        "the memory for the layout could not be allocated; use fewer blocks, or follow the cause"
    )]
    Allocate {
        /// The allocator's error.
        source: Box<AllocateError>,
    },
    /// The registrar refused. Earlier registrations were undone.
    #[error("{part} could not be registered; see the cause, or use register_if_supported")]
    Register {
        /// The part to register.
        part: Part,
        /// The registrar's error.
        source: Box<RegisterError>,
    },
}

#[cfg(feature = "model-config")]
impl From<crate::model::ModelError> for LayoutError {
    fn from(error: crate::model::ModelError) -> Self {
        Self::Model(Box::new(error))
    }
}

/// The memory that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The base allocation, from which the regions are cut.
    Base,
    /// A region, counted from 0.
    Region(u32),
}

impl Part {
    /// Checks that `memory` is large enough for this part and aligned.
    pub(crate) fn check(
        self,
        memory: &dyn Memory,
        needed: ByteCount,
        alignment: Alignment,
    ) -> Result<(), LayoutError> {
        let (actual, location) = (memory.length(), memory.location());
        if actual < needed {
            return Err(LayoutError::RegionTooSmall { part: self, needed, actual });
        }
        if location.alignment() < alignment {
            return Err(LayoutError::RegionMisaligned { part: self, location, needed: alignment });
        }
        match location.checked_add(actual) {
            Some(_) => Ok(()),
            None => Err(LayoutError::AddressOverflow { part: self, offset: actual }),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base => f.pad("the base allocation"),
            Self::Region(region) => write!(f, "region {region}"),
        }
    }
}

/// The content of each region of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionRole {
    /// One region holds all layers.
    AllLayers,
    /// One region holds one layer.
    Layer,
    /// Regions are numbered by the sections of the layout.
    Region,
}

terrane_core::display_names!(RegionRole {
    Self::AllLayers => "for all layers",
    Self::Layer => "for each layer",
    Self::Region => "for each region that the sections name",
});

fn smaller(part: Part) -> &'static str {
    match part {
        Part::Base => {
            "use fewer blocks, or allocate its regions one by one (LayoutPlan::requests) and adopt \
             them"
        }
        Part::Region(_) => "use fewer blocks, or a region a layer",
    }
}

fn range(least: u32, largest: u32) -> String {
    if largest == u32::MAX { format!("{least} or more") } else { format!("{least} to {largest}") }
}

fn names(agents: &[AgentName]) -> String {
    if agents.is_empty() {
        return "no agent".to_owned();
    }
    agents.iter().map(AgentName::as_str).collect::<Vec<_>>().join(", ")
}
