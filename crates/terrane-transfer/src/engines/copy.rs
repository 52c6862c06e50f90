//! The two methods to copy host memory: through the cache, and with non-temporal stores.

/// How a copy treats the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// The destination's cache lines are loaded, written and kept: `memcpy`.
    Cached,
    /// The destination is written with non-temporal stores. They do not load its lines first, which
    /// saves a third of the memory traffic, and do not evict other data from the cache.
    NonTemporal,
}

// Miri supports neither the streaming stores nor `sfence`. With Miri, every copy is a `memcpy`.

/// Whether this processor has the non-temporal stores.
pub(crate) fn has_non_temporal_stores() -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return std::arch::is_x86_feature_detected!("avx");
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    false
}

/// Copies `length` bytes.
///
/// After copies with [`Store::NonTemporal`], [`fence`] must be called before another thread is
/// notified.
///
/// # Safety
///
/// `source` is valid for reads of `length` bytes, and `destination` for writes of `length` bytes.
/// The spans do not overlap. During the call no other thread accesses them, except to read the
/// source. For [`Store::NonTemporal`], [`has_non_temporal_stores`] has returned `true`.
pub(crate) unsafe fn copy(source: *const u8, destination: *mut u8, length: usize, store: Store) {
    match store {
        // SAFETY: the caller upholds the contract of this call.
        Store::Cached => unsafe { source.copy_to_nonoverlapping(destination, length) },
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: the caller upholds the contract of this call.
        Store::NonTemporal => unsafe { copy_non_temporal(source, destination, length) },
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        // SAFETY: the caller upholds the contract of this call.
        Store::NonTemporal => unsafe { source.copy_to_nonoverlapping(destination, length) },
    }
}

/// Makes non-temporal stores visible to the threads that this thread synchronises with next. An
/// ordinary release does not order them.
pub(crate) fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// The bytes of one iteration: two cache lines, whose eight loads are in flight together.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const ITERATION_BYTES: usize = 128;

/// # Safety
///
/// The contract of [`copy`] holds, and the processor has AVX.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
unsafe fn copy_non_temporal(source: *const u8, destination: *mut u8, length: usize) {
    use std::arch::x86_64::{
        __m256i, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_stream_si256,
    };
    const LANE: usize = size_of::<__m256i>();

    // Only whole lines, because a partly written line is written to memory in several transactions.
    let head = destination.align_offset(ITERATION_BYTES / 2).min(length);
    let turns = (length - head) / ITERATION_BYTES;
    let tail_at = head + turns * ITERATION_BYTES;
    // SAFETY: `head` is at most `length`, so it is within both spans.
    unsafe { source.copy_to_nonoverlapping(destination, head) };
    for turn in 0..turns {
        let at = head + turn * ITERATION_BYTES;
        let mut lanes = [_mm256_setzero_si256(); ITERATION_BYTES / LANE];
        for (index, lane) in lanes.iter_mut().enumerate() {
            // SAFETY: `at + index * LANE + LANE` is at most `tail_at`, within the span.
            let from = unsafe { source.add(at + index * LANE) };
            // SAFETY: `from` is valid for a lane, as computed; the load needs no alignment.
            *lane = unsafe { _mm256_loadu_si256(from.cast()) };
        }
        for (index, lane) in lanes.iter().enumerate() {
            // SAFETY: `at + index * LANE + LANE` is at most `tail_at`, within the span.
            let to = unsafe { destination.add(at + index * LANE) };
            // SAFETY: `to` is valid for a lane, and aligned to a lane, because `head` ends at a
            // line.
            unsafe { _mm256_stream_si256(to.cast(), *lane) };
        }
    }
    // SAFETY: `tail_at` is at most `length`, so this is within the span or at its end.
    let from = unsafe { source.add(tail_at) };
    // SAFETY: `tail_at` is at most `length`, so this is within the span or at its end.
    let to = unsafe { destination.add(tail_at) };
    // SAFETY: the tail ends where the spans end.
    unsafe { from.copy_to_nonoverlapping(to, length - tail_at) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_misalignment_is_copied_and_nothing_else_is_touched() {
        let source: Vec<u8> = (0..1024_u32).map(|i| (i * 7 % 251).to_le_bytes()[0]).collect();
        for store in [Store::Cached, Store::NonTemporal] {
            if store == Store::NonTemporal && !has_non_temporal_stores() {
                eprintln!("skipped: streaming copy: the processor has no AVX");
                continue;
            }
            for from in [0, 1, 31, 64] {
                for to in [0, 1, 33, 63, 64] {
                    for length in [0, 1, 63, 64, 127, 128, 129, 300, 512] {
                        let mut target = vec![0xEE_u8; 1024];
                        let destination = target[to..].as_mut_ptr();
                        // SAFETY: both vectors are longer than the offsets and lengths together.
                        unsafe { copy(source[from..].as_ptr(), destination, length, store) };
                        fence();
                        assert!(target[..to].iter().all(|&b| b == 0xEE));
                        assert_eq!(target[to..to + length], source[from..from + length]);
                        assert!(target[to + length..].iter().all(|&b| b == 0xEE));
                    }
                }
            }
        }
    }
}
