//! The claims of orphaned transfers on the blocks of an endpoint.

use crate::hazard::table::HazardTable;

/// The claims of [orphaned](crate::CopyJob::orphan) transfers on the blocks of an endpoint; from
/// [`Endpoint::orphaned_claims`](crate::Endpoint::orphaned_claims).
///
/// It is for code that allocates block ids itself, without [`Slots`](crate::Slots). A block is not reused while
/// an orphaned transfer claims it. The value keeps no memory of the blocks alive.
#[derive(Clone)]
pub struct OrphanedClaims(HazardTable);

impl OrphanedClaims {
    pub(super) const fn new(hazards: HazardTable) -> Self {
        Self(hazards)
    }

    /// Whether an orphaned transfer claims the block now, because its copy may still read or write it.
    /// It is `false` in a forked process.
    ///
    /// The owner of a block learns of an orphaned transfer by its outcome. After this, the method returns
    /// `true` until the copy has ended. It takes no lock if no transfer of the endpoint is orphaned.
    ///
    /// The caller may hold another lock. The method takes only the lock of the endpoint's claims,
    /// under which no foreign code runs.
    #[must_use]
    pub fn has(&self, block: u32) -> bool {
        self.0.is_orphaned(block)
    }

    /// The number of claims of orphaned transfers that have ended. It takes no lock.
    ///
    /// As long as it does not change, no block becomes free of such claims: then there is no need to ask
    /// [`has`](Self::has) again for blocks that were claimed. Read it before that.
    #[must_use]
    pub fn ended(&self) -> usize {
        self.0.orphaned_ended()
    }
}

terrane_core::debug_fields!(OrphanedClaims {});
