//! Memory that crosses to and from other libraries without a copy, and without losing track of who
//! owns it: DLPack tensors, and the KV tensors of serving engines.
//!
//! # Should I be using this crate?
//!
//! Use it directly to hand Terrane's memory to NumPy, PyTorch, JAX or TVM as tensors, to take
//! theirs as [`Memory`](terrane_core::Memory), or to lay KV blocks out in the tensors that a serving
//! engine has already. It knows the C structures, not Python: what carries a pointer from one side
//! to the other (a capsule of Python, say) is the caller's.
//!
//! # What it does not do
//!
//! It copies no element, converts no type, allocates nothing but the small structures of the
//! interfaces, and starts no thread. It does not decide when foreign code may touch memory: exports
//! of an [`Endpoint`](terrane_transfer::Endpoint)'s blocks hold them against transfers, and
//! everything else says in its `# Safety` what is owed.
//!
//! # What there is
//!
//! - [`dlpack`]: single tensors out and in, with every field checked, and the order of streams.
//! - [`tensors`]: the KV tensors of serving engines, as views of a layout and as a layout over them.
//! - [`InteropError`]: one error that the errors of all parts convert into.
//! - [`release_order`]: for crates that write release callbacks of other C interfaces.
//!
//! Arrow arrays and columns are in `terrane-arrow`.
//!
//! # Features
//!
//! - `cuda` (on by default): tensors of CUDA devices, and the order of streams. Without it,
//!   `terrane-cuda` is not compiled, and tensors of devices are refused with
//!   [`NoContext`](dlpack::ImportError::NoContext).
//!
//! # Example
//!
//! A tensor that another library owns becomes memory, and goes back to it when it drops.
//!
//! ```
//! use std::sync::Arc;
//!
//! use terrane_core::{ByteCount, ForeignMemory, HostAddress, Location, Memory, Region, Span};
//! use terrane_core::StorageKind;
//! use terrane_interop::dlpack::{ElementType, Importer, TensorExport, TensorShape};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Sixteen numbers of ours, with a count of who still has them.
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
//! // SAFETY: nothing writes the bytes while the tensor is out.
//! let tensor = unsafe { TensorExport::new(Region::new(memory), shape) }?.read_only();
//! let pointer = tensor.into_versioned()?.into_raw();
//!
//! // In: the other side checks every field, and owns the tensor from then on.
//! // SAFETY: the pointer is a managed tensor's that nobody else has.
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

/// The code of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod dlpack;
mod error;
pub mod release_order;
pub mod tensors;

pub use error::InteropError;
