//! Memory that crosses to and from other libraries: DLPack tensors, Arrow arrays, columns.

pub mod arrow;
pub mod columns;
