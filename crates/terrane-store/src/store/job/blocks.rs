//! The memory that a job reads or writes: blocks of an endpoint, or spans.

use std::ptr::NonNull;

use smallvec::SmallVec;
use terrane_core::{ByteCount, HostAddress};
use terrane_storage::{IoBuffer, IoMemory};
use terrane_transfer::Endpoint;

/// The source of a put, or the destination of a get: one block for each key.
///
/// It is a list of blocks of an [`Endpoint`], or a list of [`Spans`] of host memory.
///
/// ```no_run
/// # use terrane_store::Blocks;
/// # fn example(endpoint: &terrane_transfer::Endpoint) {
/// let whole = Blocks::new(endpoint, &[3, 7]);
/// // The last block has 5 tokens only.
/// let tail = Blocks::new(endpoint, &[3, 7]).tokens(&[16, 5]);
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a list of blocks does nothing until a job has it"]
pub struct Blocks {
    pub(crate) kind: BlocksKind,
}

#[derive(Clone)]
pub(crate) enum BlocksKind {
    Endpoint(EndpointBlocks),
    Spans(Spans),
}

#[derive(Clone)]
pub(crate) struct EndpointBlocks {
    pub(crate) endpoint: Endpoint,
    pub(crate) ids: SmallVec<[u32; 4]>,
    /// `None` for whole blocks.
    pub(crate) tokens: Option<Vec<u32>>,
}

impl EndpointBlocks {
    /// The number of tokens of a block; `None` for a whole one.
    pub(crate) fn tokens(&self, index: usize) -> Option<u32> {
        self.tokens.as_ref().and_then(|tokens| tokens.get(index)).copied()
    }
}

impl Blocks {
    /// Whole blocks of an endpoint. The n-th belongs to the n-th key.
    ///
    /// The job holds the blocks against other transfers until it has ended.
    pub fn new(endpoint: &Endpoint, blocks: &[u32]) -> Self {
        let (endpoint, ids) = (endpoint.clone(), SmallVec::from_slice(blocks));
        Self { kind: BlocksKind::Endpoint(EndpointBlocks { endpoint, ids, tokens: None }) }
    }

    /// Uses only the first tokens of each block: one number for each block, at least 1. It has no
    /// effect on spans.
    pub fn tokens(mut self, count: &[u32]) -> Self {
        if let BlocksKind::Endpoint(blocks) = &mut self.kind {
            blocks.tokens = Some(count.to_vec());
        }
        self
    }

    /// Spans of host memory, one or more for each key.
    ///
    /// # Safety
    ///
    /// Until the job has ended and its guard has been dropped, the following holds:
    ///
    /// - Each span is valid for its length: for reads in a put, for writes in a get.
    /// - No other code writes the spans of a put. No other code reads or writes those of a get.
    ///
    /// The guard that the job gets is the value that keeps this memory.
    #[expect(unsafe_code, reason = "the caller keeps the memory valid")]
    pub const unsafe fn spans(spans: Spans) -> Self {
        Self { kind: BlocksKind::Spans(spans) }
    }

    /// The number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.kind {
            BlocksKind::Endpoint(blocks) => blocks.ids.len(),
            BlocksKind::Spans(spans) => spans.len(),
        }
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

terrane_core::debug_fields!(Blocks, |it| { len: it.len() });

/// Host memory of one block after the other: for each one or more pairs of pointer and length.
///
/// The bytes of a block are those of its spans, in their order. Addresses and lengths need no
/// alignment. Whole pages at aligned addresses go to disk without a copy.
///
/// Adding spans is safe: only [`Blocks::spans`] states that the memory is valid.
#[derive(Clone, Debug, Default)]
pub struct Spans {
    buffers: Vec<IoBuffer>,
    /// The end of each block in `buffers`.
    ends: Vec<usize>,
    memory: Option<IoMemory>,
}

impl Spans {
    /// No blocks.
    #[must_use]
    pub const fn new() -> Self {
        Self { buffers: Vec::new(), ends: Vec::new(), memory: None }
    }

    /// Adds a block of one span of this many bytes.
    pub fn add(&mut self, start: NonNull<u8>, bytes: usize) {
        self.add_block([(start, bytes)]);
    }

    /// Adds a block of several spans.
    pub fn add_block(&mut self, parts: impl IntoIterator<Item = (NonNull<u8>, usize)>) {
        self.buffers.extend(parts.into_iter().filter(|(_, bytes)| *bytes > 0).map(
            |(start, bytes)| IoBuffer {
                address: HostAddress::new(start),
                length: ByteCount::from_usize(bytes),
            },
        ));
        self.ends.push(self.buffers.len());
    }

    /// States the memory that the spans are in. Direct reads and writes of it cost less processor time:
    /// the kernel pins its pages once, not for each of them.
    #[must_use]
    pub fn within(self, memory: &IoMemory) -> Self {
        Self { memory: Some(memory.clone()), ..self }
    }

    /// The memory that the spans are in, if it was stated.
    pub(crate) const fn memory(&self) -> Option<&IoMemory> {
        self.memory.as_ref()
    }

    /// The number of blocks.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no blocks.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The spans of one block.
    pub(crate) fn block(&self, index: usize) -> &[IoBuffer] {
        let begin = index.checked_sub(1).and_then(|before| self.ends.get(before));
        let end = self.ends.get(index).copied().unwrap_or(0);
        self.buffers.get(begin.copied().unwrap_or(0)..end).unwrap_or_default()
    }
}
