//! Why a tensor could not be imported or exported.

use terrane_core::{Alignment, ByteCount, DeviceId, StorageKind, ViewOutOfBounds};
#[cfg(feature = "cuda")]
use terrane_cuda::CudaError;
use terrane_layout::LayoutError;
use terrane_transfer::TransferError;

use super::{ElementType, ElementTypeError, ShapeError};

/// Why a foreign tensor could not be imported. Its deleter has then been called, unless
/// [`was_released`](Self::was_released) says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The pointer is null.
    #[error("the pointer to the managed tensor is null")]
    NullTensor,
    /// No managed tensor can be at the pointer's address; no field was read.
    #[error("the pointer to the managed tensor, {address:#x}, is not a multiple of 8")]
    MisalignedTensor {
        /// The address.
        address: usize,
    },
    /// The tensor was already imported, and has not been released since. It stays with its
    /// importer; this call did not call its deleter.
    #[error("the tensor at {address:#x} was taken in already; ask its producer for another one")]
    AlreadyImported {
        /// The address of its structure.
        address: usize,
    },
    /// A DLPack version with an unknown structure; only the deleter was used.
    #[error("the tensor is of DLPack {major}.{minor}; ask its producer for one of version 1")]
    UnknownVersion {
        /// The major version.
        major: u32,
        /// The minor version.
        minor: u32,
    },
    /// A negative number of axes.
    #[error("the tensor has {ndim} axes")]
    NegativeRank {
        /// The stated number.
        ndim: i32,
    },
    /// Sizes or strides that cannot be read.
    #[error("the {field} of the tensor's {axes} axes cannot be read: its pointer is {address:#x}")]
    UnreadableAxes {
        /// `shape` or `strides`.
        field: &'static str,
        /// The stated number of axes.
        axes: usize,
        /// The pointer: null, or not a multiple of 8.
        address: usize,
    },
    /// The element type is invalid.
    #[error("the tensor's element type is not known")]
    ElementType(#[from] ElementTypeError),
    /// The sizes and strides do not describe memory.
    #[error("the tensor's shape is refused")]
    Shape(#[from] ShapeError),
    /// A device for which Terrane has no kind of memory.
    #[error(
        "the tensor is on DLPack's device type {device_type}, number {device_id}; Terrane takes \
         the host (1, number 0), CUDA devices (2) and pinned host memory (3)"
    )]
    UnknownDevice {
        /// DLPack's number of the type.
        device_type: u32,
        /// The number of the device.
        device_id: i32,
    },
    /// The importer was given no context of the device.
    #[error(
        "the tensor is on CUDA device {device}; give the importer a context of it \
         (`with_device`, feature `cuda`)"
    )]
    NoContext {
        /// The device.
        device: DeviceId,
    },
    /// The device's driver does not know the memory as that device's.
    #[cfg(feature = "cuda")]
    #[error("the tensor's memory is not what it says")]
    NotDeviceMemory(#[source] CudaError),
    /// The data is null, but there are elements.
    #[error("the data pointer is null, but the tensor has {elements} elements")]
    NullData {
        /// The number of elements.
        elements: u64,
    },
    /// The tensor extends past the address space.
    #[error("{bytes} from {byte_offset} bytes behind {data:#x} on leave the address space")]
    AddressOverflow {
        /// The data pointer.
        data: u64,
        /// The offset of the first element.
        byte_offset: u64,
        /// The bytes from the first element to the last.
        bytes: ByteCount,
    },
    /// The first element is misaligned.
    #[error(
        "the first element is at {address:#x}, but elements of {element} are aligned to {alignment}"
    )]
    MisalignedData {
        /// Its address.
        address: u64,
        /// The element type.
        element: ElementType,
        /// The required alignment, in bytes.
        alignment: Alignment,
    },
    /// The tensor is read-only, so it cannot be [`Memory`](terrane_core::Memory).
    #[error("the tensor may only be read; copy it, or hand over one that may be written")]
    ReadOnly,
    /// There are bytes between the elements, or bits after the last one, that do not belong to
    /// them.
    #[error(
        "the tensor's {elements} elements do not fill the {bytes} that they lie in; hand over a \
         tensor without gaps, or adopt the gaps as well"
    )]
    Gaps {
        /// The number of elements.
        elements: u64,
        /// The bytes from the first to the last.
        bytes: ByteCount,
    },
}

impl ImportError {
    /// Whether the tensor was released: its deleter called, if it had one. It was not if no tensor
    /// was found, or if another import has it.
    #[must_use]
    pub const fn was_released(&self) -> bool {
        !matches!(
            self,
            Self::NullTensor | Self::MisalignedTensor { .. } | Self::AlreadyImported { .. }
        )
    }
}

/// Why memory could not be exported as a tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// DLPack has no device for the memory.
    #[error("{kind} memory has no place in DLPack; copy it to the host or a device first")]
    NoDevice {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The processor cannot reach the bytes.
    #[error("{kind} memory is not the host's; copy it there first")]
    NotHost {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The shape needs more bytes than the region has.
    #[error("the tensor does not fit into its region")]
    OutOfBounds(#[from] ViewOutOfBounds),
    /// The start of the memory is misaligned for an element.
    #[error(
        "the memory begins at {address:#x}, but elements of {element} are aligned to {alignment}"
    )]
    Misaligned {
        /// Its start.
        address: u64,
        /// The element type.
        element: ElementType,
        /// The required alignment, in bytes.
        alignment: Alignment,
    },
    /// The export does not state when the consumer has finished with memory that devices reach.
    #[error(
        "nothing says when the consumer has done with the {kind} memory, which may be after it has \
         dropped the tensor: name its stream (`released_after`), or promise that it waits \
         (`released_when_done`)"
    )]
    ReleaseNotStated {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The legacy structure cannot mark a tensor as read-only.
    #[error("legacy tensors cannot be read-only; export a versioned one, or for writing")]
    LegacyReadOnly,
    /// The legacy structure cannot state that each element below eight bits takes a byte.
    #[error("legacy tensors cannot have {element} padded to whole bytes; export a versioned one")]
    LegacyPadded {
        /// The element type.
        element: ElementType,
    },
    /// The layout has no region of this number.
    #[error("there is no region {region}; the layout has {regions}, counted from 0")]
    NoRegion {
        /// The number.
        region: u32,
        /// The number of regions.
        regions: usize,
    },
    /// The bytes are not a whole number of elements.
    #[error("{bytes} are no whole number of elements of {element}")]
    NotWhole {
        /// The number of bytes.
        bytes: ByteCount,
        /// The element type.
        element: ElementType,
    },
    /// Sizes that no tensor can have.
    #[error("the tensor's shape is refused")]
    Shape(#[from] ShapeError),
    /// The layout has no such piece.
    #[error("the layout has no such piece")]
    Layout(#[from] LayoutError),
    /// The layout's sections have strides within a block, so it has no contiguous pieces.
    #[error(
        "the layout has no contiguous pieces, so no tensor of whole pieces exists; use \
         `tensors::kv_tensors`, which expresses strides"
    )]
    InParts,
    /// The blocks could not be held: a transfer reads or writes them.
    #[error("the blocks could not be held")]
    Held(#[from] TransferError),
}
