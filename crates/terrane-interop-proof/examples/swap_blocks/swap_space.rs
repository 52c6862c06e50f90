//! The caches of a serving engine on both sides, adopted once: a swap is one transfer of all layers.

use std::collections::HashMap;

use candle_core::Tensor;
use terrane::interop::tensors::{StridedForm, StridedTensor, adopt_strided_parts};
use terrane::layout::{Axis, SectionName};
use terrane::prelude::*;

use crate::block_copy::{SwapError, form, submit};
use crate::candle::adopted;

/// The keys and values of a layer.
pub type KvCache = (Tensor, Tensor);

/// The computing cache and the cache that blocks are swapped to, of all layers.
pub struct SwapSpace {
    manager: TransferManager,
    computing: Endpoint,
    swapped: Endpoint,
    /// On a device, the work that a swap runs after.
    order: Option<DeviceOrder>,
}

impl SwapSpace {
    /// Adopts both caches. All layers of a cache have equal shapes. The value keeps the tensors.
    ///
    /// # Errors
    ///
    /// [`SwapError`] if the caches differ, or a tensor cannot be a layout.
    ///
    /// # Safety
    ///
    /// While a call of [`swap_in`](Self::swap_in) or [`swap_out`](Self::swap_out) runs, no other
    /// code writes the blocks that it reads, or uses those that it writes.
    pub unsafe fn new(
        manager: &TransferManager,
        computing: &[KvCache],
        swapped: &[KvCache],
    ) -> Result<Self, SwapError> {
        let (Some(first), Some(other)) = (computing.first(), swapped.first()) else {
            return Err(SwapError::NoLayers);
        };
        for (from, to) in [(&first.0, &other.0), (&first.1, &other.1)] {
            if from.dtype() != to.dtype() {
                return Err(SwapError::Types {
                    from: from.dtype().as_str(),
                    to: to.dtype().as_str(),
                });
            }
            let sizes = |tensor: &Tensor| -> Vec<u64> {
                tensor.dims().iter().map(|&size| ByteCount::from_usize(size).get()).collect()
            };
            let (from, to) = (sizes(from), sizes(to));
            if from.get(1..) != to.get(1..) || computing.len() != swapped.len() {
                return Err(SwapError::Shapes { from, to });
            }
        }
        // SAFETY: the caller promises it for both caches.
        let (computing, order) = unsafe { adopt(computing) }?;
        // SAFETY: as above.
        let (swapped, other) = unsafe { adopt(swapped) }?;
        Ok(Self { manager: manager.clone(), computing, swapped, order: order.or(other) })
    }

    /// Copies swapped blocks to blocks of the computing cache, and returns when they are there.
    ///
    /// # Errors
    ///
    /// [`SwapError::Transfer`], such as for a block out of range.
    pub fn swap_in(&self, mapping: &HashMap<usize, usize>) -> Result<Report, SwapError> {
        self.swap(&self.swapped, &self.computing, mapping)
    }

    /// Copies blocks of the computing cache to the swapped ones, and returns when they are there.
    ///
    /// # Errors
    ///
    /// As for [`swap_in`](Self::swap_in).
    pub fn swap_out(&self, mapping: &HashMap<usize, usize>) -> Result<Report, SwapError> {
        self.swap(&self.computing, &self.swapped, mapping)
    }

    fn swap(
        &self,
        from: &Endpoint,
        to: &Endpoint,
        mapping: &HashMap<usize, usize>,
    ) -> Result<Report, SwapError> {
        Ok(submit(&self.manager, from, to, mapping, self.order.clone())?.wait().result?)
    }
}

/// Adopts the tensors of all layers: keys as one section, and values as another.
///
/// # Safety
///
/// As for [`adopted`].
unsafe fn adopt(layers: &[KvCache]) -> Result<(Endpoint, Option<DeviceOrder>), SwapError> {
    let mut order = None;
    let mut tensors = |of: fn(&KvCache) -> &Tensor| -> Result<Vec<StridedTensor>, SwapError> {
        let one = |layer| {
            // SAFETY: this function's caller promises it for each tensor.
            let (tensor, after) = unsafe { adopted(of(layer)) }?;
            order = order.take().or(after);
            Ok(tensor)
        };
        layers.iter().map(one).collect()
    };
    let (keys, values) = (tensors(|(keys, _)| keys)?, tensors(|(_, values)| values)?);
    let count = u32::try_from(layers.len()).map_err(|_| SwapError::NoLayers)?;
    let listed = |section, tensors: &[StridedTensor]| -> StridedForm {
        let dimensions = tensors.first().map_or(0, |tensor| tensor.sizes().len());
        form(section, dimensions).tensors(Axis::Layer, count)
    };
    let forms = (listed(SectionName::K, &keys), listed(SectionName::V, &values));
    let parts = [(&forms.0, &keys[..]), (&forms.1, &values[..])];
    let layout = adopt_strided_parts(&parts)?.unregistered().build();
    Ok((Endpoint::new(layout.map_err(|failed| failed.cause)?)?, order))
}
