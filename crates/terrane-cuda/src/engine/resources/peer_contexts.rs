//! The contexts of other devices.

use std::sync::RwLock;

use rustc_hash::FxHashMap;
use terrane_core::DeviceId;
use terrane_core::sync::unpoisoned;

use crate::error::CudaError;
use crate::runtime::context::Context;

/// The primary contexts of other devices, retained once each.
#[derive(Debug, Default)]
pub(crate) struct Peers(RwLock<FxHashMap<DeviceId, Context>>);

impl Peers {
    /// # Errors
    ///
    /// The errors of [`Context::primary`].
    pub(crate) fn get(&self, device: DeviceId) -> Result<Context, CudaError> {
        {
            let known = unpoisoned(self.0.read());
            // A lost context may have been replaced by now.
            if let Some(context) = known.get(&device).filter(|known| known.lost().is_none()) {
                return Ok(context.clone());
            }
        }
        let context = Context::primary(device)?;
        let mut known = unpoisoned(self.0.write());
        let replaced = known.insert(device, context.clone());
        drop(known);
        drop(replaced);
        Ok(context)
    }
}
