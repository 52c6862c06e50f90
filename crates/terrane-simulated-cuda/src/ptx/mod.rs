//! Kernels as PTX texts, interpreted: what a device would run, thread by thread.
//!
//! The subset is what a compiler makes of kernels that move integers about: arithmetic and logic
//! of 8 to 64 bits, comparisons, branches, loads and stores of vectors, shared and local memory,
//! barriers, atomic integer operations. Floating-point arithmetic, textures, warp-wide operations
//! and calls are refused when the module is loaded, by the name of the instruction. Every access is
//! checked against what is allocated and against its alignment.

mod execute;
mod instruction;
mod launch;
mod operands;
mod parse;

use std::collections::BTreeMap;
use std::sync::Arc;

use instruction::Instruction;
pub use launch::Launch;

/// The kernels of one text.
#[derive(Debug)]
pub struct Module {
    kernels: BTreeMap<String, Arc<Kernel>>,
}

impl Module {
    /// Reads a text.
    ///
    /// # Errors
    ///
    /// A description of the unsupported text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let kernels = parse::kernels(text)?;
        let named = kernels.into_iter().map(|kernel| (kernel.name.clone(), Arc::new(kernel)));
        Ok(Self { kernels: named.collect() })
    }

    pub fn kernel(&self, name: &str) -> Option<Arc<Kernel>> {
        self.kernels.get(name).cloned()
    }
}

/// A kernel that can be launched.
#[derive(Debug)]
pub struct Kernel {
    name: String,
    /// Where each parameter is in the space of parameters, and how many bytes it has.
    parameters: Vec<(usize, usize)>,
    code: Vec<Instruction>,
    /// How many registers a thread has.
    registers: usize,
    /// The bytes that a block shares, without those that a launch adds.
    shared: usize,
    /// The bytes that a thread has to itself.
    local: usize,
    /// The most threads that a block may have.
    most_threads: u64,
    has_barriers: bool,
}

impl Kernel {
    pub fn parameter_sizes(&self) -> Vec<usize> {
        self.parameters.iter().map(|&(_, size)| size).collect()
    }
}
