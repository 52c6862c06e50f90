//! DLPack, the structure with which array libraries exchange tensors: export, import, and the
//! stream order between the two sides.
//!
//! Both forms are supported: the versioned one of [DLPack 1.x], and the legacy one before it. The C
//! definitions come from the crate `dlpack-rs` ([`ffi`]). This module checks every field that it
//! reads.
//!
//! # Export
//!
//! A [`TensorExport`] is a strided view of a [`Region`](terrane_core::Region), or of blocks of an
//! [`Endpoint`](terrane_transfer::Endpoint). It becomes a [`ManagedTensor`], whose pointer is
//! passed to a consumer. When the consumer has finished, it calls the deleter on any thread. The
//! memory lives until then. A second call of a deleter does nothing, as long as no other tensor has
//! the same address. Blocks of an endpoint stay held until the deleter has run: no transfer writes
//! bytes that the consumer reads, or accesses bytes that it writes. For memory that devices access,
//! the export also states how the end of device work is detected.
//!
//! # Import
//!
//! An [`Importer`] gets such a pointer, checks every field, and returns an [`ImportedTensor`] or an
//! [`ImportError`]. The deleter is called exactly once in either case. If the tensor is refused, it
//! is called at once. Otherwise it is called when the last clone of the tensor, and the last memory
//! of it, has dropped. A null deleter is legal and is not called.
//!
//! | field | refused values |
//! |---|---|
//! | the pointer itself | null, misaligned, already imported and still alive |
//! | version | a major version other than 1; only the deleter is used then |
//! | `ndim` | negative, or more than [`MOST_AXES`] |
//! | `shape` | null or misaligned although there are axes, a negative size, sizes whose product overflows |
//! | `strides` | misaligned, negative, zero with more than one element, elements that overlap. Null is compact |
//! | `dtype` | an unknown code, no bits, no lanes, bits that the code does not have |
//! | `device` | an unknown type or number, a device without a context here, memory that its driver does not know |
//! | `data`, `byte_offset` | null although there are elements, sums that overflow, an address that is misaligned for the element |
//!
//! # Stream order
//!
//! A [`ConsumerStream`] is the `stream` argument of `__dlpack__` in the array API standard. The
//! function `handshake` (feature `cuda`) makes it wait for the producer's stream.
//!
//! [DLPack 1.x]: https://dmlc.github.io/dlpack/latest/c_api.html

pub(crate) mod blocks;
mod deleter;
mod device;
mod element;
mod error;
mod export;
#[cfg(feature = "cuda")]
mod handshake;
mod import;
mod live_tensors;
mod managed;
mod shape;
mod stream;

pub use device::TensorDevice;
pub use element::{ElementType, ElementTypeError, TypeCode};
pub use error::{ExportError, ImportError};
pub use export::TensorExport;
#[cfg(feature = "cuda")]
pub use handshake::{Handshake, ProducerStream, handshake};
pub use import::{ImportedTensor, Importer};
pub use managed::{ManagedTensor, Structure};
pub use shape::{MOST_AXES, ShapeError, TensorShape};
pub use stream::{ConsumerStream, StreamError};

/// The C definitions of `dlpack.h`, under its names.
pub mod ffi {
    pub use dlpack_rs::ffi::{
        DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    };

    use std::mem::{offset_of, size_of};

    // Common to every library that supports DLPack on a 64-bit machine.
    const _: () = assert!(
        size_of::<DLTensor>() == 48
            && offset_of!(DLTensor, device) == 8
            && offset_of!(DLTensor, ndim) == 16
            && offset_of!(DLTensor, dtype) == 20
            && offset_of!(DLTensor, shape) == 24
            && offset_of!(DLTensor, strides) == 32
            && offset_of!(DLTensor, byte_offset) == 40
            && size_of::<DLManagedTensor>() == 64
            && offset_of!(DLManagedTensor, manager_ctx) == 48
            && offset_of!(DLManagedTensor, deleter) == 56
            && size_of::<DLManagedTensorVersioned>() == 80
            && offset_of!(DLManagedTensorVersioned, manager_ctx) == 8
            && offset_of!(DLManagedTensorVersioned, deleter) == 16
            && offset_of!(DLManagedTensorVersioned, flags) == 24
            && offset_of!(DLManagedTensorVersioned, dl_tensor) == 32,
        "the definitions of DLPack differ from those of its header"
    );
}
