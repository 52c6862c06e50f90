//! The states of a [`LayoutBuilder`](crate::LayoutBuilder). Each contains the earlier choices.

use std::fmt;

use terrane_core::{AgentName, Region, Register};

use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::Geometry;
use crate::kind::LayoutKind;

/// An existing geometry, or a config whose geometry `build` computes.
#[derive(Clone, Debug)]
pub(crate) enum Planning {
    Config(LayoutConfig, LayoutKind),
    Geometry(Geometry),
}

impl Planning {
    pub(crate) fn geometry(self) -> Result<Geometry, LayoutError> {
        match self {
            Self::Config(config, kind) => Geometry::new(&config, kind),
            Self::Geometry(geometry) => Ok(geometry),
        }
    }
}

/// The config is known; the kind is the next choice.
#[derive(Debug)]
pub struct NeedsKind(pub(crate) LayoutConfig);

/// The kind is known; the memory is the next choice.
#[derive(Debug)]
pub struct NeedsMemory {
    pub(crate) geometry: Planning,
}

/// The memory is known; its registration is the next choice.
#[derive(Debug)]
pub struct NeedsRegistration<M> {
    pub(crate) geometry: Planning,
    pub(crate) memory: M,
}

/// All choices are known.
#[derive(Debug)]
pub struct Ready<'r, M> {
    pub(crate) geometry: Planning,
    pub(crate) memory: M,
    pub(crate) policy: Policy<'r>,
}

/// Memory that is not allocated yet.
pub struct FromAllocator<'a, A>(pub(crate) &'a A);

impl<A> fmt::Debug for FromAllocator<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FromAllocator").finish_non_exhaustive()
    }
}

/// The caller's regions.
#[derive(Debug)]
pub struct Adopted {
    pub(crate) regions: Vec<Region>,
}

/// The caller's regions, registered by the caller.
#[derive(Debug)]
pub struct AdoptedRegistered {
    pub(crate) regions: Vec<Region>,
    pub(crate) agent: AgentName,
}

/// The registration policy.
#[derive(Clone, Copy)]
pub(crate) enum Policy<'r> {
    Unregistered,
    Required(&'r dyn Register),
    IfSupported(&'r dyn Register),
}

impl fmt::Debug for Policy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unregistered => f.write_str("Unregistered"),
            Self::Required(with) => f.debug_tuple("Required").field(with.agent()).finish(),
            Self::IfSupported(with) => f.debug_tuple("IfSupported").field(with.agent()).finish(),
        }
    }
}
