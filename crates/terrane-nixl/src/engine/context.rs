//! The data that an engine shares with its transfers.

use std::sync::Arc;

use super::descriptors::prepared::PreparedLists;
use super::options::NixlEngineOptions;
use super::route::rates::Rates;
use crate::agent::Agent;

/// The data needed to advance any transfer of an engine.
pub(super) struct EngineContext {
    pub(super) agent: Agent,
    pub(super) options: Arc<NixlEngineOptions>,
    pub(super) rates: Rates,
    pub(super) prepared: Arc<PreparedLists>,
}
