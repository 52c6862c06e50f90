//! How a transfer is divided into chunks, and the order of their sizes: pure arithmetic.

use crate::engine::geometry::packing::{Chunk, Packing, PackingOrder};
use crate::kernels::schedule::Divisor;

/// Divides a transfer into chunks that fit into a buffer.
///
/// No byte travels before the first chunk is packed, and no byte is usable before the last chunk is
/// unpacked. So the chunks of a transfer to the host begin small and grow. The chunks of a transfer
/// to the device shrink at the end.
#[derive(Clone, Debug)]
pub(crate) struct Chunker {
    pub(crate) packing: Packing,
    pairs: u32,
    largest: u64,
    ramp: ChunkRamp,
    next: (u32, u32),
    packed: u64,
    total: u64,
}

/// The end of a transfer with small chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkRamp {
    /// The beginning.
    Up,
    /// The end.
    Down,
    /// Neither.
    Flat,
}

/// The smallest chunk. Packing it takes about as long as it takes to start a kernel.
const SMALLEST: u64 = 2 << 20;
/// The last growing chunk: the bytes that travel during two wake-ups of a thread.
const LAST_GROWING: u64 = 12 << 20;
/// The first growing chunk: the bytes that travel until a thread has woken up and submitted the next
/// chunk. On an idle device, packing it takes hardly longer than starting a kernel.
const FIRST_GROWING: u64 = 8 << 20;
/// The growth factor of chunks: packing is more than four times as fast as the wire.
const GROWTH: u64 = 4;

/// The maximum number of bytes of a chunk that one launch copies, at most `limit`. The chunk has
/// cells of these lengths.
pub(crate) fn bytes_of_launch(limit: u64, cells: impl IntoIterator<Item = u64>) -> u64 {
    /// A launch also has at most [`Divisor::MAX`] tiles. A full tile has at least this many bytes.
    const LEAST_OF_TILE: u64 = 64;
    let shortest = cells.into_iter().fold(LEAST_OF_TILE, u64::min).max(1);
    limit.min(u64::from(Divisor::MAX) * shortest)
}

impl Chunker {
    /// Returns `None` if not even one layer of a block fits into `largest` bytes.
    pub(crate) fn new(packing: Packing, pairs: u32, largest: u64, ramp: ChunkRamp) -> Option<Self> {
        let of_layer = packing.of_layer();
        if of_layer > largest {
            return None;
        }
        let total = of_layer * u64::from(packing.layers) * u64::from(pairs);
        Some(Self { packing, pairs, largest, ramp, next: (0, 0), packed: 0, total })
    }

    /// The bytes of a chunk.
    pub(crate) fn bytes(&self, chunk: &Chunk) -> u64 {
        self.packing.bytes(chunk)
    }

    /// The total number of block pairs.
    pub(crate) fn pairs(&self) -> u32 {
        self.pairs
    }

    /// Whether there is no chunk left.
    pub(crate) fn is_done(&self) -> bool {
        self.next.0 >= self.pairs || self.next.1 >= self.packing.layers
    }

    /// Whether all of it fits into one chunk.
    pub(crate) fn fits_one_chunk(&self) -> bool {
        self.total <= self.largest
    }

    /// The same chunker without small chunks: a transfer that fits into one chunk is one chunk.
    pub(crate) fn flat(&self) -> Self {
        Self { ramp: ChunkRamp::Flat, ..self.clone() }
    }

    /// The target size of the next chunk.
    fn target_bytes(&self) -> u64 {
        match self.ramp {
            ChunkRamp::Up => {
                // The next size begins after 1 + 4 + 16 … chunks of the first size.
                let (mut size, mut before) = (FIRST_GROWING.min(self.largest), 0);
                while size < self.largest && before + size <= self.packed {
                    before += size;
                    size *= GROWTH;
                }
                // The last chunk is short: a thread that wakes at its start polls until its end.
                let remaining = self.total - self.packed;
                let size = size.min(self.largest);
                if remaining > LAST_GROWING { size.min(remaining - LAST_GROWING) } else { size }
            }
            ChunkRamp::Down => {
                let remaining = self.total - self.packed;
                let (mut size, mut after) = (SMALLEST.min(self.largest), 0);
                while size < self.largest && after + size < remaining {
                    after += size;
                    size *= GROWTH;
                }
                remaining.saturating_sub(after).clamp(1, self.largest)
            }
            ChunkRamp::Flat => self.largest,
        }
    }

    fn chunk(&self) -> Option<Chunk> {
        let (pair, layer) = self.next;
        let Packing { order, layers, .. } = self.packing;
        if pair >= self.pairs || layer >= layers {
            return None;
        }
        let of_layer = self.packing.of_layer();
        let target_bytes = self.target_bytes();
        let fit = |bytes: u64, most: u32| {
            u32::try_from((target_bytes / bytes.max(1)).max(1)).unwrap_or(u32::MAX).min(most)
        };
        if order == PackingOrder::Blocks {
            let of_block = of_layer * u64::from(layers);
            if of_block <= self.largest && layer == 0 {
                let pairs = fit(of_block, self.pairs - pair);
                return Some(Chunk { pairs: pair..pair + pairs, layers: 0..layers });
            }
            let some = fit(of_layer, layers - layer);
            return Some(Chunk { pairs: pair..pair + 1, layers: layer..layer + some });
        }
        let of_all = of_layer * u64::from(self.pairs);
        if of_all <= target_bytes && pair == 0 {
            let some = fit(of_all, layers - layer);
            return Some(Chunk { pairs: 0..self.pairs, layers: layer..layer + some });
        }
        let pairs = fit(of_layer, self.pairs - pair);
        Some(Chunk { pairs: pair..pair + pairs, layers: layer..layer + 1 })
    }
}

impl Iterator for Chunker {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let chunk = self.chunk()?;
        self.packed += self.packing.bytes(&chunk);
        let inner_is_layers = self.packing.order == PackingOrder::Blocks;
        self.next = if inner_is_layers {
            match chunk.layers.end {
                end if end < self.packing.layers => (chunk.pairs.start, end),
                _ => (chunk.pairs.end, 0),
            }
        } else {
            match chunk.pairs.end {
                end if end < self.pairs => (end, chunk.layers.start),
                _ => (0, chunk.layers.end),
            }
        };
        Some(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::geometry::index;
    use crate::engine::geometry::packing::tests::{KIB, end, packing};

    /// Every cell is packed once, into chunks that fit, and the stretches cover each chunk.
    #[test]
    fn parts_cover_everything_once() {
        for end in [
            end(64 * KIB, 16 * KIB, 8 * KIB, 0),
            end(16 * KIB, 0, 8 * KIB, 1),
            end(8 * KIB, 0, 1 << 30, 1),
        ] {
            for ramp in [ChunkRamp::Up, ChunkRamp::Down] {
                for largest in [16 * KIB, 100 * KIB, 3 << 20, 32 << 20] {
                    for pairs in [0, 1, 7, 300] {
                        let packing = packing(4, 2, 8 * KIB, end);
                        let blocks: Vec<u32> =
                            (0..pairs).map(|pair| pair / 3 * 5 + pair % 3).collect();
                        let mut seen = vec![0_u8; usize::try_from(pairs).unwrap() * 4];
                        for chunk in Chunker::new(packing, pairs, largest, ramp).unwrap() {
                            assert!(packing.bytes(&chunk) <= largest, "{chunk:?}");
                            for pair in chunk.pairs.clone() {
                                for layer in chunk.layers.clone() {
                                    seen[index(pair * 4 + layer)] += 1;
                                }
                            }
                            let mut at = 0;
                            packing.stretches(&chunk, &blocks, |stretch| {
                                assert_eq!(stretch.at, at);
                                at += stretch.bytes;
                            });
                            assert_eq!(at, packing.bytes(&chunk));
                        }
                        assert!(seen.iter().all(|&times| times == 1), "{packing:?} {largest}");
                    }
                }
            }
        }
    }

    #[test]
    fn first_and_last_chunks_are_small() {
        let packing = packing(32, 2, 32 * KIB, end(2 << 20, 64 * KIB, 32 * KIB, 0));
        let sizes = |ramp| -> Vec<u64> {
            let chunker = Chunker::new(packing, 128, 32 << 20, ramp).unwrap();
            chunker.map(|chunk| packing.bytes(&chunk) >> 20).collect()
        };
        assert_eq!(sizes(ChunkRamp::Up), [8, 32, 32, 32, 32, 32, 32, 32, 12, 12]);
        assert_eq!(sizes(ChunkRamp::Down), [32, 32, 32, 32, 32, 32, 32, 22, 8, 2]);
    }

    #[test]
    fn a_chunk_has_no_more_cells_and_tiles_than_a_launch() {
        let most = u64::from(Divisor::MAX);
        assert_eq!(bytes_of_launch(1 << 30, [2, 1]), 1 << 30);
        assert_eq!(bytes_of_launch(most, [1]), most);
        assert_eq!(bytes_of_launch(1 << 40, [4, 1, 2]), most);
        assert_eq!(bytes_of_launch(1 << 40, [16]), 16 * most);
        // Longer cells are cut into tiles.
        assert_eq!(bytes_of_launch(u64::MAX, [1 << 20]), 64 * most);
        assert_eq!(bytes_of_launch(7, []), 7);
    }

    #[test]
    fn a_layer_that_does_not_fit_is_not_cut() {
        let packing = packing(4, 2, 8, end(64, 16, 8, 0));
        assert!(Chunker::new(packing, 3, 15, ChunkRamp::Up).is_none());
        let parts: Vec<_> = Chunker::new(packing, 1, 40, ChunkRamp::Up).unwrap().collect();
        let layers: Vec<_> = parts.iter().map(|chunk| chunk.layers.clone()).collect();
        assert_eq!(layers, [0..2, 2..4]);
    }
}
