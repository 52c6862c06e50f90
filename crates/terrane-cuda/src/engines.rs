//! All the engines of a machine with a device, put together.

use std::sync::Arc;

use terrane_core::BoxedCause;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{CopyEngine, TransferError};

use crate::context::Context;
use crate::engine::{DeviceEngine, DeviceEngineOptions};
use crate::memory::{PinnedAllocator, PinnedOptions};

/// The options of [`engines`].
#[derive(Clone, Debug, Default)]
pub struct EnginesOptions {
    /// Of the engine between the device and pinned memory.
    pub device: DeviceEngineOptions,
    /// Of the engine between all sorts of host memory.
    pub host: HostEngineOptions,
    /// Of the engine between host memory and files.
    pub disk: DiskEngineOptions,
    /// Of each of the two relays: what passes through pinned memory, and how much of it they take.
    pub relay: RelayOptions,
    /// Of the relays' pinned memory.
    pub pinned: PinnedOptions,
}

/// The engines between a device, pinned and system memory, and files: each pair of them is served.
/// What no engine copies by itself (device ↔ file, device ↔ system memory) goes by way of pinned
/// memory.
///
/// ```
/// use terrane_core::DeviceId;
/// use terrane_cuda::{Context, EnginesOptions, engines};
/// use terrane_transfer::TransferManager;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let manager = match Context::primary(DeviceId::new(0)) {
///     Ok(context) => TransferManager::new(engines(&context, &EnginesOptions::default())?),
///     // Without a device, the same but for the device.
///     Err(reason) => {
///         println!("without a device: {reason}");
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
/// [`TransferError::EngineNotStarted`] names the engine that could not be made; those made before it
/// have ended.
pub fn engines(
    context: &Context,
    options: &EnginesOptions,
) -> Result<Vec<Arc<dyn CopyEngine>>, TransferError> {
    fn failed<E: Into<BoxedCause>>(engine: &'static str) -> impl FnOnce(E) -> TransferError {
        move |source| TransferError::EngineNotStarted { engine, source: source.into() }
    }

    let device = DeviceEngine::new(context, options.device.clone()).map_err(failed("cuda"))?;
    let host = HostEngine::new(options.host.clone()).map_err(failed("host"))?;
    let disk = DiskEngine::new(&options.disk).map_err(failed("disk"))?;
    let bounce = PinnedAllocator::new(context, options.pinned.clone()).map_err(failed("relay"))?;
    let device: Arc<dyn CopyEngine> = Arc::new(device);
    let others: [Arc<dyn CopyEngine>; 2] = [Arc::new(host), Arc::new(disk)];
    let mut all = vec![Arc::clone(&device)];
    all.extend(others.iter().map(Arc::clone));
    for other in others {
        let relay = RelayEngine::new(Arc::clone(&device), other, bounce.clone(), &options.relay)?;
        all.push(Arc::new(relay));
    }
    Ok(all)
}
