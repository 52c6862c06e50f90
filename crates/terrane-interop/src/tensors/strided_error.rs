//! The reasons why strided tensors could not be adopted.

use terrane_core::{ByteCount, StorageKind};
use terrane_layout::{LayoutError, TensorAxis};

use crate::dlpack::{ElementType, ImportError};

/// The reason why tensors were not adopted as a layout. Tensors and dimensions are counted from 0.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StridedError {
    /// A size is negative.
    #[error("dimension {dimension} has the size {size}; a size is at least 1")]
    NegativeSize {
        /// The dimension.
        dimension: usize,
        /// Its size.
        size: i64,
    },
    /// A dimension has no positions.
    #[error("dimension {dimension} has the size 0; a size is at least 1")]
    ZeroSize {
        /// The dimension.
        dimension: usize,
    },
    /// A stride is negative.
    #[error(
        "dimension {dimension} has the stride {stride}; a layout has no negative strides, so copy \
         the tensor"
    )]
    NegativeStride {
        /// The dimension.
        dimension: usize,
        /// Its stride, in elements.
        stride: i64,
    },
    /// A number is too large, or the tensor ends past 2^63 − 1 bytes or its address space.
    #[error(
        "dimension {dimension} reaches past 2^63 − 1 bytes or 2^32 − 1 positions; make it smaller"
    )]
    TooLarge {
        /// The dimension.
        dimension: usize,
    },
    /// The memory ends before the last element.
    #[error(
        "the tensor reaches over {} bytes, and its memory has {}; pass larger memory",
        .needed.get(), .actual.get()
    )]
    TooShort {
        /// The bytes from the first element to the last.
        needed: ByteCount,
        /// The bytes of the memory.
        actual: ByteCount,
    },
    /// Elements are not a whole number of bytes, or are padded to whole bytes.
    #[error("elements of {element} are not a whole number of bytes; pass the tensor as bytes")]
    Element {
        /// The element.
        element: ElementType,
    },
    /// The number of dimensions is wrong.
    #[error(
        "the tensor has {found} dimensions, and {expected} are expected; name each dimension of \
         the tensor in the form"
    )]
    Rank {
        /// Dimensions of the form, or sizes.
        expected: usize,
        /// Dimensions of the tensor, or strides.
        found: usize,
    },
    /// The number of tensors is wrong.
    #[error(
        "{found} tensors were passed, and the form has {expected}; pass as many as the form has"
    )]
    TensorCount {
        /// The tensors of the form.
        expected: u64,
        /// The tensors that were passed.
        found: usize,
    },
    /// The form has a dimension too often, or lacks one.
    #[error("the form has the {axis} dimension {times} times; {expected}")]
    Dimension {
        /// The dimension.
        axis: TensorAxis,
        /// The number of times.
        times: usize,
        /// The allowed number of times.
        expected: &'static str,
    },
    /// A tensor has another size or stride, or other elements, than the first one of its section.
    #[error(
        "tensor {tensor} differs in sizes, strides or elements from the first tensor of its \
         section; all must be equal"
    )]
    Differs {
        /// The tensor.
        tensor: usize,
    },
    /// A size does not fit the form.
    #[error(
        "dimension {dimension} has {size} positions, and the form requires {expected}; correct the \
         form or the tensor"
    )]
    Size {
        /// The dimension.
        dimension: usize,
        /// Its size.
        size: u64,
        /// The value that the form requires.
        expected: String,
    },
    /// Groups of elements do not fit into the elements.
    #[error(
        "elements of {bytes} contiguous bytes are not a multiple of a group of {unit} bytes; use \
         whole groups, or another element format"
    )]
    Groups {
        /// The bytes of a row, or of one element if elements are apart.
        bytes: u64,
        /// The bytes of a group.
        unit: u32,
    },
    /// An axis would be split into more than two parts, tensors included.
    #[error(
        "the {axis} axis would be split into {parts} parts; the maximum is 2, so copy the tensors"
    )]
    Split {
        /// The axis.
        axis: TensorAxis,
        /// The parts.
        parts: usize,
    },
    /// Tensors of a list are at unequal distances.
    #[error(
        "the tensors of the {axis} list are not in ascending order at equal distances; reorder \
         them, or adopt each one separately"
    )]
    Uneven {
        /// The list.
        axis: TensorAxis,
    },
    /// The tensors are in several kinds of memory.
    #[error(
        "tensor {tensor} is in {found} memory, and tensor 0 is in {expected} memory; all must be \
         in one kind"
    )]
    MixedMemory {
        /// The tensor.
        tensor: usize,
        /// The memory of the first one.
        expected: StorageKind,
        /// The memory of this one.
        found: StorageKind,
    },
    /// A tensor cannot be written, or the bytes between its elements may belong to another library.
    #[error("tensor {tensor} cannot be adopted; see the cause")]
    Memory {
        /// The tensor.
        tensor: usize,
        /// The reason.
        #[source]
        source: ImportError,
    },
    /// The strides are not nested, or overlap.
    #[error("the strides of the tensors cannot form a layout: {0}")]
    Layout(#[from] LayoutError),
}
