//! Mismatches between a layout and the tensors of an engine.

use std::fmt;

use terrane_core::{ByteCount, StorageKind};
use terrane_layout::LayoutError;

use super::{KvAxis, StridedError};
use crate::dlpack::{ElementType, ExportError, ImportError, ShapeError};

/// Identifies one of an engine's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorName {
    /// The tensor of a layer, with both K and V, or the latent.
    Layer(u32),
    /// The K of a layer.
    Key(u32),
    /// The V of a layer.
    Value(u32),
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layer(layer) => write!(f, "the tensor of layer {layer}"),
            Self::Key(layer) => write!(f, "the K tensor of layer {layer}"),
            Self::Value(layer) => write!(f, "the V tensor of layer {layer}"),
        }
    }
}

/// The reason why a layout has no views as tensors, or tensors cannot be adopted as a layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// The number of tensors does not match the number of layers.
    #[error(
        "there are {found} {what}, and the configuration has {expected} layers; pass one for each \
         layer"
    )]
    TensorCount {
        /// The counted tensors.
        what: &'static str,
        /// The layers.
        expected: u32,
        /// The tensors.
        found: usize,
    },
    /// K and V are separate tensors and one axis in the axis order or the configuration, or the
    /// reverse.
    #[error(
        "the axis order {} an axis for K and V, and the configuration has an outer_dim of \
         {outer_dim}, but {given}; state the same form in all three",
        if *.has_outer { "has" } else { "does not have" }
    )]
    Outers {
        /// Whether the axis order has them as an axis.
        has_outer: bool,
        /// The outers of the configuration.
        outer_dim: u32,
        /// How the tensors were passed.
        given: &'static str,
    },
    /// The tensor's number of axes differs from the axis order's.
    #[error(
        "{tensor} has {found} axes, and the axis order has {expected}; name each axis of the \
         tensor once"
    )]
    Rank {
        /// The tensor.
        tensor: TensorName,
        /// The axes of the axis order.
        expected: usize,
        /// The axes of the tensor.
        found: usize,
    },
    /// A size differs from the configuration's.
    #[error(
        "{tensor}, axis {axis} ({what}): {expected} expected, {found} found; correct the tensor or \
         the configuration"
    )]
    Size {
        /// The tensor.
        tensor: TensorName,
        /// The axis, counted from 0.
        axis: usize,
        /// The meaning of the axis.
        what: KvAxis,
        /// The size by the configuration.
        expected: u64,
        /// The size of the tensor.
        found: i64,
    },
    /// The width of the elements differs from the configuration's.
    #[error(
        "the tensors have elements of {found}, and the layout has elements of {expected}; use \
         tensors with that width"
    )]
    Element {
        /// The bytes of the layout's elements.
        expected: ByteCount,
        /// The bytes of the tensors' elements.
        found: ElementType,
    },
    /// Tensors with different element types.
    #[error(
        "{tensor} has elements of {found}, and the first tensor has elements of {expected}; all \
         must be equal"
    )]
    MixedElements {
        /// The tensor.
        tensor: TensorName,
        /// The type of the first tensor.
        expected: ElementType,
        /// The type of this tensor.
        found: ElementType,
    },
    /// Elements below eight bits are padded to a whole byte each, but a layout packs them.
    #[error(
        "{tensor} has elements of {element} padded to whole bytes, and a layout packs them; pass \
         it packed, or as bytes"
    )]
    Padded {
        /// The tensor.
        tensor: TensorName,
        /// Its elements.
        element: ElementType,
    },
    /// Tensors in different kinds of memory.
    #[error(
        "{tensor} is in {found} memory, and the first one is in {expected} memory; all must be in \
         one kind"
    )]
    MixedMemory {
        /// The tensor.
        tensor: TensorName,
        /// The memory of the first tensor.
        expected: StorageKind,
        /// The memory of this tensor.
        found: StorageKind,
    },
    /// The axis order names heads, but the configuration does not.
    #[error("the axis order has an axis of heads; state num_heads in the configuration")]
    HeadsNotStated,
    /// The layout separates two axes that are one axis in the axis order, so no stride covers both.
    #[error(
        "the axis order has one axis for the {axis}, and the layout separates its {inner} from its \
         {outer}; choose an axis order that has both"
    )]
    NotJoined {
        /// The axis of the axis order.
        axis: KvAxis,
        /// The inner part.
        inner: KvAxis,
        /// The outer part.
        outer: KvAxis,
    },
    /// An axis is split in two or spread over regions; no tensor stride expresses that.
    #[error(
        "the layout has the {axis} axis in two parts or regions, and a tensor has one stride for \
         it; choose another layout or axis order"
    )]
    Split {
        /// The axis.
        axis: KvAxis,
    },
    /// The sections of the layout are not K and V, differ, or are at unequal distances.
    #[error(
        "the {sections} sections of the layout cannot be KV tensors; use one section, or K and V \
         in this order with equal shapes, strides and distances"
    )]
    Sections {
        /// The sections of a block.
        sections: usize,
    },
    /// The tensors' strides could not be adopted.
    #[error("the tensors cannot be adopted: {source}")]
    Strided {
        /// The reason.
        source: StridedError,
    },
    /// A distance that is not a multiple of an element.
    #[error(
        "{what}: positions are {bytes} apart, which is not a multiple of an element of {element}; \
         use an element type of fewer bytes"
    )]
    NotWhole {
        /// The axis.
        what: KvAxis,
        /// The distance.
        bytes: ByteCount,
        /// The element type.
        element: ElementType,
    },
    /// A tensor that cannot be converted to memory.
    #[error("{tensor} cannot be adopted; see the cause")]
    Memory {
        /// The tensor.
        tensor: TensorName,
        /// The reason.
        #[source]
        source: ImportError,
    },
    /// A shape that no tensor can have.
    #[error("no tensor can have the shape of this layout; see the cause")]
    Shape(#[from] ShapeError),
    /// The configuration is invalid.
    #[error("the configuration is invalid; see the cause")]
    Layout(#[from] LayoutError),
    /// A tensor that could not be exported.
    #[error("{tensor} could not be exported; see the cause")]
    Export {
        /// The tensor.
        tensor: TensorName,
        /// The reason.
        #[source]
        source: ExportError,
    },
}
