//! The rules of [`Allocate`].

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Limits, Memory, RegionRequest, Span,
};

use super::memory::check_memory;
use crate::pattern::{InProcess, Pattern, Piece, PieceAccess};
use crate::random::Seeded;

/// Describes an allocator to its suite.
pub trait AllocatorFixture {
    /// The allocator to check.
    type Allocator: Allocate;

    /// A new allocator without allocations.
    fn allocator(&self) -> Self::Allocator;

    /// Accesses the bytes of its memory.
    fn access(&self) -> &dyn PieceAccess {
        &InProcess
    }

    /// The strictest alignment that it must support. By default 4 KiB, or that of its limits.
    fn strictest_alignment(&self) -> Alignment {
        Alignment::PAGE.max(self.allocator().limits().alignment)
    }

    /// A number that grows with each allocation and decreases when it is freed, such as live
    /// allocations or live bytes. `None` states that no such number exists, so that
    /// [`dropping_frees`] and [`refusals_are_typed_and_leave_nothing`] check no number.
    fn live(&self, allocator: &Self::Allocator) -> Option<u64>;
}

/// Checks all rules.
pub fn check_allocator(fixture: &impl AllocatorFixture) {
    memory_has_the_requested_properties(fixture);
    limits_are_kept(fixture);
    memory_keeps_its_own_rules(fixture);
    nothing_overlaps(fixture);
    zero_bytes_are_a_request_like_any_other(fixture);
    dropping_frees(fixture);
    refusals_are_typed_and_leave_nothing(fixture);
    memory_outlives_its_allocator(fixture);
    random_use_keeps_bytes_apart(fixture, 0x414C_4C4F_4341_5445);
}

/// Memory has at least the requested bytes and alignment, and the allocator's kind.
pub fn memory_has_the_requested_properties(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    for bytes in [1, 7, 512, 4095, 4096, 4097, 1 << 20] {
        for exponent in 0..=fixture.strictest_alignment().log2() {
            let alignment = Alignment::new(1 << exponent).expect("a power of two");
            let request = RegionRequest::new(ByteCount::new(bytes)).aligned_to(alignment);
            let memory = allocate(&allocator, &request);
            let (length, location) = (memory.length(), memory.location());
            assert!(length >= request.bytes, "{length:?} for {request:?}");
            assert!(location.alignment() >= alignment, "{location} for {request:?}");
            assert_eq!(memory.kind(), allocator.kind(), "the kind is not the allocator's");
        }
    }
}

/// Every region meets the limits.
pub fn limits_are_kept(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    let Limits { alignment, granule, largest_region } = allocator.limits();
    let memory = allocate(&allocator, &RegionRequest::new(ByteCount::new(1)));
    let location = memory.location();
    assert!(
        location.alignment() >= alignment,
        "the limits state an alignment of {alignment}, and the memory is at {location}"
    );
    let length = memory.length();
    assert!(
        length.is_aligned_to(granule),
        "the limits state multiples of {granule}, and the memory has {length:?}"
    );
    if let Some(largest) = largest_region {
        let bytes = largest.checked_add(ByteCount::new(1)).expect("it fits");
        let error = refused(&allocator, &RegionRequest::new(bytes));
        assert!(matches!(error, AllocateError::TooLarge { .. }), "more than the largest: {error}");
    }
}

/// Allocated memory of any length meets the rules of [`Memory`].
pub fn memory_keeps_its_own_rules(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    for bytes in [0, 1, 4097, 1 << 18] {
        let memory = allocate(&allocator, &RegionRequest::new(ByteCount::new(bytes)));
        check_memory(memory, fixture.access());
    }
}

/// No two live allocations share a byte.
pub fn nothing_overlaps(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    let sizes = [1, 100, 4096, 10_000].into_iter().cycle().take(24);
    let memory: Vec<_> = sizes
        .map(|bytes| allocate(&allocator, &RegionRequest::new(ByteCount::new(bytes))))
        .collect();
    for (number, one) in memory.iter().enumerate() {
        for other in &memory[..number] {
            assert!(!Span::of(one).overlaps(&Span::of(other)), "{one:?} overlaps {other:?}");
        }
    }
}

/// A request of zero bytes succeeds any number of times, with an aligned location.
pub fn zero_bytes_are_a_request_like_any_other(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    let alignment = fixture.strictest_alignment();
    let request = RegionRequest::new(ByteCount::ZERO).aligned_to(alignment);
    let all: Vec<_> = (0..64).map(|_| allocate(&allocator, &request)).collect();
    for memory in &all {
        let location = memory.location();
        assert!(location.alignment() >= alignment, "no bytes at {location} for {request:?}");
    }
}

/// Dropping the memory frees it: the live number is as before.
pub fn dropping_frees(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    let before = fixture.live(&allocator);
    let ask = || allocate(&allocator, &RegionRequest::new(ByteCount::kib(64)));
    let memory = [ask(), ask()];
    if let (Some(before), Some(during)) = (before, fixture.live(&allocator)) {
        assert!(during > before, "two allocations are live, and are not counted");
    }
    drop(memory);
    assert_eq!(fixture.live(&allocator), before, "memory was dropped and is still live");
}

/// An impossible request is refused with an error that names the request. It leaves nothing
/// allocated, and the next request succeeds.
pub fn refusals_are_typed_and_leave_nothing(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    let before = fixture.live(&allocator);
    for bytes in [u64::MAX, u64::MAX >> 1, 1 << 60] {
        let request = RegionRequest::new(ByteCount::new(bytes)).labelled("absurd");
        let error = refused(&allocator, &request).to_string();
        assert!(error.contains("absurd"), "the label is not in the error: {error}");
        assert_eq!(fixture.live(&allocator), before, "a refused request left something allocated");
    }
    drop(allocate(&allocator, &RegionRequest::new(ByteCount::new(1))));
}

/// The memory may outlive its allocator.
pub fn memory_outlives_its_allocator(fixture: &impl AllocatorFixture) {
    let allocator = fixture.allocator();
    let memory = allocate(&allocator, &RegionRequest::new(ByteCount::new(10_000)));
    drop(allocator);
    check_memory(memory, fixture.access());
}

/// In random use, every allocation keeps the written bytes until it is freed.
pub fn random_use_keeps_bytes_apart(fixture: &impl AllocatorFixture, seed: u64) {
    let allocator = fixture.allocator();
    let access = fixture.access();
    let pattern = Pattern::new(seed);
    let mut random = Seeded::new(seed);
    let mut live = Vec::new();
    for block in 0..200_u32 {
        let piece = Piece { block, layer: 0, outer: 0 };
        let bytes = u64::try_from(random.below(20_000)).expect("it fits");
        let memory = allocate(&allocator, &RegionRequest::new(ByteCount::new(bytes)));
        let mut bytes = vec![0; memory.length().to_usize()];
        pattern.write(piece, 0, &mut bytes);
        // SAFETY: the memory is alive, and no other code uses it.
        unsafe { access.write(memory.location(), &bytes) }.expect("memory is writable");
        live.push((piece, memory));
        if random.once_in(2) {
            let (piece, memory) = live.swap_remove(random.below(live.len()));
            let mut bytes = vec![0; memory.length().to_usize()];
            // SAFETY: the memory is alive, and no other code uses it.
            unsafe { access.read(memory.location(), &mut bytes) }.expect("memory is readable");
            let wrong = pattern.mismatches(piece, 0, &bytes);
            assert_eq!(wrong, 0, "bytes of {memory:?} changed during other allocations and frees");
        }
    }
}

#[track_caller]
fn allocate<A: Allocate>(allocator: &A, request: &RegionRequest) -> A::Memory {
    match allocator.allocate(request) {
        Ok(memory) => memory,
        Err(error) => panic!("{request:?} was refused: {error}"),
    }
}

#[track_caller]
fn refused(allocator: &impl Allocate, request: &RegionRequest) -> AllocateError {
    match allocator.allocate(request) {
        Ok(memory) => panic!("{request:?} is impossible, and returned {memory:?}"),
        Err(error) => error,
    }
}
