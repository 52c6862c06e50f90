//! Tests of the crates together; there is nothing here for anybody to use.

#![forbid(unsafe_code)]
