//! Exchanges memory with other libraries without a copy and with defined ownership: DLPack tensors,
//! and the KV tensors of serving engines.
//!
//! # Should I be using this crate?
//!
//! Use it directly to export Terrane's memory to NumPy, PyTorch, JAX or TVM as tensors, or to
//! import their tensors as [`Memory`](terrane_core::Memory). It can also build a layout over the
//! existing tensors of a serving engine. It handles the C structures, not Python: the caller passes
//! pointers between the sides, for example in a Python capsule.
//!
//! # Limits of this crate
//!
//! It copies no element, converts no type, allocates only the small structures of the interfaces,
//! and starts no thread. It does not decide when foreign code may access memory. Exports of an
//! [`Endpoint`](terrane_transfer::Endpoint)'s blocks hold the blocks against transfers. Other
//! functions state their requirements in `# Safety`.
//!
//! # Contents
//!
//! - [`dlpack`]: export and import of single tensors, with every field checked, and stream order.
//! - [`tensors`]: the KV tensors of serving engines, as views of a layout and as a layout over
//!   them.
//! - [`release_order`]: for crates that implement the release callbacks of other C interfaces.
//!
//! Arrow arrays and columns are in `terrane-arrow`.
//!
//! # Features
//!
//! - `cuda` (on by default): tensors of CUDA devices, and stream order. Without it, `terrane-cuda`
//!   is not compiled, and device tensors are refused with
//!   [`NoContext`](dlpack::ImportError::NoContext).
//!
//! # Example
//!
//! A tensor that another library owns becomes memory. It is released to that library when it drops.
//!
//! ```
//! use std::sync::Arc;
//!
//! use terrane_core::{ByteCount, ForeignMemory, HostAddress, Location, Memory, Region, Span};
//! use terrane_core::StorageKind;
//! use terrane_interop::dlpack::{ElementType, Importer, TensorExport, TensorShape};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Sixteen numbers with a reference count.
//! let numbers = Arc::new([1_f32; 16]);
//! let address = HostAddress::new(std::ptr::NonNull::from(&*numbers));
//! let span = Span {
//!     kind: StorageKind::System,
//!     location: Location::Host(address),
//!     length: ByteCount::new(64),
//! };
//! // SAFETY: the array owns the bytes and does not move them; below they are only read.
//! let memory = unsafe { ForeignMemory::new(span, Arc::clone(&numbers)) };
//!
//! // Out: a managed tensor of DLPack 1.x, which a consumer takes by its pointer.
//! let shape = TensorShape::compact(ElementType::F32, &[4, 4])?;
//! // SAFETY: nothing writes the bytes while the tensor is exported.
//! let tensor = unsafe { TensorExport::new(Region::new(memory), shape) }?.read_only();
//! let pointer = tensor.into_versioned()?.into_raw();
//!
//! // In: the other side checks every field, and owns the tensor from then on.
//! // SAFETY: the pointer is that of a managed tensor, and no other code has it.
//! let imported = unsafe { Importer::new().versioned(pointer.as_ptr()) }?;
//! assert_eq!(imported.shape().sizes(), [4, 4]);
//! assert_eq!(imported.location(), Location::Host(address));
//! assert!(imported.is_read_only() && imported.memory().is_err());
//! assert_eq!(Arc::strong_count(&numbers), 2);
//! drop(imported);
//! assert_eq!(Arc::strong_count(&numbers), 1);
//! # Ok(())
//! # }
//! ```

/// Compiles and runs the README's example as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod dlpack;
pub mod release_order;
pub mod tensors;

// Re-exported, because public signatures use its types.
#[doc(no_inline)]
pub use terrane_core;
#[cfg(feature = "cuda")]
#[doc(no_inline)]
pub use terrane_cuda;
#[doc(no_inline)]
pub use terrane_layout;
#[doc(no_inline)]
pub use terrane_transfer;
