//! Plans the memory of a KV cache from a model's config and a machine's description.
//!
//! # Should I be using this crate?
//!
//! Use it to compute the memory that a model needs on each tier of a machine, before any memory
//! exists. The results are bytes of tokens, blocks and chunks, padding, huge pages, registrations,
//! and predicted times. The command `terrane plan` prints them. To build the layouts themselves,
//! use `terrane-layout`.
//!
//! # Limits of this crate
//!
//! It does no I/O and examines no machine: the caller passes a [`Machine`], or none. It predicts a
//! time only if the machine has a rate, and names the origin of that rate. It does not know weights
//! and activations, so the caller states the device memory that is available to the cache.
//!
//! # Example
//!
//! ```
//! use terrane_core::ByteCount;
//! use terrane_plan::{Model, Plan, PlanRequest};
//!
//! # fn main() -> Result<(), terrane_plan::PlanError> {
//! let mut request = PlanRequest::new(Model::published("llama-3.1-8b")?);
//! request.host = Some(ByteCount::gib(256));
//! let plan = Plan::new(&request)?;
//! assert_eq!(plan.groups[0].bytes_per_token, 131_072);
//! // A block of 16 tokens has 2 MiB.
//! assert_eq!(plan.tiers[0].blocks, 131_072);
//! assert_eq!(plan.tiers[0].tokens, 2_097_152);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

/// Compiles and runs the README's example as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod error;
mod machine;
mod model;
mod plan;
mod request;
mod sizes;
mod trace;

pub use error::PlanError;
pub use machine::{
    CopyCost, DeviceFacts, DiskFacts, HostFacts, Machine, Rates, published_machines,
};
pub use model::{Model, published_models};
pub use plan::advice::Saving;
pub use plan::engines::EngineOptions;
pub use plan::groups::{Demand, GroupPlan};
pub use plan::limits::LimitHit;
pub use plan::memory::{HostNeeds, Padding, TierGroup, TierKind, TierPlan};
pub use plan::predictions::Prediction;
pub use plan::{MachineSummary, ModelSummary, Plan};
pub use request::{DiskSpace, PlanRequest};
pub use sizes::{parse_bytes, parse_count};
pub use trace::{HitRatio, Trace, TraceReport};
