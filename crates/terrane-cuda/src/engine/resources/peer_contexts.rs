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
            let contexts = unpoisoned(self.0.read());
            // A lost context may have been replaced by now.
            if let Some(context) = contexts.get(&device).filter(|context| context.lost().is_none())
            {
                return Ok(context.clone());
            }
        }
        let context = Context::primary(device)?;
        let mut contexts = unpoisoned(self.0.write());
        let replaced = contexts.insert(device, context.clone());
        drop(contexts);
        drop(replaced);
        Ok(context)
    }
}
