//! Registration of memory with an agent's backends.

pub(crate) mod allocator;
pub(crate) mod descriptor;
pub(crate) mod held;
pub(crate) mod refusal;
pub(crate) mod registrar;
pub(crate) mod table;
#[cfg(test)]
mod tests;
mod ucx_modules;
