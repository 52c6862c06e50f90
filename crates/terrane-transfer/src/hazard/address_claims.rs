//! The bytes that endpoints own: no two endpoints own the same bytes.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard};

use smallvec::SmallVec;
use terrane_core::sync::lock;
use terrane_core::{AddressSpace, Alignment, OwnerProcess, Position, Span};

/// The start and the end of each claimed stretch. Stretches do not overlap.
type Claimed = BTreeMap<Position, u64>;

/// The claims of one process. A forked process has separate claims: endpoints of its parent
/// transfer nothing there, and a thread of the parent may hold the lock.
struct Registry {
    owner: OwnerProcess,
    claimed: Mutex<Claimed>,
}

/// The registry of this process, or of its parent at the fork. A registry is never freed.
static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());

/// The bytes of one endpoint. No other endpoint owns them until this drops.
#[derive(Debug)]
pub(crate) struct AddressClaim {
    owner: OwnerProcess,
    begins: SmallVec<[Position; 1]>,
}

impl AddressClaim {
    /// Claims all of `spans`. If a byte of one span is claimed already, it claims nothing and
    /// returns that span.
    pub(crate) fn claim(spans: &[Span]) -> Result<Self, Span> {
        let mut claimed = claimed();
        for span in spans {
            let Some((begin, end)) = stretch(span) else { continue };
            // Stretches do not overlap, so the last one that begins before the span's end reaches
            // furthest.
            let before_end = Position { start: end, ..begin };
            let last = claimed.range(..before_end).next_back();
            if last.is_some_and(|(other, &ends)| other.space == begin.space && ends > begin.start) {
                return Err(*span);
            }
        }
        let stretches = joined(spans);
        claimed.extend(stretches.iter().copied());
        let begins = stretches.into_iter().map(|(begin, _)| begin).collect();
        Ok(Self { owner: OwnerProcess::current(), begins })
    }

    /// A claim of no bytes.
    pub(crate) fn none() -> Self {
        Self { owner: OwnerProcess::current(), begins: SmallVec::new() }
    }
}

impl Drop for AddressClaim {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return;
        }
        let mut claimed = claimed();
        for begin in &self.begins {
            claimed.remove(begin);
        }
    }
}

fn claimed() -> MutexGuard<'static, Claimed> {
    lock(&registry().claimed)
}

/// The registry of this process, created at the first use.
fn registry() -> &'static Registry {
    loop {
        let found = REGISTRY.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or came from `Box::into_raw` and is never freed.
        if let Some(registry) = unsafe { found.as_ref() }
            && registry.owner.is_current()
        {
            return registry;
        }
        let owner = OwnerProcess::current();
        let new = Box::into_raw(Box::new(Registry { owner, claimed: Mutex::default() }));
        let stored = REGISTRY.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire);
        if stored.is_err() {
            // SAFETY: the pointer came from `Box::into_raw` just now, and no other thread has seen
            // it.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

/// The stretches of one endpoint's spans, joined, because two spans may share a page.
fn joined(spans: &[Span]) -> SmallVec<[(Position, u64); 1]> {
    let mut stretches: SmallVec<[_; 1]> = spans.iter().filter_map(stretch).collect();
    stretches.sort_unstable();
    stretches.dedup_by(|(begin, end), (before, ends)| {
        let meet = before.space == begin.space && *ends >= begin.start;
        if meet {
            *ends = (*ends).max(*end);
        }
        meet
    });
    stretches
}

/// The start and the end of a span; `None` if it has no bytes.
///
/// Spans of a file are extended to whole pages. The page cache works in pages. Two layouts that
/// share a page could access it with buffered and with direct I/O, which loses writes.
fn stretch(span: &Span) -> Option<(Position, u64)> {
    if span.length.is_zero() {
        return None;
    }
    let place = span.location.position();
    let end = place.start.checked_add(span.length.get())?;
    let page = match place.space {
        AddressSpace::File(_) => Alignment::PAGE.get(),
        _ => Alignment::BYTE.get(),
    };
    let begin = Position { start: place.start - place.start % page, ..place };
    Some((begin, end.checked_next_multiple_of(page)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::{
        ByteCount, DeviceAddress, DeviceId, FileHandle, FileIdentity, FilePosition, Location,
        StorageKind,
    };

    /// A device that no other test uses.
    fn span(address: u64, length: u64) -> Span {
        let device = DeviceId::new(0xE5C1);
        Span {
            kind: StorageKind::Device(device),
            location: Location::Device { device, address: DeviceAddress::new(address) },
            length: ByteCount::new(length),
        }
    }

    fn in_file(offset: u64, length: u64) -> Span {
        let identity = FileIdentity { file_system: u64::MAX, inode: 0xE5C1 };
        let file =
            FileHandle { descriptor: -1, direct: None, identity, durability: Default::default() };
        let offset = ByteCount::new(offset);
        let location = Location::File(FilePosition { file, offset });
        Span { kind: StorageKind::Disk, location, length: ByteCount::new(length) }
    }

    #[test]
    fn bytes_are_claimed_once_and_can_be_claimed_again() {
        let held = AddressClaim::claim(&[span(100, 50), span(200, 50)]).unwrap();
        for refused in [span(100, 50), span(149, 1), span(50, 51), span(0, 1000), span(249, 9)] {
            assert_eq!(AddressClaim::claim(&[refused]).unwrap_err(), refused);
        }
        for granted in [span(150, 50), span(99, 1), span(250, 1), span(120, 0)] {
            drop(AddressClaim::claim(&[granted]).unwrap());
        }
        drop(held);
        drop(AddressClaim::claim(&[span(0, 1000)]).unwrap());
    }

    #[test]
    fn a_refused_claim_leaves_nothing_claimed() {
        let _held = AddressClaim::claim(&[span(5000, 10)]).unwrap();
        assert!(AddressClaim::claim(&[span(4000, 10), span(5000, 10)]).is_err());
        drop(AddressClaim::claim(&[span(4000, 10)]).unwrap());
    }

    #[test]
    fn pages_of_a_file_are_not_shared() {
        let _held = AddressClaim::claim(&[in_file(0, 5000)]).unwrap();
        assert!(AddressClaim::claim(&[in_file(5000, 5000)]).is_err());
        // Within one endpoint they are.
        drop(AddressClaim::claim(&[in_file(18_432, 100), in_file(18_000, 432)]).unwrap());
        drop(AddressClaim::claim(&[in_file(8192, 5000)]).unwrap());
    }
}
