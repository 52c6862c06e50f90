//! The rules of [`Memory`].

use std::thread;

use terrane_core::{ByteCount, Location, Memory, Region, Span, StorageKind};

use crate::pattern::{Pattern, Piece, PieceAccess};

/// Checks all rules of one memory, which no other code uses. Its bytes are overwritten.
pub fn check_memory<M: Memory>(memory: M, access: &dyn PieceAccess) {
    the_location_fits_the_kind(&memory);
    bytes_keep_what_is_written(&memory, access);
    views_lie_within(&memory);
    moving_changes_nothing(memory, access);
}

/// The location matches the kind: host kinds have host addresses, devices have addresses of that
/// device, disks have file positions. Only host memory has an alias on a device.
pub fn the_location_fits_the_kind(memory: &impl Memory) {
    let (kind, location) = (memory.kind(), memory.location());
    let fits = match (kind, location) {
        (StorageKind::Device(id), Location::Device { device, .. }) => id == device,
        (StorageKind::Disk, Location::File(_)) => true,
        (StorageKind::Remote(peer), Location::Remote(at)) => peer == at.peer,
        (kind, Location::Host(_)) => kind.is_host(),
        _ => false,
    };
    assert!(fits, "memory of kind {kind} states the location {location}");
    if memory.device_alias().is_some() {
        assert!(kind.is_host(), "{kind} memory is not host memory, and has a device alias");
    }
}

/// Every byte of the span can be read, written and read again, including the first and the last.
pub fn bytes_keep_what_is_written(memory: &impl Memory, access: &dyn PieceAccess) {
    let mut bytes = vec![0; memory.length().to_usize()];
    // SAFETY: the memory is alive, and no other code uses it.
    unsafe { access.read(memory.location(), &mut bytes) }.expect("fresh memory is readable");
    write_pattern(memory, access);
    expect_pattern(memory, access, "after it was written");
}

/// A view begins at its offset, and none extends past the end.
pub fn views_lie_within(memory: &impl Memory) {
    let (location, length) = (memory.location(), memory.length());
    let end = location.checked_add(length);
    assert!(end.is_some(), "{length} from {location} on extend past the end of the address space");
    let half = ByteCount::new(length.get() / 2);
    let alias_moves = |alias: terrane_core::DeviceAddress| alias.checked_add(half).is_some();
    assert!(
        memory.device_alias().is_none_or(alias_moves),
        "the alias extends past the end of the address space"
    );
}

/// Kind, location, length and bytes are the same after the value was moved, also to another thread
/// and into a region.
pub fn moving_changes_nothing<M: Memory>(memory: M, access: &dyn PieceAccess) {
    let before = Span::of(&memory);
    write_pattern(&memory, access);
    let boxed = Box::new(memory);
    assert_eq!(Span::of(&boxed), before, "the span changed when the memory moved to the heap");
    let elsewhere = thread::scope(|scope| {
        let moved = scope.spawn(move || {
            let region = Region::new(boxed);
            (region.span(), region)
        });
        moved.join().expect("the thread only moves the memory")
    });
    let (span, region) = elsewhere;
    assert_eq!(span, before, "the span changed when the memory moved to another thread");
    assert_eq!(region.span(), before, "the span changed when the memory moved back");
    expect_pattern(&region, access, "after the memory moved");
    let (length, half) = (region.length(), ByteCount::new(region.length().get() / 2));
    let rest = length.checked_sub(half).expect("half is no more than all");
    let view = region.view(half, rest).expect("a view within the memory");
    assert_eq!(
        Some(view.location()),
        before.location.checked_add(half),
        "a view is at the wrong location"
    );
    let too_long = rest.checked_add(ByteCount::new(1)).expect("it fits");
    assert!(region.view(half, too_long).is_err(), "a view extends past the end");
}

const PATTERN: Pattern = Pattern::new(0x4D45_4D4F_5259);
const PIECE: Piece = Piece { block: 0, layer: 0, outer: 0 };

fn write_pattern(memory: &impl Memory, access: &dyn PieceAccess) {
    let mut bytes = vec![0; memory.length().to_usize()];
    PATTERN.write(PIECE, 0, &mut bytes);
    // SAFETY: the memory is alive, and no other code uses it.
    unsafe { access.write(memory.location(), &bytes) }.expect("memory is writable");
}

fn expect_pattern(memory: &impl Memory, access: &dyn PieceAccess, when: &str) {
    let mut bytes = vec![0; memory.length().to_usize()];
    // SAFETY: the memory is alive, and no other code uses it.
    unsafe { access.read(memory.location(), &mut bytes) }.expect("memory is readable");
    let first = PATTERN.first_mismatch(PIECE, 0, &bytes);
    assert!(first.is_none(), "byte {first:?} of {memory:?} has changed, {when}");
}
