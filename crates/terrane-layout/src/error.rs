//! The one error type of this crate.

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
    #[error("{field} is not set; a layout needs it")]
    MissingField {
        /// The field.
        field: Field,
    },
    /// A field of the configuration has a value that no layout can have.
    #[error("{field} is {value}; it must be {}", range(*.least, *.largest))]
    FieldOutOfRange {
        /// The field.
        field: Field,
        /// Its value.
        value: u32,
        /// The least that it may be.
        least: u32,
        /// The most that it may be.
        largest: u32,
    },
    /// Groups of elements that share a scale do not fit evenly into a row.
    #[error(
        "inner_dim is {inner_dim}, no multiple of the {elements} elements that share a scale; \
         choose another format, or state the bytes of a row (ElementFormat::RowBytes)"
    )]
    InnerDimNotGrouped {
        /// Elements a row.
        inner_dim: u32,
        /// Elements a group.
        elements: u32,
    },
    /// The heads do not divide a row.
    #[error(
        "inner_dim is {inner_dim}, no multiple of the {num_heads} heads; it is heads · head dimension"
    )]
    HeadsNotDivided {
        /// Elements a row.
        inner_dim: u32,
        /// Heads.
        num_heads: u32,
    },
    /// The bytes of a head cannot be told from those of its neighbours.
    #[error(
        "with {num_heads} heads, {element} does not give each of them bytes of its own; \
         leave num_heads out, and pieces move whole"
    )]
    HeadNotWhole {
        /// Heads.
        num_heads: u32,
        /// How elements are stored.
        element: crate::ElementFormat,
    },
    /// Heads were to be told apart, and their number is not stated.
    #[error("num_heads is not set; a head-major layout, or one of other heads, needs it")]
    HeadsNotStated,
    /// A size does not fit in 64 bits.
    #[error(transparent)]
    Overflow(#[from] SizeOverflow),
    /// The layout is larger than any memory or file can be.
    #[error(
        "the layout takes {bytes}, and nothing can be larger than {LARGEST_LAYOUT}; \
         make a dimension or an alignment smaller"
    )]
    TooLarge {
        /// The bytes of all regions.
        bytes: ByteCount,
    },
    /// A region, or the base allocation, is larger than the limits allow.
    #[error(
        "{part} takes {bytes}, more than the largest region of {largest}; {}", smaller(*.part)
    )]
    RegionTooLarge {
        /// What is too large.
        part: Part,
        /// Its bytes.
        bytes: ByteCount,
        /// The largest that the allocator and the registrar take.
        largest: ByteCount,
    },
    /// An index of a piece is out of range.
    #[error(transparent)]
    IndexOutOfRange(#[from] IndexOutOfRange),
    /// The number of adopted regions is not that of the layout.
    #[error("the layout has {expected} regions, and {actual} were given; give one {role}")]
    RegionCount {
        /// The regions of the layout.
        expected: u32,
        /// The regions that were given.
        actual: usize,
        /// What a region is for.
        role: RegionRole,
    },
    /// A region, or the base allocation, has too few bytes.
    #[error(
        "{part} has {} bytes, and {} are needed; give a larger one, or use fewer blocks",
        .actual.get(), .needed.get()
    )]
    RegionTooSmall {
        /// What is too small.
        part: Part,
        /// The bytes that it needs.
        needed: ByteCount,
        /// The bytes that it has.
        actual: ByteCount,
    },
    /// A region, or the base allocation, does not begin where it must.
    #[error("{part} begins at {location}, no multiple of {needed}; align it")]
    RegionMisaligned {
        /// What is misaligned.
        part: Part,
        /// Where it begins.
        location: Location,
        /// What it must begin at a multiple of.
        needed: Alignment,
    },
    /// Adopted regions are not of one storage kind.
    #[error(
        "region {region} is {actual} memory and region 0 is {first}; a layout has one storage \
         kind, so give regions of one kind"
    )]
    MixedStorage {
        /// The first region that differs.
        region: u32,
        /// The kind of region 0.
        first: StorageKind,
        /// The kind of the region that differs.
        actual: StorageKind,
    },
    /// Two adopted regions share bytes.
    #[error("regions {first} and {second} overlap; give each its own bytes")]
    RegionsOverlap {
        /// One of them.
        first: u32,
        /// The other.
        second: u32,
    },
    /// An adopted region that should be registered with an agent is not.
    #[error(
        "region {region} is not registered with agent {agent}, but with {}; \
         register it there, or adopt it unregistered",
        names(.found)
    )]
    NotRegistered {
        /// The first such region.
        region: u32,
        /// The agent that should own its registration.
        agent: AgentName,
        /// The agents that hold one.
        found: Vec<AgentName>,
    },
    /// An adopted region is registered with the agent, but not all of its bytes.
    #[error(
        "region {region} lies outside what is registered with agent {agent}; register all of it"
    )]
    NotCovered {
        /// The first such region.
        region: u32,
        /// The agent.
        agent: AgentName,
    },
    /// Sections are not a geometry.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The layout has rows that are apart, where whole pieces were asked for.
    #[error(
        "the pieces of this layout are not contiguous or not alike; use its sections, or a layout \
         of a config"
    )]
    NoPieces,
    /// The layout does not hold what it claims.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// A model's configuration could not be read.
    #[cfg(feature = "model-config")]
    #[error(transparent)]
    Model(Box<crate::model::ModelError>),
    /// A region's location plus an offset leaves the address space, which
    /// [`Memory`]'s contract rules out.
    #[error(
        "{} bytes from the beginning of {part} is outside the address space; its memory breaks \
         the contract of Memory",
        .offset.get()
    )]
    AddressOverflow {
        /// The memory.
        part: Part,
        /// Bytes from its beginning.
        offset: ByteCount,
    },
    /// A view was out of the bounds of its region.
    #[error(transparent)]
    View(#[from] ViewOutOfBounds),
    /// The memory was refused.
    #[error("no memory for the layout; use fewer blocks, or see the cause for another remedy")]
    Allocate {
        /// What the allocator said.
        source: Box<AllocateError>,
    },
    /// The registration was refused, and what had been registered before it was undone.
    #[error("{part} could not be registered; see the cause, or register only if it is supported")]
    Register {
        /// What was to be registered.
        part: Part,
        /// What the registrar said.
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
    /// Whether `memory`, which is this part, is large enough and begins where it must.
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

/// What each region of a layout is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionRole {
    /// One region holds all layers.
    AllLayers,
    /// One region holds one layer.
    Layer,
    /// Regions are numbered by the sections of the layout.
    Region,
}

impl fmt::Display for RegionRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AllLayers => "for all layers",
            Self::Layer => "for each layer",
            Self::Region => "for each region that the sections name",
        })
    }
}

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
        return "nobody".to_owned();
    }
    agents.iter().map(AgentName::as_str).collect::<Vec<_>>().join(", ")
}
