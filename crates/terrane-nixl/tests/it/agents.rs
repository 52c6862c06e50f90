//! Agents, their backends, and what they register.

use terrane_core::{Allocate, ByteCount, RegionRequest, Register};
use terrane_nixl::{AgentBuilder, BackendConfig};
use terrane_testkit::memory::HeapAllocator;

#[test]
fn system_memory_is_registered_with_each_backend() {
    let agent = AgentBuilder::unnamed()
        .backend(BackendConfig::new("UCX"))
        .backend(BackendConfig::new("POSIX"))
        .build()
        .unwrap();
    let request = RegionRequest::new(ByteCount::mib(1));
    let memory = HeapAllocator::system().allocate(&request).unwrap();
    let registered = agent.register(memory).unwrap();
    drop(agent);
    assert!(registered.record().accepted_by(&"UCX".into()), "{:?}", registered.record());
    drop(registered.into_memory());
}
