//! The input of a plan.

use terrane_core::ByteCount;
use terrane_layout::ElementFormat;

use crate::machine::Machine;
use crate::model::Model;
use crate::trace::Trace;

/// The input of a [`Plan`](crate::Plan).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlanRequest {
    /// The model.
    pub model: Model,
    /// Tensor-parallel ranks, all on this machine. 1 by default.
    pub tensor_parallel: u32,
    /// The format of K, V and latents, if it is not that of the configuration.
    pub kv_element: Option<ElementFormat>,
    /// Tokens of a block. 16 by default.
    pub block_tokens: u32,
    /// Tokens of a chunk, the unit that a cache shares. 256 by default.
    pub chunk_tokens: u32,
    /// The memory of each device that is available to the cache.
    pub device: Option<ByteCount>,
    /// Host memory for the cache, a total of all ranks.
    pub host: Option<ByteCount>,
    /// Disk space for the cache, a total of all ranks.
    pub disks: Vec<DiskSpace>,
    /// Tokens of a user's context.
    pub context: Option<u64>,
    /// The number of users, each with one context.
    pub users: Option<u64>,
    /// The machine.
    pub machine: Option<Machine>,
    /// The requested keys, in their order.
    pub trace: Option<Trace>,
}

/// Disk space for the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpace {
    /// The directory.
    pub directory: String,
    /// The bytes for the cache.
    pub bytes: ByteCount,
}

impl PlanRequest {
    /// One rank, blocks of 16 tokens, chunks of 256 tokens, and no tier.
    #[must_use]
    pub const fn new(model: Model) -> Self {
        Self {
            model,
            tensor_parallel: 1,
            kv_element: None,
            block_tokens: 16,
            chunk_tokens: 256,
            device: None,
            host: None,
            disks: Vec::new(),
            context: None,
            users: None,
            machine: None,
            trace: None,
        }
    }
}
