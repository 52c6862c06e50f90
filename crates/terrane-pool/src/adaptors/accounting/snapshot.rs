//! A structured dump of every block, live and cached.

use terrane_core::{ByteCount, Label, Span};

/// Every block of some sources, each source at one instant.
///
/// With the feature `serde` it can be serialised. `to_json` documents the format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The blocks, source by source.
    pub blocks: Vec<BlockRecord>,
}

/// One block of a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRecord {
    /// The kind, location and length.
    pub span: Span,
    /// The bytes requested; zero for a cached block.
    pub requested: ByteCount,
    /// The label of the owner.
    pub tag: Label,
    /// The state of the block.
    pub state: BlockState,
    /// The number of the allocation at its source, from 1; 0 if the source does not count.
    pub sequence: u64,
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum BlockState {
    /// In use.
    Live,
    /// Freed, but some stream may still use it.
    Pending,
    /// Freed, and kept for the next request.
    Cached,
}

impl BlockState {
    /// The state's name in a serialised snapshot.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Pending => "pending",
            Self::Cached => "cached",
        }
    }
}

/// A source that can list its blocks.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot list its blocks",
    label = "it does not implement `Inspect`",
    note = "a `Pool` lists its free blocks; the `LiveBlocks` of a `Tags` list the blocks in use"
)]
pub trait Inspect {
    /// Calls `visit` with every block, as of one instant, without a lock.
    fn inspect(&self, visit: &mut dyn FnMut(BlockRecord));
}

impl Snapshot {
    /// Collects the blocks of all `sources`, one source after another. A [`Pool`](crate::Pool)
    /// lists its free blocks. The table of a [`Tags`](crate::adaptors::Tags) around it lists the
    /// blocks in use.
    #[must_use]
    pub fn of(sources: &[&dyn Inspect]) -> Self {
        let mut blocks = Vec::new();
        for source in sources {
            source.inspect(&mut |block| blocks.push(block));
        }
        Self { blocks }
    }
}

#[cfg(feature = "serde")]
mod json {
    use super::{BlockRecord, Snapshot};
    use serde::ser::{Serialize, SerializeStruct, Serializer};

    /// The version of the serialised form.
    const VERSION: u32 = 1;

    impl Snapshot {
        /// Returns the snapshot as JSON:
        /// `{"version": 1, "blocks": [{"kind": "device 0", "address": "0x…", "bytes": 512,
        /// "requested": 300, "tag": "kv", "state": "live", "sequence": 7}, …]}`.
        ///
        /// Addresses are strings, because many readers of JSON lose the low bits of large numbers.
        ///
        /// # Errors
        ///
        /// The error of `serde_json`, which does not occur on writing to memory.
        pub fn to_json(&self) -> Result<String, serde_json::Error> {
            serde_json::to_string_pretty(self)
        }
    }

    impl Serialize for Snapshot {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut snapshot = serializer.serialize_struct("Snapshot", 2)?;
            snapshot.serialize_field("version", &VERSION)?;
            snapshot.serialize_field("blocks", &self.blocks)?;
            snapshot.end()
        }
    }

    impl Serialize for BlockRecord {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let address = self.span.location.position().start;
            let mut block = serializer.serialize_struct("BlockRecord", 7)?;
            block.serialize_field("kind", &self.span.kind.to_string())?;
            block.serialize_field("address", &format!("{address:#x}"))?;
            block.serialize_field("bytes", &self.span.length.get())?;
            block.serialize_field("requested", &self.requested.get())?;
            block.serialize_field("tag", self.tag.as_str())?;
            block.serialize_field("state", self.state.as_str())?;
            block.serialize_field("sequence", &self.sequence)?;
            block.end()
        }
    }
}
