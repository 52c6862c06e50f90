//! Layouts that travel between agents.

mod exports;
mod imports;
mod support;
