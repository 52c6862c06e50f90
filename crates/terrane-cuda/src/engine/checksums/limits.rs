//! Limits of the kernels for checksums, and the time that they take.

use std::time::Duration;

use terrane_core::convert::to_u64;
use terrane_transfer::calibration::Direction;

use crate::engine::shared::Shared;
use crate::kernels::BLOCK_WARPS;

/// The limits of the kernels for a job's checksums: those of the job's other kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SumLimits {
    /// The most thread blocks of a launch while copies of the job run.
    pub(crate) beside: u32,
    /// The most thread blocks of a launch after the job's last copy.
    pub(crate) alone: u32,
    /// The most bytes of a launch, unless one block has more.
    pub(crate) bytes: u64,
    /// The most bytes of a launch for one chunk of a copy.
    chunk_bytes: u64,
    multiprocessors: u32,
}

/// The launch for which a job's blocks are divided into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LargestLaunch {
    /// Its bytes.
    pub(crate) bytes: u64,
    /// The warps that run at once.
    pub(crate) warps: u32,
}

/// The thread blocks that a multiprocessor runs at once.
const RESIDENT_CTAS: u32 = 2;
/// The segments of each warp, if there are enough. A thread block then ends within about 60 µs, and
/// another kernel's thread block can start.
pub(crate) const SEGMENTS_PER_WARP: u32 = 4;

impl SumLimits {
    pub(crate) fn of(shared: &Shared, direction: Direction) -> Self {
        let options = &shared.options;
        let [beside, alone] = match direction {
            // More thread blocks would occupy more multiprocessors, and the wire would be no
            // faster. A kernel that ends the transfer may use more, as for packing.
            Direction::ToHost | Direction::ToDevice => {
                let pack = options.pack_ctas.get();
                [pack, pack.saturating_mul(3)]
            }
            Direction::WithinDevice | Direction::ToPeer | Direction::FromPeer => {
                [shared.relayout_ctas(); 2]
            }
        };
        Self {
            beside,
            alone,
            bytes: options.relayout_bytes.get().max(1),
            chunk_bytes: options.scratch_bytes.max(options.request_bytes).get().max(1),
            multiprocessors: shared.context.device().multiprocessors.max(1),
        }
    }

    /// The launch for which blocks of this many bytes are divided into segments. `by_chunks`: each
    /// chunk of the copy is summed when it has arrived. `is_source`: the sums begin with the copy.
    pub(crate) fn largest_launch(
        &self,
        all: u64,
        by_chunks: bool,
        is_source: bool,
    ) -> LargestLaunch {
        let most = if by_chunks { self.chunk_bytes.min(self.bytes) } else { self.bytes };
        let ctas = if is_source { self.beside } else { self.alone };
        let warps = ctas.min(self.at_once()).saturating_mul(BLOCK_WARPS);
        LargestLaunch { bytes: all.min(most), warps }
    }

    /// The thread blocks of a launch for this many segments, at most `most`. They fill the device,
    /// and each ends soon.
    pub(crate) fn ctas(&self, most: u32, segments: u32) -> u32 {
        most.min(segments.div_ceil(BLOCK_WARPS * SEGMENTS_PER_WARP).max(self.at_once())).max(1)
    }

    fn at_once(&self) -> u32 {
        self.multiprocessors.saturating_mul(RESIDENT_CTAS)
    }

    /// The time in which this many thread blocks sum this many bytes.
    fn time(&self, bytes: u64, ctas: u32) -> Duration {
        /// The bytes that a multiprocessor sums in a microsecond.
        const PER_MICRO: u64 = 8_400;
        /// The bytes of the shortest segments of a thread block.
        const SMALLEST_SHARE: u64 = 32 << 10;
        let working =
            u64::from(ctas.min(self.multiprocessors)).min(bytes.div_ceil(SMALLEST_SHARE)).max(1);
        let nanos = u128::from(bytes) * 1000 / u128::from(working * PER_MICRO);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The time that the checksums of this many bytes add to a copy that takes `copy`. `by_chunks`:
    /// each chunk of the copy is summed when it has arrived.
    pub(crate) fn added(
        &self,
        direction: Direction,
        bytes: u64,
        by_chunks: bool,
        copy: Duration,
    ) -> Duration {
        /// The transfer of the tables, one kernel, and the transfer of the sums.
        const FIXED: Duration = Duration::from_micros(15);
        let more = match direction {
            // The kernels run beside the copy, whose rate the device's memory does not limit.
            Direction::ToHost => self.time(bytes, self.beside).saturating_sub(copy),
            Direction::ToDevice if by_chunks => {
                let last = bytes.min(self.chunk_bytes);
                let before = self.time(bytes - last, self.beside);
                before.saturating_sub(copy).saturating_add(self.time(last, self.alone))
            }
            _ => self.time(bytes, self.alone),
        };
        FIXED.saturating_add(more)
    }

    /// The pairs that one launch sums, of this many bytes each.
    pub(crate) fn pairs(&self, block_bytes: u64) -> u32 {
        u32::try_from(self.bytes / block_bytes.max(1)).unwrap_or(u32::MAX).max(1)
    }
}

/// The bytes of all of a job's blocks.
pub(crate) fn all_bytes(block_bytes: u64, pairs: usize) -> u64 {
    block_bytes.saturating_mul(to_u64(pairs))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: SumLimits = SumLimits {
        beside: 24,
        alone: 72,
        bytes: 1 << 30,
        chunk_bytes: 32 << 20,
        multiprocessors: 132,
    };
    const FIXED: Duration = Duration::from_micros(15);

    /// The time of a copy at 50 GB/s.
    fn wire(bytes: u64) -> Duration {
        Duration::from_nanos(bytes / 50)
    }

    #[test]
    fn sums_beside_a_slower_copy_add_nothing() {
        let added = |bytes: u64| H100.added(Direction::ToHost, bytes, false, wire(bytes));
        assert_eq!([added(1 << 20), added(8 << 30)], [FIXED; 2]);
    }

    #[test]
    fn one_thread_block_delays_a_copy_to_the_host() {
        let limits = SumLimits { beside: 1, ..H100 };
        let added = limits.added(Direction::ToHost, 1 << 30, false, wire(1 << 30));
        // 8.4 GB/s beside 50 GB/s.
        assert!((100..110).contains(&added.as_millis()), "{added:?}");
    }

    #[test]
    fn chunks_out_of_order_are_all_summed_at_the_end() {
        let added = |by_chunks| H100.added(Direction::ToDevice, 1 << 30, by_chunks, wire(1 << 30));
        assert!((1700..1850).contains(&added(false).as_micros()), "{:?}", added(false));
        assert!((60..80).contains(&added(true).as_micros()), "{:?}", added(true));
        // Not whole microseconds.
        let within = H100.added(Direction::WithinDevice, 100_000, false, Duration::ZERO);
        assert_ne!(within.subsec_nanos() % 1000, 0, "{within:?}");
    }

    #[test]
    fn thread_blocks_are_limited_and_short_ones_leave_room_for_others() {
        // All that there is work for: four segments for each warp.
        assert_eq!(H100.ctas(u32::MAX, 1 << 20), (1 << 20) / 64);
        assert_eq!([H100.ctas(24, 1 << 20), H100.ctas(u32::MAX, 100)], [24, 264]);
        assert_eq!([H100.pairs(1 << 20), H100.pairs(2 << 30), H100.pairs(0)], [1024, 1, 1 << 30]);
    }

    #[test]
    fn blocks_are_cut_for_the_warps_of_their_launch() {
        let launch = |bytes, by_chunks, is_source| {
            let launch = H100.largest_launch(bytes, by_chunks, is_source);
            (launch.bytes, launch.warps / BLOCK_WARPS)
        };
        assert_eq!(launch(8 << 30, false, true), (1 << 30, 24));
        assert_eq!(launch(8 << 30, false, false), (1 << 30, 72));
        assert_eq!(launch(8 << 30, true, false), (32 << 20, 72));
        assert_eq!(launch(1 << 20, true, false), (1 << 20, 72));
        let all = SumLimits { beside: 1 << 20, ..H100 };
        assert_eq!(all.largest_launch(1, false, true).warps, 264 * BLOCK_WARPS);
    }
}
