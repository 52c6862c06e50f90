//! The disk catalog.

mod crash;
mod damages;
mod directory;
mod harness;
mod killed;
mod recorder;
