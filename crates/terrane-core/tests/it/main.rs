//! Programs that must not compile.

mod compile_fail;
