//! Helpers that several tests share.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;

use terrane_core::{Allocate, ByteCount, RegionRequest};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig};
use terrane_testkit::memory::{HeapAllocator, HeapMemory};

/// The POSIX backend with few I/Os, because allocating them is slow.
pub fn posix() -> BackendConfig {
    BackendConfig::new("POSIX").parameter("ios_pool_size", "64")
}

pub fn agent(backends: impl IntoIterator<Item = BackendConfig>) -> Agent {
    backends.into_iter().fold(AgentBuilder::unnamed(), AgentBuilder::backend).build().unwrap()
}

pub fn memory(bytes: ByteCount) -> HeapMemory {
    HeapAllocator::system().allocate(&RegionRequest::new(bytes)).unwrap()
}

/// An error and its sources, in one line.
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

/// Compiles a library with functions of these names, which return 1.
pub fn compile<'s>(to: &Path, functions: impl IntoIterator<Item = &'s &'s str>) {
    let source = to.with_extension("c");
    let function = |name: &&str| format!("int {name}(void) {{ return 1; }}\n");
    fs::write(&source, functions.into_iter().map(function).collect::<String>()).unwrap();
    let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(to).arg(&source).status();
    assert!(status.unwrap().success(), "the C compiler that Rust links with");
}
