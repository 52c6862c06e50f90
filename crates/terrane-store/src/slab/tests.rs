//! Tests of the slab files: real files, real I/O.
