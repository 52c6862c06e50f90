//! The choice between the ways to copy, and the measurement of their costs.

pub(crate) mod choice;
pub(crate) mod measure;
pub(crate) mod quote;
