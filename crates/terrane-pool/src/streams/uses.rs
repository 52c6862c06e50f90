//! The streams that use a block.

use smallvec::SmallVec;

use crate::streams::fence::{Access, StreamId};

/// The streams that a block must wait for before it is free for all.
#[derive(Debug, Default)]
pub(crate) struct StreamUses {
    pub(crate) own: Option<StreamId>,
    /// Boxed, because few blocks have uses: the first cache line of a record stays short.
    uses: Option<Box<Uses>>,
}

type Uses = SmallVec<[(StreamId, Access); 4]>;

impl StreamUses {
    /// Returns whether no stream uses the block.
    #[inline]
    pub(crate) fn is_free(&self) -> bool {
        self.own.is_none() && self.uses.is_none()
    }

    /// Returns the stream that the block was released on, if no other stream uses it.
    #[inline]
    pub(crate) fn only_own(&self) -> Option<StreamId> {
        self.own.filter(|_| self.uses.is_none())
    }

    pub(crate) fn record(&mut self, stream: StreamId, access: Access) {
        if self.own == Some(stream) {
            return;
        }
        let uses = self.uses.get_or_insert_default();
        match uses.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, strongest)) => *strongest = access.max(*strongest),
            None => uses.push((stream, access)),
        }
    }

    /// Removes the uses of a stream.
    pub(crate) fn forget(&mut self, stream: StreamId) {
        if let Some(uses) = &mut self.uses {
            uses.retain(|&mut (other, _)| other != stream);
            if uses.is_empty() {
                self.uses = None;
            }
        }
    }

    /// Returns the streams other than the own stream that use the block, and their accesses.
    pub(crate) fn others(&self) -> &[(StreamId, Access)] {
        self.uses.as_ref().map_or(&[], |uses| uses.as_slice())
    }

    /// Iterates over the streams, each once.
    pub(crate) fn streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.own.into_iter().chain(self.others().iter().map(|&(stream, _)| stream))
    }
}
