//! Arrow arrays and columnar buffers in the memory of a device.

mod arrays;
mod buffers;
pub mod support;

pub use arrays::foreign;
