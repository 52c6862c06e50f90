//! The bytes that a pool holds of its upstream.

use std::sync::Arc;

use terrane_core::Memory;

use crate::adaptors::attached::Attached;
use crate::sync::{AtomicU64, Ordering};

/// Memory obtained from the upstream. It counts to the pool's account until it is freed.
pub(crate) type Held<M> = Attached<M, (), Charge>;

#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The bytes that a pool holds of its upstream. They change when blocks are allocated from the
/// upstream or freed to it, never on a hit.
#[derive(Debug, Default)]
pub(crate) struct Account {
    held: AtomicU64,
    peak: AtomicU64,
}

impl Account {
    /// Charges the account with `memory`.
    pub(crate) fn hold<M: Memory>(self: &Arc<Self>, memory: M) -> Held<M> {
        let bytes = memory.length().get();
        let before = self.held.fetch_add(bytes, Ordering::Relaxed);
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
        Attached::after(memory, Charge { account: Arc::clone(self), bytes })
    }

    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}
