//! Copies blocks between two tensors whose first dimension counts blocks.
//!
//! A tensor is an address with sizes and strides ([`StridedTensor`]). So the code is the same for
//! tensors of any library, on the host and on devices.

use std::collections::HashMap;

use terrane::core::BoxedCause;
use terrane::interop::tensors::{StridedError, StridedForm, StridedTensor, adopt_strided};
use terrane::layout::{Axis, LayoutError, SectionName};
use terrane::prelude::*;
use terrane::transfer::BytesInUse;

/// The reason why blocks were not copied.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The elements have different types.
    #[error("the source has elements of {from}, and the destination of {to}; use equal types")]
    Types {
        /// The type of the source's elements.
        from: &'static str,
        /// The type of the destination's elements.
        to: &'static str,
    },
    /// The blocks have different shapes.
    #[error(
        "the source has the sizes {from:?}, and the destination {to:?}; all but the first must be \
         equal"
    )]
    Shapes {
        /// The sizes of the source.
        from: Vec<u64>,
        /// The sizes of the destination.
        to: Vec<u64>,
    },
    /// A tensor has no dimension of blocks.
    #[error("a tensor has no dimensions; its first dimension must count blocks")]
    NoBlocks,
    /// A block number is larger than any layout has.
    #[error("block {block} was named; the largest block number is 2^32 - 2")]
    BlockNumber {
        /// The number.
        block: usize,
    },
    /// The caches have no layers.
    #[error("a cache without layers was passed; pass the tensors of one layer or more")]
    NoLayers,
    /// The elements are not whole bytes, or the memory is of another kind.
    #[error("{what} cannot be copied; use elements of whole bytes in host memory")]
    Unsupported {
        /// The type of the elements, or the place of the tensor.
        what: String,
    },
    /// The tensor library refused a call.
    #[error("the tensor library refused access to the storage; see the cause")]
    Library(#[source] BoxedCause),
    /// A tensor cannot be a layout: a size of zero, or elements that overlap.
    #[error(transparent)]
    Tensor(#[from] StridedError),
    /// A layout was refused.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Another copy is using the tensor, or source and destination share bytes.
    #[error(transparent)]
    InUse(#[from] BytesInUse),
    /// The copy was refused or failed: a block out of range, a destination named twice.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

/// Starts a copy of blocks: each key of `mapping` is a block of `from`, and its value a block of
/// `to`. If a tensor is on a device, `order` states the work that the copy runs after.
///
/// The completion keeps nothing; the copy itself keeps both tensors until it has ended.
///
/// # Errors
///
/// [`SwapError`]; nothing has been copied.
pub fn copy_blocks(
    manager: &TransferManager,
    from: &StridedTensor,
    to: &StridedTensor,
    mapping: &HashMap<usize, usize>,
    order: Option<DeviceOrder>,
) -> Result<Completion<()>, SwapError> {
    let (Some((_, block)), Some((_, other))) =
        (from.sizes().split_first(), to.sizes().split_first())
    else {
        return Err(SwapError::NoBlocks);
    };
    if block != other {
        return Err(SwapError::Shapes { from: from.sizes().into(), to: to.sizes().into() });
    }
    let source = endpoint_of(from)?;
    // Copies within one tensor use one endpoint, because bytes belong to one endpoint at a time.
    let is_same = from.span() == to.span() && from.strides() == to.strides();
    let destination = if is_same { source.clone() } else { endpoint_of(to)? };
    submit(manager, &source, &destination, mapping, order)
}

/// Starts a copy of blocks between two endpoints.
///
/// # Errors
///
/// [`SwapError::BlockNumber`] and [`SwapError::Transfer`]; nothing has been copied.
pub fn submit(
    manager: &TransferManager,
    from: &Endpoint,
    to: &Endpoint,
    mapping: &HashMap<usize, usize>,
    order: Option<DeviceOrder>,
) -> Result<Completion<()>, SwapError> {
    let number = |block| u32::try_from(block).map_err(|_| SwapError::BlockNumber { block });
    let mut sources = Vec::with_capacity(mapping.len());
    let mut destinations = Vec::with_capacity(mapping.len());
    for (&source, &destination) in mapping {
        sources.push(number(source)?);
        destinations.push(number(destination)?);
    }
    let mut transfer = Transfer::new(from, to).blocks(&sources, &destinations);
    if let Some(order) = order {
        transfer = transfer.device_order(order);
    }
    Ok(manager.submit(transfer, ()).map_err(|refused| refused.cause)?)
}

/// The form of tensors with this number of dimensions. The first one counts blocks. The others
/// have no meaning to a copy of whole blocks, so they are all elements.
pub fn form(section: SectionName, dimensions: usize) -> StridedForm {
    let blocks = StridedForm::new(&[section]).dim(Axis::Block);
    (1..dimensions).fold(blocks, |form, _| form.dim(Axis::Element))
}

fn endpoint_of(tensor: &StridedTensor) -> Result<Endpoint, SwapError> {
    let form = form(SectionName::K, tensor.sizes().len());
    let layout = adopt_strided(&form, std::slice::from_ref(tensor))?.unregistered().build();
    Ok(Endpoint::new(layout.map_err(|failed| failed.cause)?)?)
}
