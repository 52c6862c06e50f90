//! Columns and columnar buffers over every kind of memory that the processor can reach.

mod buffers;
mod hostile;
mod parts;
mod tensors;
