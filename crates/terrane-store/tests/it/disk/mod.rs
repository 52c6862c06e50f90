//! The disk catalog.

mod crash;
mod harness;
mod recorder;
