//! The copy engine over the real library.

mod conformance;
mod support;
