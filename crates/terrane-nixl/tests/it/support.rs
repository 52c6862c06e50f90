//! What several tests need.

use std::error::Error;

use terrane_core::{Allocate, ByteCount, RegionRequest};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig};
use terrane_testkit::memory::{HeapAllocator, HeapMemory};

/// The POSIX backend with few requests prepared, which is what takes time.
pub fn posix() -> BackendConfig {
    BackendConfig::new("POSIX").parameter("ios_pool_size", "64")
}

pub fn agent(backends: impl IntoIterator<Item = BackendConfig>) -> Agent {
    backends.into_iter().fold(AgentBuilder::unnamed(), AgentBuilder::backend).build().unwrap()
}

pub fn memory(bytes: ByteCount) -> HeapMemory {
    HeapAllocator::system().allocate(&RegionRequest::new(bytes)).unwrap()
}

/// An error and all that it came from, in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
