//! Counts live resources, so that the tests can find leaks.

use std::sync::atomic::{AtomicI64, Ordering};

/// The counted resources, with the numbers that Python uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Resource {
    /// Memory that this library allocated.
    Memory,
    /// Imported foreign values: tensors, arrays.
    Imports,
}

static COUNTS: [AtomicI64; 2] = [const { AtomicI64::new(0) }; 2];

/// One counted resource, until it drops.
#[derive(Debug)]
pub(crate) struct LiveCount(Resource);

impl LiveCount {
    pub(crate) fn new(resource: Resource) -> Self {
        count(resource).fetch_add(1, Ordering::SeqCst);
        Self(resource)
    }
}

impl Drop for LiveCount {
    fn drop(&mut self) {
        count(self.0).fetch_sub(1, Ordering::SeqCst);
    }
}

fn count(resource: Resource) -> &'static AtomicI64 {
    let [memory, imports] = &COUNTS;
    match resource {
        Resource::Memory => memory,
        Resource::Imports => imports,
    }
}

/// The number of live allocations of this library.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn terrane_proof_live_memory() -> i64 {
    count(Resource::Memory).load(Ordering::SeqCst)
}

/// The number of live imported values.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn terrane_proof_live_imports() -> i64 {
    count(Resource::Imports).load(Ordering::SeqCst)
}
