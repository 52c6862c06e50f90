//! A straightforward kernel that copies pieces from one device to another: the baseline.

use std::ffi::{CStr, c_void};

use anyhow::Result;
use terrane_cuda::{DeviceMemory, Stream};
use terrane_transfer::Endpoint;

use crate::bindings::Kernel;
use crate::methods::{pieces, put};
use crate::setup::Setup;

/// The numbers of thread blocks: one or two for each multiprocessor of an H100 or H200.
pub const THREAD_BLOCKS: [u32; 2] = [132, 264];

/// The threads of a thread block.
const THREADS: u32 = 512;
/// The bytes that a thread copies with one load and one store.
const WORD: usize = 16;

/// A thread block copies every n-th piece, where n is the number of thread blocks.
const PTX: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry plain_copy(
    .param .u64 sources, .param .u64 destinations, .param .u32 words, .param .u32 pieces
)
{
    .reg .pred %more;
    .reg .b32 %piece, %pieces, %blocks, %word, %words, %first, %threads, %a, %b, %c, %d;
    .reg .b64 %sources, %destinations, %from, %to, %offset, %at;
    ld.param.u64 %sources, [sources];
    ld.param.u64 %destinations, [destinations];
    ld.param.u32 %words, [words];
    ld.param.u32 %pieces, [pieces];
    mov.u32 %piece, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %first, %tid.x;
    mov.u32 %threads, %ntid.x;
    setp.ge.u32 %more, %piece, %pieces;
    @%more bra END;
PIECE:
    mul.wide.u32 %offset, %piece, 8;
    add.u64 %at, %sources, %offset;
    ld.global.u64 %from, [%at];
    add.u64 %at, %destinations, %offset;
    ld.global.u64 %to, [%at];
    mov.u32 %word, %first;
    setp.ge.u32 %more, %word, %words;
    @%more bra NEXT;
WORD:
    mul.wide.u32 %offset, %word, 16;
    add.u64 %at, %from, %offset;
    ld.global.v4.u32 {%a, %b, %c, %d}, [%at];
    add.u64 %at, %to, %offset;
    st.global.v4.u32 [%at], {%a, %b, %c, %d};
    add.u32 %word, %word, %threads;
    setp.lt.u32 %more, %word, %words;
    @%more bra WORD;
NEXT:
    add.u32 %piece, %piece, %blocks;
    setp.lt.u32 %more, %piece, %pieces;
    @%more bra PIECE;
END:
    ret;
}
";

/// The kernel, loaded on the device of the setup.
pub struct Plain<'setup>(Kernel<'setup>);

/// Pieces of equal length, with the lists of their addresses in the memory of the device.
pub struct PlainCopy {
    sources: DeviceMemory,
    destinations: DeviceMemory,
    /// The number of words of a piece.
    words: u32,
    pieces: u32,
}

impl PlainCopy {
    pub fn new(
        setup: &Setup,
        source: (&Endpoint, &[u32]),
        destination: (&Endpoint, &[u32]),
    ) -> Result<Self> {
        let pieces = pieces(source, destination)?;
        let list = |addresses: &[u64]| {
            let bytes: Vec<u8> = addresses.iter().flat_map(|at| at.to_ne_bytes()).collect();
            put(setup, &bytes)
        };
        let bytes = pieces.sizes.first().copied().unwrap_or_default();
        Ok(Self {
            sources: list(&pieces.from)?,
            destinations: list(&pieces.to)?,
            words: u32::try_from(bytes / WORD)?,
            pieces: u32::try_from(pieces.to.len())?,
        })
    }
}

impl<'setup> Plain<'setup> {
    pub fn new(setup: &'setup Setup) -> Result<Self> {
        Ok(Self(setup.bindings.kernel(PTX, c"plain_copy")?))
    }

    /// Submits a copy. No other code may access its ends before the stream has completed it.
    pub fn submit(&self, stream: &Stream, copy: &PlainCopy, thread_blocks: u32) -> Result<()> {
        let (mut sources, mut destinations) =
            (copy.sources.address().get(), copy.destinations.address().get());
        let (mut words, mut pieces) = (copy.words, copy.pieces);
        let mut parameters: [*mut c_void; 4] = [
            (&raw mut sources).cast(),
            (&raw mut destinations).cast(),
            (&raw mut words).cast(),
            (&raw mut pieces).cast(),
        ];
        // SAFETY: the parameters are two lists and two numbers, as the kernel declares them. The
        // lists are stored in `copy`. They name pieces of layouts that the caller keeps until the
        // stream has been waited for.
        unsafe { self.0.launch(stream, [thread_blocks, 1], [THREADS, 1], &mut parameters) }
    }
}
