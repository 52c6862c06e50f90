//! The engines of a machine with devices, combined.

use std::sync::Arc;

use terrane_core::BoxedCause;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{CopyEngine, TransferError, TransferManagerBuilder};

use crate::engine::DeviceEngine;
use crate::engine::options::DeviceEngineOptions;
use crate::memory::pinned::PinnedAllocator;
use crate::memory::pinned::options::PinnedOptions;
use crate::runtime::context::Context;

/// The options of [`engines`].
#[derive(Clone, Debug, Default)]
pub struct EnginesOptions {
    /// Options of the engine of each device.
    pub device: DeviceEngineOptions,
    /// Options of the engine between all kinds of host memory.
    pub host: HostEngineOptions,
    /// Options of the engine between host memory and files.
    pub disk: DiskEngineOptions,
    /// Options of each device's two relays: the size and number of their pinned slots.
    pub relay: RelayOptions,
    /// Options of the relays' pinned memory.
    pub pinned: PinnedOptions,
}

/// Adds devices to the builder of a manager.
pub trait WithDevices: Sized {
    /// Adds the [`engines`] of these devices with their default options. They include the engines
    /// of host memory and of files, so `host` and `disk` of the builder are not called as well.
    ///
    /// ```no_run
    /// use terrane_core::DeviceId;
    /// use terrane_cuda::{Context, WithDevices};
    /// use terrane_transfer::TransferManager;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let context = Context::primary(DeviceId::new(0))?;
    /// let manager = TransferManager::builder().devices([&context])?.build();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`engines`].
    fn devices<'a>(
        self,
        contexts: impl IntoIterator<Item = &'a Context>,
    ) -> Result<Self, TransferError>;
}

impl WithDevices for TransferManagerBuilder {
    fn devices<'a>(
        self,
        contexts: impl IntoIterator<Item = &'a Context>,
    ) -> Result<Self, TransferError> {
        Ok(self.engines(engines(contexts, &EnginesOptions::default())?))
    }
}

/// Returns the engines between devices, pinned and system memory, and files. Together they copy
/// between any two of these. They copy between two devices if one can access the memory of the
/// other. Routes that no engine copies directly (device ↔ file, device ↔ system memory) pass
/// through pinned memory.
///
/// Between two devices, the engine of the destination copies with a kernel, because a device reads
/// faster than it writes. If only one device's context is given, that device reads and writes.
///
/// ```
/// use terrane_core::DeviceId;
/// use terrane_cuda::{Context, EnginesOptions, engines};
/// use terrane_transfer::TransferManager;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let manager = match Context::primary(DeviceId::new(0)) {
///     Ok(context) => TransferManager::new(engines([&context], &EnginesOptions::default())?),
///     // Without a device, the engines of host memory and files.
///     Err(reason) => {
///         println!("no usable device: {reason}");
///         TransferManager::with_default_engines()?
///     }
/// };
/// println!("{} engines", manager.engines().len());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`TransferError::EngineNotStarted`] names the engine that could not be created. The engines
/// created before it have ended.
pub fn engines<'a>(
    contexts: impl IntoIterator<Item = &'a Context>,
    options: &EnginesOptions,
) -> Result<Vec<Arc<dyn CopyEngine>>, TransferError> {
    fn failed<E: Into<BoxedCause>>(engine: &'static str) -> impl FnOnce(E) -> TransferError {
        move |source| TransferError::EngineNotStarted { engine, source: source.into() }
    }

    let host = HostEngine::new(options.host.clone()).map_err(failed("host"))?;
    let disk = DiskEngine::new(&options.disk).map_err(failed("disk"))?;
    let others: [Arc<dyn CopyEngine>; 2] = [Arc::new(host), Arc::new(disk)];
    let (mut devices, mut relays) = (Vec::<Arc<dyn CopyEngine>>::new(), Vec::new());
    for context in contexts {
        let device = DeviceEngine::new(context, options.device.clone()).map_err(failed("cuda"))?;
        let device: Arc<dyn CopyEngine> = Arc::new(device);
        let bounce =
            PinnedAllocator::new(context, options.pinned.clone()).map_err(failed("relay"))?;
        for other in &others {
            let (device, other) = (Arc::clone(&device), Arc::clone(other));
            let relay = RelayEngine::new(device, other, bounce.clone(), &options.relay)?;
            relays.push(Arc::new(relay) as Arc<dyn CopyEngine>);
        }
        devices.push(device);
    }
    Ok(devices.into_iter().chain(others).chain(relays).collect())
}
