//! The accounts: how many things of each sort are alive.

use std::sync::atomic::{AtomicI64, Ordering};

/// What is counted, by the number under which Python asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Account {
    /// Memory that this library allocated.
    Memory,
    /// Foreign things that were taken in: tensors, arrays.
    Imports,
}

static COUNTS: [AtomicI64; 2] = [const { AtomicI64::new(0) }; 2];

/// One entry in an account, until it drops.
#[derive(Debug)]
pub(crate) struct Entry(Account);

impl Entry {
    pub(crate) fn new(account: Account) -> Self {
        count(account).fetch_add(1, Ordering::SeqCst);
        Self(account)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        count(self.0).fetch_sub(1, Ordering::SeqCst);
    }
}

fn count(account: Account) -> &'static AtomicI64 {
    let [memory, imports] = &COUNTS;
    match account {
        Account::Memory => memory,
        Account::Imports => imports,
    }
}

/// How many pieces of memory that this library allocated are alive.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn terrane_proof_live_memory() -> i64 {
    count(Account::Memory).load(Ordering::SeqCst)
}

/// How many foreign things that were taken in are alive.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn terrane_proof_live_imports() -> i64 {
    count(Account::Imports).load(Ordering::SeqCst)
}
