//! The disk catalog.

mod crash;
mod damages;
mod directory;
mod harness;
mod history;
mod hooked;
mod killed;
mod recorder;
mod stripes;
