//! Copies of host memory on the thread of a job's task.

use std::ptr;

use terrane_storage::IoBuffer;

/// At most so many bytes are copied at once on the thread of a caller, or on the store's own thread. It takes
/// 20 microseconds or less.
pub(crate) const MOST_AT_ONCE: u64 = 256 << 10;

/// Copies the bytes of `from` to `to`, until one of the two ends.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes. No other code writes `from`, or uses `to`, during
/// the call.
#[expect(unsafe_code, reason = "the memory is named by addresses")]
pub(crate) unsafe fn copy(from: &[IoBuffer], to: &[IoBuffer]) {
    let (mut sources, mut destinations) = (from.iter().copied(), to.iter().copied());
    let (mut source, mut destination) = (sources.next(), destinations.next());
    while let (Some(read), Some(write)) = (&mut source, &mut destination) {
        let bytes = read.length.min(write.length);
        // SAFETY: both are valid for so many bytes, as the caller promises. An overlap of the
        // two is no error for this call.
        unsafe { ptr::copy(read.address.as_ptr(), write.address.as_ptr(), bytes.to_usize()) };
        source = rest(*read, bytes).or_else(|| sources.next());
        destination = rest(*write, bytes).or_else(|| destinations.next());
    }
}

/// The part of a span behind its first bytes; `None` if there is no such part.
fn rest(span: IoBuffer, bytes: terrane_core::ByteCount) -> Option<IoBuffer> {
    let length = span.length.checked_sub(bytes).filter(|length| !length.is_zero())?;
    let address = span.address.checked_add(bytes)?;
    Some(IoBuffer { address, length })
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use terrane_core::{ByteCount, HostAddress};

    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "the memory is named by addresses")]
    fn spans_of_other_lengths_are_copied_in_order() {
        let from: Vec<u8> = (0..30).collect();
        let mut to = [0xff_u8; 40];
        let span = |bytes: &[u8]| IoBuffer {
            address: HostAddress::new(NonNull::from(bytes).cast::<u8>()),
            length: ByteCount::from_usize(bytes.len()),
        };
        let sources = [span(&from[..7]), span(&from[7..9]), span(&from[9..])];
        let base = NonNull::from(&mut to[..]).cast::<u8>();
        let at = |offset: u64, bytes: u64| IoBuffer {
            address: HostAddress::new(base).checked_add(ByteCount::new(offset)).unwrap(),
            length: ByteCount::new(bytes),
        };
        let destinations = [at(0, 1), at(5, 20), at(28, 9)];
        // SAFETY: `from` and `to` are live, and all spans are within them.
        unsafe { copy(&sources, &destinations) };
        assert_eq!(to[0], 0);
        assert_eq!(to[5..25], from[1..21]);
        assert_eq!(to[28..37], from[21..]);
        assert!([&to[1..5], &to[25..28], &to[37..]].concat().iter().all(|&byte| byte == 0xff));
    }
}
