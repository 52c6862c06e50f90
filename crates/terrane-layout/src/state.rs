//! The states of a [`LayoutBuilder`](crate::LayoutBuilder). Each contains the earlier choices.

use std::fmt;

use terrane_core::{Region, Register};

use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::Geometry;
use crate::physical::RegistrationState;

/// The config is known; the kind is the next choice.
#[derive(Debug)]
pub struct NeedsKind(pub(crate) LayoutConfig);

/// The kind is known; the memory is the next choice.
#[derive(Debug)]
pub struct NeedsMemory {
    pub(crate) geometry: Result<Geometry, LayoutError>,
}

/// The memory is known; its registration is the next choice.
#[derive(Debug)]
pub struct NeedsRegistration<M> {
    pub(crate) geometry: Result<Geometry, LayoutError>,
    pub(crate) memory: M,
}

/// All choices are known.
#[derive(Debug)]
pub struct Ready<'r, M> {
    pub(crate) geometry: Result<Geometry, LayoutError>,
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

/// The registration policy: the state of the layout, or a registrar that `build` asks.
pub(crate) enum Policy<'r> {
    Settled(RegistrationState),
    Register { registrar: &'r dyn Register, required: bool },
}

impl fmt::Debug for Policy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Settled(state) => state.fmt(f),
            Self::Register { registrar, required } => f
                .debug_struct("Register")
                .field("agent", registrar.agent())
                .field("required", required)
                .finish(),
        }
    }
}
