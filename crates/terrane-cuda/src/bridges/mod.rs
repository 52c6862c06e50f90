//! Connections of devices to pools, transfers, debug adaptors and `cudarc`.

pub mod cudarc;
pub(crate) mod debug_fill;
pub(crate) mod pool_streams;
mod transfer_order;
