//! Adds NIXL to the builder of a transfer manager.

use terrane_transfer::TransferManagerBuilder;

use super::NixlEngine;
use super::options::NixlEngineOptions;
use crate::agent::Agent;
use crate::error::NixlError;

/// Adds a [`NixlEngine`] to a [`TransferManagerBuilder`].
///
/// ```no_run
/// use terrane_nixl::{AddNixl, AgentBuilder, BackendConfig};
/// use terrane_transfer::TransferManager;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let agent = AgentBuilder::unnamed().backend(BackendConfig::new("UCX")).build()?;
/// let manager = TransferManager::builder().disk()?.nixl(&agent)?.build();
/// # Ok(())
/// # }
/// ```
pub trait AddNixl: Sized {
    /// Adds an engine for this agent, with its default options. For other options, pass a
    /// [`NixlEngine`] to [`engine`](TransferManagerBuilder::engine).
    ///
    /// # Errors
    ///
    /// As for [`NixlEngine::new`].
    fn nixl(self, agent: &Agent) -> Result<Self, NixlError>;
}

impl AddNixl for TransferManagerBuilder {
    fn nixl(self, agent: &Agent) -> Result<Self, NixlError> {
        Ok(self.engine(NixlEngine::new(agent, NixlEngineOptions::default())?))
    }
}
