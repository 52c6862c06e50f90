//! The keys that jobs write or copy now. A key has at most one such job.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use terrane_core::sync::lock;

use crate::KeyHash;
use crate::store::sharded::Sharded;

/// The copy that a claim is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimKind {
    /// A put: no tier has the block yet.
    Put,
    /// A copy into a faster tier.
    Load,
    /// A copy into a slower tier.
    WriteBack,
}

/// All claims of jobs on keys.
#[derive(Default)]
pub(crate) struct Claims {
    shards: Sharded<HashMap<KeyHash, Arc<Claim>>>,
    count: AtomicUsize,
    /// The number of claims so far.
    begun: AtomicUsize,
}

/// The claim of a job on a key.
pub(crate) struct Claim {
    pub(crate) kind: ClaimKind,
    /// The key was removed meanwhile, so the job must not store the block.
    is_removed: AtomicBool,
    end: Mutex<ClaimEnd>,
}

#[derive(Default)]
struct ClaimEnd {
    has_ended: bool,
    waiting: Vec<Waker>,
}

/// Ends a claim on drop.
pub(crate) struct HeldClaim {
    claims: Arc<Claims>,
    claim: Arc<Claim>,
    key: KeyHash,
}

impl Claims {
    /// Claims a key, or returns the claim that another job has.
    pub(crate) fn claim(
        self: &Arc<Self>,
        key: KeyHash,
        kind: ClaimKind,
    ) -> Result<HeldClaim, Arc<Claim>> {
        match self.shards.lock(key).entry(key) {
            Entry::Occupied(other) => Err(Arc::clone(other.get())),
            Entry::Vacant(free) => {
                let claim = Arc::new(Claim {
                    kind,
                    is_removed: AtomicBool::new(false),
                    end: Mutex::default(),
                });
                free.insert(Arc::clone(&claim));
                self.count.fetch_add(1, Ordering::SeqCst);
                self.begun.fetch_add(1, Ordering::SeqCst);
                Ok(HeldClaim { claims: Arc::clone(self), claim, key })
            }
        }
    }

    pub(crate) fn get(&self, key: KeyHash) -> Option<Arc<Claim>> {
        self.shards.lock(key).get(&key).cloned()
    }

    /// The number of claims.
    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// The number of claims so far. It wraps around.
    pub(crate) fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    /// Marks the claim on a key as removed, if there is one: its job must not store the block.
    pub(crate) fn remove(&self, key: KeyHash) {
        if let Some(claim) = self.get(key) {
            claim.is_removed.store(true, Ordering::SeqCst);
        }
    }
}

impl Claim {
    /// Waits until the claim has ended.
    pub(crate) async fn wait(&self) {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut end = lock(&self.end);
            if end.has_ended {
                drop(end);
                return Poll::Ready(());
            }
            end.waiting.push(latest);
            Poll::Pending
        })
        .await;
    }
}

impl HeldClaim {
    pub(crate) fn is_removed(&self) -> bool {
        self.claim.is_removed.load(Ordering::SeqCst)
    }
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        self.claims.shards.lock(self.key).remove(&self.key);
        self.claims.count.fetch_sub(1, Ordering::SeqCst);
        let waiting = {
            let mut end = lock(&self.claim.end);
            end.has_ended = true;
            std::mem::take(&mut end.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}
