//! Registered buffers: memory whose pages the kernel pins once, instead of for every request.

mod memory;
mod policy;
mod table;

pub use memory::IoMemory;
pub use policy::IoRegistration;
pub(super) use policy::Registrar;
