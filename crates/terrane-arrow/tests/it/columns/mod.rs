//! Columns and columnar buffers over every kind of memory that the processor can access.

mod buffers;
mod hostile;
mod parts;
mod tensors;
