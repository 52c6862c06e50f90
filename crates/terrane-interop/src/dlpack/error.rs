//! The reasons why a tensor could not be imported or exported.

use terrane_core::{Alignment, ByteCount, DeviceId, StorageKind, ViewOutOfBounds};
#[cfg(feature = "cuda")]
use terrane_cuda::CudaError;
use terrane_layout::LayoutError;
use terrane_transfer::TransferError;

use super::{ElementType, ElementTypeError, ShapeError};

/// The reason why a foreign tensor could not be imported. Its deleter has been called, unless
/// [`was_released`](Self::was_released) returns false.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The pointer is null.
    #[error("the pointer to the managed tensor is null; pass the pointer of the capsule")]
    NullTensor,
    /// No managed tensor can be at the pointer's address; no field was read.
    #[error(
        "the pointer to the managed tensor, {address:#x}, is not a multiple of 8; pass the pointer \
         of the capsule"
    )]
    MisalignedTensor {
        /// The address.
        address: usize,
    },
    /// The tensor is already imported, and has not been released since. Its first importer still
    /// owns it, and this call did not call its deleter.
    #[error(
        "the tensor at {address:#x} is already imported; request another one from its producer"
    )]
    AlreadyImported {
        /// The address of its structure.
        address: usize,
    },
    /// A DLPack version with an unknown structure; only the deleter was used.
    #[error("the tensor has DLPack version {major}.{minor}; request version 1 from its producer")]
    UnknownVersion {
        /// The major version.
        major: u32,
        /// The minor version.
        minor: u32,
    },
    /// A negative number of axes.
    #[error("the tensor has {ndim} axes; a tensor has at least 0")]
    NegativeRank {
        /// The stated number.
        ndim: i32,
    },
    /// Sizes or strides that cannot be read.
    #[error(
        "the {field} of the tensor's {axes} axes cannot be read from the pointer {address:#x}; it \
         must be aligned to 8 bytes and not null"
    )]
    UnreadableAxes {
        /// `shape` or `strides`.
        field: &'static str,
        /// The stated number of axes.
        axes: usize,
        /// The pointer: null, or not a multiple of 8.
        address: usize,
    },
    /// The element type is invalid.
    #[error("the tensor's element type is not supported; see the cause")]
    ElementType(#[from] ElementTypeError),
    /// The sizes and strides do not describe memory.
    #[error("the tensor's shape is refused; see the cause")]
    Shape(#[from] ShapeError),
    /// A device for which Terrane has no kind of memory.
    #[error(
        "the tensor is on DLPack device type {device_type}, number {device_id}; Terrane takes the \
         host (type 1, number 0), CUDA devices (type 2) and pinned host memory (type 3)"
    )]
    UnknownDevice {
        /// DLPack's number of the type.
        device_type: u32,
        /// The number of the device.
        device_id: i32,
    },
    /// The importer has no context of the device.
    #[error(
        "the tensor is on CUDA device {device}, and the importer has no context of it; pass one to \
         `with_device` (feature `cuda`)"
    )]
    NoContext {
        /// The device.
        device: DeviceId,
    },
    /// The device's driver does not report the memory as that device's.
    #[cfg(feature = "cuda")]
    #[error(
        "the driver does not know the tensor's bytes as memory of its device; see the cause, and \
         ask its producer for the right device"
    )]
    NotDeviceMemory(#[source] CudaError),
    /// The data is null, but there are elements.
    #[error(
        "the tensor has {elements} elements, and its data pointer is null; ask its producer for a \
         tensor with data"
    )]
    NullData {
        /// The number of elements.
        elements: u64,
    },
    /// The tensor extends past the address space.
    #[error(
        "the tensor takes {bytes} from {byte_offset} bytes after {data:#x}, past the end of the \
         address space; ask its producer for a valid tensor"
    )]
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
        "the first element is at {address:#x}; elements of {element} need an alignment of \
         {alignment}"
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
    #[error(
        "the tensor is read-only, and memory must be writable; copy it, or export it as writable"
    )]
    ReadOnly,
    /// There are bytes between the elements, or bits after the last one, that are not part of an
    /// element.
    #[error(
        "the tensor's {elements} elements do not fill their {bytes}; pass a tensor without gaps, \
         or import the gaps with `memory_with_gaps`"
    )]
    Gaps {
        /// The number of elements.
        elements: u64,
        /// The bytes from the first to the last.
        bytes: ByteCount,
    },
}

impl ImportError {
    /// Whether the tensor was released, that is, its deleter was called if it had one. It was not
    /// called if no tensor was found, or if another import owns the tensor.
    #[must_use]
    pub const fn was_released(&self) -> bool {
        !matches!(
            self,
            Self::NullTensor | Self::MisalignedTensor { .. } | Self::AlreadyImported { .. }
        )
    }
}

/// The reason why memory could not be exported as a tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// DLPack has no device for the memory.
    #[error("DLPack has no device for {kind} memory; copy it to the host or a device first")]
    NoDevice {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The processor cannot access the bytes.
    #[error("{kind} memory is not host memory; copy it to the host first")]
    NotHost {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The shape needs more bytes than the region has.
    #[error("the tensor does not fit into its region; see the cause, and export a smaller shape")]
    OutOfBounds(#[from] ViewOutOfBounds),
    /// The start of the memory is misaligned for an element.
    #[error(
        "the memory begins at {address:#x}; elements of {element} need an alignment of {alignment}"
    )]
    Misaligned {
        /// Its start.
        address: u64,
        /// The element type.
        element: ElementType,
        /// The required alignment, in bytes.
        alignment: Alignment,
    },
    /// The export does not state when the consumer has finished with memory that devices access.
    #[error(
        "the export of {kind} memory does not state when the consumer's device work has completed; \
         name the consumer's stream (`released_after`), or promise that the consumer waits \
         (`released_when_done`)"
    )]
    ReleaseNotStated {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The legacy structure cannot mark a tensor as read-only.
    #[error("a legacy tensor cannot be read-only; export a versioned one, or a writable one")]
    LegacyReadOnly,
    /// The legacy structure cannot express that each element below eight bits occupies a whole
    /// byte.
    #[error(
        "a legacy tensor cannot state that {element} is padded to whole bytes; export a versioned \
         one"
    )]
    LegacyPadded {
        /// The element type.
        element: ElementType,
    },
    /// The layout has no region with this number.
    #[error("region {region} was requested; the layout has {regions}, counted from 0")]
    NoRegion {
        /// The number.
        region: u32,
        /// The number of regions.
        regions: usize,
    },
    /// The bytes are not a whole number of elements.
    #[error("{bytes} are not a whole number of elements of {element}; use another element type")]
    NotWhole {
        /// The number of bytes.
        bytes: ByteCount,
        /// The element type.
        element: ElementType,
    },
    /// Sizes that no tensor can have.
    #[error("no tensor can have this shape; see the cause")]
    Shape(#[from] ShapeError),
    /// The layout does not have this piece.
    #[error("the layout does not have this piece; see the cause")]
    Layout(#[from] LayoutError),
    /// The layout's sections have strides within a block, so it has no contiguous pieces.
    #[error(
        "the layout has no contiguous pieces; use `tensors::kv_tensors`, which expresses strides"
    )]
    InParts,
    /// The blocks could not be held: a transfer reads or writes them.
    #[error("the blocks could not be held for the export; see the cause")]
    Held(#[from] TransferError),
}
