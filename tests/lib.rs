//! Tests of the crates together. The library itself is empty.

#![forbid(unsafe_code)]
