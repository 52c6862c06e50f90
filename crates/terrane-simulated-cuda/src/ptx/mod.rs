//! Kernels as PTX texts, interpreted warp by warp.
//!
//! The subset is the output of a compiler for kernels that move integers: arithmetic and logic of 8
//! to 64 bits, comparisons, branches, loads and stores of vectors, shared and local memory,
//! barriers, atomic integer operations. Floating-point arithmetic, textures, warp-wide operations
//! and calls are refused when the module is loaded, by the name of the instruction. Every access is
//! checked against the allocations and against its alignment.

mod accesses;
mod arithmetic;
mod instruction;
mod launch;
mod operands;
mod parse;
mod warp;

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
    /// Parses a text.
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
    /// The offset of each parameter in the parameter space, and its number of bytes.
    parameters: Vec<(usize, usize)>,
    code: Vec<Instruction>,
    /// The number of registers of a thread.
    registers: usize,
    /// The bytes of a block's shared memory, without those that a launch adds.
    shared: usize,
    /// The bytes of a thread's local memory.
    local: usize,
    /// The maximum number of threads of a block.
    most_threads: u64,
    has_barriers: bool,
}

impl Kernel {
    pub fn parameter_sizes(&self) -> Vec<usize> {
        self.parameters.iter().map(|&(_, size)| size).collect()
    }
}
