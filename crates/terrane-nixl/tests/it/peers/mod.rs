//! Layouts that agents exchange.

mod exports;
mod imports;
mod support;
