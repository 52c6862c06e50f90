//! Where a layout and the tensors of an engine do not fit together.

use std::fmt;

use terrane_core::{ByteCount, StorageKind};
use terrane_layout::LayoutError;

use super::{KvAxis, StridedError};
use crate::dlpack::{ElementType, ExportError, ImportError, ShapeError};

/// Which of an engine's tensors is meant.
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

/// Why a layout cannot be seen as tensors, or tensors cannot be a layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A number of tensors that is not that of the layers.
    #[error("{what} are {found}, but the configuration has {expected} layers")]
    TensorCount {
        /// What was counted.
        what: &'static str,
        /// The layers.
        expected: u32,
        /// The tensors.
        found: usize,
    },
    /// K and V are given apart, and the form or the configuration has them together, or the other
    /// way round.
    #[error(
        "the form {} outers as an axis, and the configuration has {outer_dim}, but {given}",
        if *.has_outer { "has" } else { "does not have" }
    )]
    Outers {
        /// Whether the form has them as an axis.
        has_outer: bool,
        /// The outers of the configuration.
        outer_dim: u32,
        /// How the tensors were given.
        given: &'static str,
    },
    /// A tensor with other axes than the form.
    #[error("{tensor} has {found} axes, the form has {expected}")]
    Rank {
        /// The tensor.
        tensor: TensorName,
        /// The axes of the form.
        expected: usize,
        /// The axes of the tensor.
        found: usize,
    },
    /// A size that is not the configuration's.
    #[error("{tensor}, axis {axis} ({what}): {expected} expected, {found} found")]
    Size {
        /// The tensor.
        tensor: TensorName,
        /// The axis, counted from 0.
        axis: usize,
        /// What it is.
        what: KvAxis,
        /// The size by the configuration.
        expected: u64,
        /// The size of the tensor.
        found: i64,
    },
    /// Elements of another width than the configuration's.
    #[error("elements of {found} do not fit a layout whose elements have {expected}; use others")]
    Element {
        /// The bytes of the layout's elements.
        expected: ByteCount,
        /// Of the tensors.
        found: ElementType,
    },
    /// Tensors whose elements are not of one type.
    #[error("{tensor} has elements of {found}, the first tensor of {expected}")]
    MixedElements {
        /// The tensor.
        tensor: TensorName,
        /// Of the first tensor.
        expected: ElementType,
        /// Of this one.
        found: ElementType,
    },
    /// Elements below eight bits that are padded to a whole byte each, where a layout packs them.
    #[error(
        "{tensor} has elements of {element} padded to whole bytes, which no layout has; hand it over \
         packed, or as bytes"
    )]
    Padded {
        /// The tensor.
        tensor: TensorName,
        /// Its elements.
        element: ElementType,
    },
    /// Tensors that are not in one kind of memory.
    #[error("{tensor} is in {found} memory, the first one in {expected} memory")]
    MixedMemory {
        /// The tensor.
        tensor: TensorName,
        /// Of the first tensor.
        expected: StorageKind,
        /// Of this one.
        found: StorageKind,
    },
    /// The form names heads, and the configuration does not.
    #[error("the form has an axis of heads; state num_heads in the configuration")]
    HeadsNotStated,
    /// Two axes that are one in the form lie apart in the layout, so that no stride leads along
    /// both.
    #[error(
        "the {axis} of the form are no axis of the layout: {inner} and {outer} of it do not follow \
         one another evenly; choose a form that has both"
    )]
    NotJoined {
        /// The axis of the form.
        axis: KvAxis,
        /// What would be the inner part of it.
        inner: KvAxis,
        /// What would be the outer part.
        outer: KvAxis,
    },
    /// An axis is split in two or spread over regions, which no stride of a tensor expresses.
    #[error(
        "the layout has the {axis} axis in two parts or regions, and a tensor has one stride for it"
    )]
    Split {
        /// The axis.
        axis: KvAxis,
    },
    /// The sections of the layout differ, or are not at equal distances.
    #[error(
        "the {sections} sections of the layout have no common shape and strides, or no equal \
         distances; no KV tensor holds them"
    )]
    Sections {
        /// The sections of a block.
        sections: usize,
    },
    /// The tensors were not adopted with the strides that they have.
    #[error("the tensors cannot be adopted: {source}")]
    Strided {
        /// Why.
        source: StridedError,
    },
    /// A distance that is no whole number of elements.
    #[error("{what}: {bytes} lie between one and the next, which is no whole number of {element}")]
    NotWhole {
        /// The axis.
        what: KvAxis,
        /// The distance.
        bytes: ByteCount,
        /// What an element is.
        element: ElementType,
    },
    /// A tensor that is no memory as it is.
    #[error("{tensor} cannot be adopted")]
    Memory {
        /// The tensor.
        tensor: TensorName,
        /// Why.
        #[source]
        source: ImportError,
    },
    /// A shape that no tensor can have.
    #[error("the layout's tensors would have a shape that is refused")]
    Shape(#[from] ShapeError),
    /// The configuration itself.
    #[error("the configuration is refused")]
    Layout(#[from] LayoutError),
    /// A tensor that was not handed out.
    #[error("{tensor} was not handed out")]
    Export {
        /// The tensor.
        tensor: TensorName,
        /// Why.
        #[source]
        source: ExportError,
    },
}
