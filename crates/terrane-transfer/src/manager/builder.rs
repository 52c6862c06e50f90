//! The builder of a manager.

use std::sync::Arc;
use std::time::Duration;

use crate::completion::waiter_progress::DEFAULT_SPIN;
use crate::engine::CopyEngine;
use crate::engines::{DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions};
use crate::error::TransferError;
use crate::manager::TransferManager;

/// Builds a [`TransferManager`] from engines; from [`TransferManager::builder`].
///
/// [`host`](Self::host) and [`disk`](Self::disk) start the threads of their engines before `build`.
/// So do the methods that other crates add. Dropping the builder ends the threads.
///
/// ```
/// use terrane_transfer::TransferManager;
/// use terrane_transfer::engines::{HostEngine, HostEngineOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let manager = TransferManager::builder()
///     .engine(HostEngine::new(HostEngineOptions::default())?)
///     .disk()?
///     .build();
/// assert_eq!(manager.engines().len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct TransferManagerBuilder {
    engines: Vec<Arc<dyn CopyEngine>>,
    spin: Duration,
}

impl TransferManager {
    /// A builder without engines.
    pub fn builder() -> TransferManagerBuilder {
        TransferManagerBuilder { engines: Vec::new(), spin: DEFAULT_SPIN }
    }
}

impl TransferManagerBuilder {
    /// Adds an engine. If several predict the same time for a transfer, the first is chosen.
    pub fn engine(self, engine: impl CopyEngine + 'static) -> Self {
        self.engines([Arc::new(engine) as _])
    }

    /// Adds engines that are already shared, such as those of `terrane_cuda::engines`.
    pub fn engines(mut self, engines: impl IntoIterator<Item = Arc<dyn CopyEngine>>) -> Self {
        self.engines.extend(engines);
        self
    }

    /// Adds the engine that copies within host memory, with its default options.
    ///
    /// # Errors
    ///
    /// [`TransferError::EngineNotStarted`] if its threads cannot be started.
    pub fn host(self) -> Result<Self, TransferError> {
        let engine = HostEngine::new(HostEngineOptions::default());
        Ok(self.engine(engine.map_err(|source| TransferError::not_started("host", source))?))
    }

    /// Adds the engine that copies between host memory and files, with its default options.
    ///
    /// # Errors
    ///
    /// [`TransferError::EngineNotStarted`] if a thread cannot be started or the I/O queue cannot be
    /// created.
    pub fn disk(self) -> Result<Self, TransferError> {
        let engine = DiskEngine::new(&DiskEngineOptions::default());
        Ok(self.engine(engine.map_err(|source| TransferError::not_started("disk", source))?))
    }

    /// Sets the time for which waiting threads poll an engine before they sleep; see
    /// [`TransferManager::with_spin`].
    pub fn spin(self, spin: Duration) -> Self {
        Self { spin, ..self }
    }

    /// Builds the manager.
    #[must_use]
    pub fn build(self) -> TransferManager {
        TransferManager::new(self.engines).with_spin(self.spin)
    }
}
