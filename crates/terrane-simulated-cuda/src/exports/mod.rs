//! The driver's functions, with the names and parameters of its documentation.
//!
//! Handles are 64-bit numbers here. C passes them like the pointers that `cuda.h` declares.
//! Pointers are [`Out`] and [`In`].
#![allow(non_snake_case, reason = "the names are the driver's, as its documentation has them")]

mod arguments;
mod contexts;
mod copies;
mod devices;
pub(crate) mod entry;
mod events;
mod memory;
mod modules;
mod pools;
mod simulation;
mod streams;

pub use arguments::{In, Out};
pub use contexts::*;
pub use copies::*;
pub use devices::*;
pub use events::*;
pub use memory::*;
pub use modules::*;
pub use pools::*;
pub use simulation::*;
pub use streams::*;

/// Finds a function by its documented name, without a version suffix: the newest one in `version`
/// of CUDA.
#[expect(unused_qualifications, reason = "every module has a function of this name")]
fn find(name: &str, version: i32) -> Option<*const ()> {
    let newest = format!("{name}_v2");
    let is_of_13 = name == "cuMemcpyBatchAsync" || name == "cuEventElapsedTime";
    let newest = if is_of_13 && version < 13_000 { name } else { &newest };
    [newest, name].into_iter().find_map(|name| {
        contexts::symbol(name)
            .or_else(|| copies::symbol(name))
            .or_else(|| devices::symbol(name))
            .or_else(|| events::symbol(name))
            .or_else(|| memory::symbol(name))
            .or_else(|| modules::symbol(name))
            .or_else(|| pools::symbol(name))
            .or_else(|| simulation::symbol(name))
            .or_else(|| streams::symbol(name))
    })
}
