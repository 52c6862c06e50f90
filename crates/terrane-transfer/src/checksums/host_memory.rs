//! The checksum of a block in host memory.

use std::slice;

use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, HostAddress, Location};

use super::crc::Crc64;
use crate::plan::TransferPlan;
use crate::side::Side;

/// A checksum of many short spans. An update of a CRC takes about 20 ns even for a short span, so
/// short spans are gathered first.
struct GatheredSum {
    sum: Crc64,
    gathered: [u8; GATHERED],
    filled: usize,
}

/// Updates with this many bytes are as fast as longer ones.
const GATHERED: usize = 4096;

impl GatheredSum {
    fn new() -> Self {
        Self { sum: Crc64::new(), gathered: [0; GATHERED], filled: 0 }
    }

    fn add(&mut self, bytes: &[u8]) {
        let end = self.filled + bytes.len();
        if let Some(room) = self.gathered.get_mut(self.filled..end) {
            room.copy_from_slice(bytes);
            self.filled = end;
            return;
        }
        self.flush();
        match self.gathered.get_mut(..bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                self.filled = bytes.len();
            }
            None => self.sum.update(bytes),
        }
    }

    fn flush(&mut self) {
        self.sum.update(self.gathered.get(..self.filled).unwrap_or_default());
        self.filled = 0;
    }

    fn finish(mut self) -> u64 {
        self.flush();
        self.sum.finish()
    }
}

/// The checksum of the copied bytes of a block at one end of a plan; `None` if the block is not in
/// host memory.
///
/// # Safety
///
/// Nothing writes these bytes during the call, and the plan's ends keep them alive.
pub(crate) unsafe fn block_sum(plan: &TransferPlan, side: Side, pair: usize) -> Option<u64> {
    let end = plan.end(side);
    let block = *plan.blocks(side).get(pair)?;
    let tokens = plan.tokens(side).unwrap_or(0..u32::MAX);
    let layers = plan.layers_of(side);
    let mut sum = GatheredSum::new();
    // The region of the last span: most spans are in the same region as the span before.
    let mut last: Option<(u32, HostAddress)> = None;
    let mut is_in_memory = true;
    let mut add = |region: u32, offset: u64, bytes: u64| {
        let base = match last {
            Some((of, base)) if of == region => base,
            _ => {
                let base = end.base(region).and_then(Location::as_host)?;
                last = Some((region, base));
                base
            }
        };
        let address = base.checked_add(ByteCount::new(offset))?;
        // SAFETY: the plan's block, layers and tokens exist, so the span is within its region. The
        // region is alive and valid by the contract of `Memory`. By the contract of this function,
        // nothing writes it.
        let bytes = unsafe { slice::from_raw_parts(address.as_ptr(), to_usize(bytes)) };
        sum.add(bytes);
        Some(())
    };
    let geometry = end.layout().geometry();
    geometry.canonical_spans_of(block, layers, tokens, &mut |at, bytes| {
        is_in_memory &= add(at.region, at.offset, bytes).is_some();
    });
    is_in_memory.then(|| sum.finish())
}
