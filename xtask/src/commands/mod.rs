//! One module for each command of `cargo xtask`; `tidy` has its own folder.

pub mod asan;
pub mod bench;
pub mod calibrate;
pub mod ci;
pub mod compose;
pub mod deny;
pub mod doc;
pub mod examples;
pub mod features;
pub mod gpu;
pub mod interop;
pub mod kernels;
pub mod lint;
pub mod loom;
pub mod miri;
pub mod nixl;
pub mod offload;
pub mod package;
pub mod peers;
pub mod python;
pub mod remote;
pub mod simulated;
pub mod soak;
pub mod test;
