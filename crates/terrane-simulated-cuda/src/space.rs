//! The address space: device memory, pinned host memory, and all other memory.

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::arena::Arena;
use crate::code::{Code, Outcome};

/// The difference between the device address of registered host memory and its host address. No
/// process has addresses that large, so confusing the two is detected.
const ALIAS: u64 = 1 << 52;

/// The minimum number of unowned bytes between two allocations.
const GAP: u64 = 256;

const PAGE: u64 = 4096;

/// The number of overwritten bytes at either end of fresh and of freed memory.
const POISONED: u64 = 256 << 10;

/// The owner of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Allocated at once, in a context.
    Context(u64),
    /// Allocated in the order of a stream, from a pool.
    Pool(u64),
}

/// The driver's report of memory that was allocated at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pieces {
    /// It is one allocation.
    #[default]
    One,
    /// It is several allocations, each mapped directly after the one before it.
    Mapped,
    /// It is several allocations, which are adjacent by chance.
    Neighbours,
}

/// Memory of a device.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub device: u32,
    pub length: u64,
    pub owner: Owner,
    /// Whether the stream of its allocation has reached it.
    pub is_live: bool,
    /// Whether it will be freed in the order of a stream.
    pub is_freed: bool,
    pub pieces: Pieces,
}

impl Allocation {
    /// The start and the length of the part around an address that the driver reports as one
    /// allocation.
    pub fn range(&self, base: u64, address: u64) -> (u64, u64) {
        const PIECE: u64 = 2 << 20;
        if self.pieces == Pieces::One {
            return (base, self.length);
        }
        let border = address / PIECE * PIECE;
        let (start, end) = (base.max(border), (base + self.length).min(border + PIECE));
        (start, end - start)
    }
}

/// Host memory that devices can access.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    pub host: u64,
    pub alias: u64,
    pub length: u64,
    pub context: u64,
    /// Whether the driver allocated it, rather than registered it.
    pub is_owned: bool,
    pub flags: u32,
}

/// The memory at an address.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Device {
        base: u64,
        allocation: Allocation,
    },
    Pinned(Pinned),
    /// Host memory that the driver does not know.
    Pageable,
}

/// The accessor of memory.
#[derive(Clone, Copy, Debug)]
pub enum Reach<'a> {
    /// A copy engine, which can access all pinned memory and all device memory.
    Engine,
    /// A kernel of the first of these devices, which can also access the memory of the others.
    Kernel(&'a [u32]),
}

/// Memory that was looked up, valid while the lock is held.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    start: u64,
    length: u64,
    bytes: *mut u8,
}

impl Window {
    /// The host address of a span's bytes, if all of it is in this window.
    pub fn bytes(&self, address: u64, length: u64) -> Option<*mut u8> {
        let offset = address.checked_sub(self.start)?;
        let is_inside = offset.checked_add(length)? <= self.length;
        let offset = usize::try_from(offset).ok().filter(|_| is_inside)?;
        Some(self.bytes.wrapping_add(offset))
    }
}

#[derive(Debug)]
pub struct Space {
    arenas: Vec<Arena>,
    /// The address from which each arena is searched.
    cursors: Vec<u64>,
    allocations: BTreeMap<u64, Allocation>,
    /// Pinned memory, by its host address.
    pinned: BTreeMap<u64, Pinned>,
}

impl Space {
    pub fn new(arenas: Vec<Arena>) -> Self {
        // The bytes before the first allocation are unowned, too.
        let cursors = arenas.iter().map(|arena| arena.start() + GAP).collect();
        Self { arenas, cursors, allocations: BTreeMap::new(), pinned: BTreeMap::new() }
    }

    /// Finds addresses for device memory: first those that have been unused for longest.
    ///
    /// # Errors
    ///
    /// Out of memory if no free range is long enough.
    pub fn allocate(&mut self, allocation: Allocation) -> Outcome<u64> {
        let index = usize::try_from(allocation.device).map_err(|_| Code::INVALID_DEVICE)?;
        let (Some(arena), Some(cursor)) = (self.arenas.get(index), self.cursors.get_mut(index))
        else {
            return Err(Code::INVALID_DEVICE);
        };
        // The driver maps large allocations in large pages; others are aligned as documented.
        let alignment = if allocation.length >= 2 << 20 { 2 << 20 } else { GAP };
        let mut at = (*cursor).next_multiple_of(alignment);
        let mut has_wrapped = false;
        loop {
            let end = at.checked_add(allocation.length).ok_or(Code::OUT_OF_MEMORY)?;
            if end + GAP > arena.end() {
                if has_wrapped {
                    return Err(Code::OUT_OF_MEMORY);
                }
                has_wrapped = true;
                at = (arena.start() + GAP).next_multiple_of(alignment);
                continue;
            }
            // The last allocation that begins before the end of this range.
            match self.allocations.range(..end + GAP).next_back() {
                Some((&base, taken)) if base + taken.length + GAP > at => {
                    at = (base + taken.length + GAP).next_multiple_of(alignment);
                }
                _ => break,
            }
        }
        *cursor = at + allocation.length + GAP;
        poison(arena, at, allocation.length, 0xCD);
        self.allocations.insert(at, allocation);
        Ok(at)
    }

    /// The allocation that begins at an address.
    pub fn allocation(&mut self, base: u64) -> Option<&mut Allocation> {
        self.allocations.get_mut(&base)
    }

    /// Removes an allocation.
    pub fn release(&mut self, base: u64) -> Option<Allocation> {
        let allocation = self.allocations.remove(&base)?;
        if let Some(arena) = self.arena(allocation.device) {
            arena.discard(base, allocation.length);
            poison(arena, base, allocation.length.min(PAGE), 0xDD);
        }
        Some(allocation)
    }

    /// The allocations of an owner.
    pub fn owned_by(&self, owner: Owner) -> Vec<u64> {
        let own = self.allocations.iter().filter(|(_, allocation)| allocation.owner == owner);
        own.map(|(&base, _)| base).collect()
    }

    /// The number of allocations, and the number of pinned spans.
    pub fn counts(&self) -> (usize, usize) {
        (self.allocations.len(), self.pinned.len())
    }

    /// Records host memory as pinned.
    ///
    /// # Errors
    ///
    /// If some page of it is pinned already.
    pub fn pin(&mut self, mut pinned: Pinned) -> Outcome {
        const WRITE_COMBINED: u32 = 4;
        let end = pinned.host.checked_add(pinned.length).ok_or(Code::INVALID_VALUE)?;
        let (first, last) = (pinned.host / PAGE * PAGE, end.next_multiple_of(PAGE));
        if let Some((&host, before)) = self.pinned.range(..last).next_back()
            && (host + before.length).next_multiple_of(PAGE) > first
        {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        // With unified addresses, allocated memory has one address, unless it is write-combined.
        // Registered memory has two, unless the device reports otherwise.
        let is_one = pinned.is_owned && pinned.flags & WRITE_COMBINED == 0;
        pinned.alias = if is_one { pinned.host } else { pinned.host + ALIAS };
        self.pinned.insert(pinned.host, pinned);
        Ok(())
    }

    pub fn unpin(&mut self, host: u64) -> Option<Pinned> {
        self.pinned.remove(&host)
    }

    pub fn pinned_at(&self, host: u64) -> Option<&Pinned> {
        self.pinned.get(&host)
    }

    pub fn pinned_in(&self, context: u64) -> Vec<u64> {
        let own = self.pinned.values().filter(|pinned| pinned.context == context);
        own.map(|pinned| pinned.host).collect()
    }

    /// The memory of a span, which must be of one kind, and in one allocation or registration.
    ///
    /// # Errors
    ///
    /// An invalid value if it is not.
    pub fn place(&self, address: u64, length: u64) -> Outcome<Place> {
        let end = address.checked_add(length).ok_or(Code::INVALID_VALUE)?;
        if address < PAGE {
            return Err(Code::INVALID_VALUE);
        }
        if self.arenas.iter().any(|arena| (arena.start()..arena.end()).contains(&address)) {
            return match self.allocations.range(..=address).next_back() {
                Some((&base, allocation))
                    if end <= base + allocation.length && (address < base + allocation.length) =>
                {
                    Ok(Place::Device { base, allocation: *allocation })
                }
                _ => Err(Code::INVALID_VALUE),
            };
        }
        let (host, is_alias) = match address.checked_sub(ALIAS) {
            Some(host) => (host, true),
            None => (address, false),
        };
        let host_end = host + length;
        let pinned = self.pinned.range(..=host).next_back().map(|(_, pinned)| pinned);
        if let Some(pinned) = pinned.filter(|pinned| host < pinned.host + pinned.length) {
            let is_whole = host_end <= pinned.host + pinned.length;
            let has_alias = !is_alias || pinned.alias != pinned.host;
            return if is_whole && has_alias {
                Ok(Place::Pinned(*pinned))
            } else {
                Err(Code::INVALID_VALUE)
            };
        }
        // From memory that is not pinned into pinned memory.
        let next = self.pinned.range((Bound::Excluded(host), Bound::Unbounded)).next();
        let runs_into = next.is_some_and(|(&next, _)| next < host_end);
        if is_alias || runs_into { Err(Code::INVALID_VALUE) } else { Ok(Place::Pageable) }
    }

    /// The host address of a span's bytes, for an access while work runs.
    ///
    /// # Errors
    ///
    /// An illegal address if the span is not live memory that `reach` can access.
    pub fn bytes(&self, address: u64, length: u64, reach: Reach<'_>) -> Outcome<*mut u8> {
        match self.place(address, length) {
            Ok(Place::Device { allocation, .. }) if allocation.is_live => {
                let may = match reach {
                    Reach::Engine => true,
                    Reach::Kernel(devices) => devices.contains(&allocation.device),
                };
                let arena = self.arena(allocation.device).filter(|_| may);
                arena.and_then(|arena| arena.bytes(address, length)).ok_or(Code::ILLEGAL_ADDRESS)
            }
            Ok(Place::Pinned(pinned)) => {
                let is_alias = address >= pinned.alias;
                if matches!(reach, Reach::Kernel(_)) && !is_alias {
                    return Err(Code::ILLEGAL_ADDRESS);
                }
                let offset = if is_alias { pinned.alias - pinned.host } else { 0 };
                Ok(host_pointer(address - offset))
            }
            Ok(Place::Pageable) if matches!(reach, Reach::Engine) => Ok(host_pointer(address)),
            _ => Err(Code::ILLEGAL_ADDRESS),
        }
    }

    /// The whole allocation or registration around an address.
    ///
    /// # Errors
    ///
    /// As for [`bytes`](Self::bytes).
    pub fn window(&self, address: u64, reach: Reach<'_>) -> Outcome<Window> {
        let (start, length) = match self.place(address, 1) {
            Ok(Place::Device { base, allocation }) => (base, allocation.length),
            Ok(Place::Pinned(pinned)) if address >= pinned.alias => (pinned.alias, pinned.length),
            _ => return Err(Code::ILLEGAL_ADDRESS),
        };
        Ok(Window { start, length, bytes: self.bytes(start, length, reach)? })
    }

    fn arena(&self, device: u32) -> Option<&Arena> {
        self.arenas.get(usize::try_from(device).ok()?)
    }
}

/// The host pointer for a host address.
pub fn host_pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// Overwrites memory with undefined contents: only both ends, so that large allocations take no
/// longer than small ones.
fn poison(arena: &Arena, base: u64, length: u64, value: u8) {
    let part = length.min(POISONED);
    for at in [base, base + length - part] {
        if let (Some(bytes), Ok(part)) = (arena.bytes(at, part), usize::try_from(part)) {
            // SAFETY: within the arena's mapping, and only in this allocation.
            unsafe { bytes.write_bytes(value, part) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        Space::new(vec![Arena::new(4 << 20).unwrap(), Arena::new(1 << 20).unwrap()])
    }

    fn memory(length: u64) -> Allocation {
        let owner = Owner::Context(1);
        let pieces = Pieces::One;
        Allocation { device: 0, length, owner, is_live: true, is_freed: false, pieces }
    }

    fn registered(host: u64, length: u64) -> Pinned {
        Pinned { host, alias: 0, length, context: 1, is_owned: false, flags: 0 }
    }

    #[test]
    fn allocations_are_separate_and_bounds_are_exact() {
        let mut space = space();
        let first = space.allocate(memory(1000)).unwrap();
        let second = space.allocate(memory(1000)).unwrap();
        assert!(second >= first + 1000 + GAP);
        assert!(matches!(space.place(first, 1000), Ok(Place::Device { .. })));
        assert!(matches!(space.place(first + 999, 1), Ok(Place::Device { .. })));
        for (address, length) in [(first, 1001), (first + 1000, 1), (first - 1, 2), (first, 9999)] {
            assert_eq!(space.place(address, length).unwrap_err(), Code::INVALID_VALUE);
        }
        space.release(first).unwrap();
        assert_eq!(space.place(first, 1).unwrap_err(), Code::INVALID_VALUE);
        assert!(space.bytes(first, 1, Reach::Engine).is_err());
        assert!(space.bytes(second, 1, Reach::Kernel(&[0])).is_ok());
        assert!(space.bytes(second, 1, Reach::Kernel(&[1])).is_err());
    }

    #[test]
    fn addresses_are_reused_after_all_others() {
        let mut space = space();
        let first = space.allocate(memory(8 << 20)).unwrap();
        space.release(first).unwrap();
        let second = space.allocate(memory(8 << 20)).unwrap();
        assert_ne!(first, second);
        space.release(second).unwrap();
        for _ in 0..10 {
            let next = space.allocate(memory(8 << 20)).unwrap();
            space.release(next).unwrap();
        }
        let large = space.allocate(memory(27 << 20)).unwrap();
        assert_eq!(space.allocate(memory(8 << 20)).unwrap_err(), Code::OUT_OF_MEMORY);
        space.release(large).unwrap();
    }

    #[test]
    fn registrations_do_not_overlap_and_spans_do_not_cross_them() {
        let mut space = space();
        let host = 0x7000_0000_0000;
        space.pin(registered(host, 8192)).unwrap();
        space.pin(registered(host + 8192, 4096)).unwrap();
        for (at, length) in [(host, 1), (host + 4096, 8192), (host - 1, 2), (host - 9, 99_999)] {
            let refused = space.pin(registered(at, length)).unwrap_err();
            assert_eq!(refused, Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        assert!(matches!(space.place(host, 8192), Ok(Place::Pinned(_))));
        assert!(matches!(space.place(host + ALIAS + 1, 8), Ok(Place::Pinned(_))));
        assert!(matches!(space.place(host - 4096, 4096), Ok(Place::Pageable)));
        for (at, length) in [
            (host, 8193),
            (host + 4096, 8192),
            (host + ALIAS, 8193),
            (host - 1, 2),
            (host + 8192, 4097),
            (host + ALIAS + (1 << 30), 1),
        ] {
            assert_eq!(space.place(at, length).unwrap_err(), Code::INVALID_VALUE, "{at:x}");
        }
        // A kernel can access registered memory only at its alias.
        assert!(space.bytes(host, 1, Reach::Kernel(&[0])).is_err());
        let by_alias = space.bytes(host + ALIAS, 1, Reach::Kernel(&[0])).unwrap();
        assert_eq!(by_alias, host_pointer(host));
        assert_eq!(space.bytes(host, 1, Reach::Engine), Ok(host_pointer(host)));
    }
}
