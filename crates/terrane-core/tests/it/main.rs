//! What users of the crate cannot write.

mod compile_fail;
