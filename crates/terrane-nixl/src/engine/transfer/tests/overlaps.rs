//! Transfers of memory that several registrations overlap.

use terrane_core::{Alignment, Allocate, Region, RegionRequest, Register};
use terrane_storage::{DiskAllocator, DiskOptions};

use super::*;
use crate::agent::config::FileAccess;
use crate::register::descriptor::Descriptor;

/// The length of a layout.
const LAYOUT: ByteCount = ByteCount::kib(32);

/// Memory of two layouts.
fn slab() -> Region {
    let request = RegionRequest::new(ByteCount::kib(64)).aligned_to(Alignment::PAGE);
    Region::new(HeapAllocator::system().allocate(&request).unwrap())
}

/// A layout in the first half of the memory, with its own registration.
fn in_first_half(memory: &Region, agent: &Agent) -> Endpoint {
    let builder = LayoutBuilder::new(config()).kind(LayoutKind::FullyContiguous);
    let builder = builder.adopt_memory([memory.view(ByteCount::ZERO, LAYOUT).unwrap()]);
    Endpoint::new(builder.register(agent).build().unwrap()).unwrap()
}

/// Whether the agent's table has exactly this span.
fn has(agent: &Agent, memory: &Region) -> bool {
    let span = Descriptor::of(&memory.span(), FileAccess::Buffered).unwrap();
    agent.registrations().lock().unwrap().overlapping(&[span], 0).contains(&span)
}

#[test]
fn the_bytes_behind_a_registered_part_are_transferred() {
    let agents = TwoAgents::new(builder());
    Pattern::new(3).fill(&agents.blocks).unwrap();
    let region = agents.local.layout().regions()[0].clone();
    let part = region.view(ByteCount::kib(8), ByteCount::kib(4)).unwrap();
    let part = agents.agent.register(part).unwrap();
    let (mut transfer, completion) = agents.read(3);
    assert!(agents.finish(&mut transfer, || ()).is_none());
    completion.wait().result.unwrap();
    let seen = Pattern::new(3).verify_with(&agents.local, &[3], &[3], 0..2, &InProcess).unwrap();
    assert_eq!(seen.mismatches, 0);
    drop(part);
}

#[test]
fn a_longer_registration_is_kept_for_the_layout_that_uses_it() {
    const TEST: &str = "engine::transfer::tests::overlaps::a_longer_registration_is_kept_for_the_layout_that_uses_it";
    over_tcp(TEST, || {
        let mut agents = TwoAgents::silent();
        let slab = slab();
        let whole = agents.agent.register(slab.clone()).unwrap();
        agents.local = in_first_half(&slab, &agents.agent);
        let (mut transfer, completion) = agents.reading(1);
        drop(whole);
        assert!(has(&agents.agent, &slab), "it was deregistered under a request");
        agents.local = Endpoint::new(layout(&agents.agent)).unwrap();
        drop(completion);
        assert!(has(&agents.agent, &slab), "it was deregistered under a request");
        assert!(agents.finish(&mut transfer, || drop(agents.owner.notifications())).is_none());
        assert!(!has(&agents.agent, &slab));
    });
}

/// NIXL uses the other registration, because it begins later.
#[test]
fn a_registration_of_other_memory_is_kept_until_requests_end() {
    const TEST: &str = "engine::transfer::tests::overlaps::a_registration_of_other_memory_is_kept_until_requests_end";
    over_tcp(TEST, || {
        for is_orphaned in [false, true] {
            let mut agents = TwoAgents::silent();
            Pattern::new(3).fill(&agents.blocks).unwrap();
            let slab = slab();
            agents.local = in_first_half(&slab, &agents.agent);
            let overlapping = slab.view(ByteCount::kib(16), LAYOUT).unwrap();
            let other = agents.agent.register(overlapping.clone()).unwrap();
            let (mut transfer, completion) = agents.reading(3);
            drop(other);
            assert!(has(&agents.agent, &overlapping), "it was deregistered under a request");
            if is_orphaned {
                transfer.deadline = Some(Instant::now());
                let TransferProgress::Orphaned(mut orphaned) = agents.advance(&mut transfer) else {
                    panic!("not orphaned")
                };
                let error = completion.wait().result.unwrap_err();
                assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error}");
                assert!(has(&agents.agent, &overlapping), "it was deregistered under an orphan");
                poll_within_timeout(|| {
                    drop(agents.owner.notifications().unwrap());
                    (orphaned.poll(&agents.agent) == Outstanding::Nothing).then_some(())
                });
            } else {
                let progress = || drop(agents.owner.notifications().unwrap());
                assert!(agents.finish(&mut transfer, progress).is_none());
                completion.wait().result.unwrap();
                let seen = Pattern::new(3).verify_with(&agents.local, &[3], &[3], 0..2, &InProcess);
                assert_eq!(seen.unwrap().mismatches, 0);
            }
            assert!(!has(&agents.agent, &overlapping), "a transfer that has ended keeps it");
        }
    });
}

#[test]
fn an_overlapping_registration_of_a_file_is_kept_until_requests_end() {
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let agent = AgentBuilder::unnamed().backend(posix).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = Region::new(files.allocate(&RegionRequest::new(ByteCount::kib(64))).unwrap());
    let target = in_first_half(&file, &agent);
    let overlapping = file.view(ByteCount::kib(16), LAYOUT).unwrap();
    let other = agent.register(overlapping.clone()).unwrap();
    let local = Endpoint::new(layout(&agent)).unwrap();
    let write = Transfer::new(&local, &target).blocks(&[3], &[3]);
    let (mut transfer, completion) = queued(&agent, write);
    assert!(matches!(transfer.advance(&agent, &Rates::new(&agent)), TransferProgress::Changed));
    drop(other);
    assert!(has(&agent, &overlapping), "it was deregistered under a request");
    poll_within_timeout(|| {
        let step = transfer.advance(&agent, &Rates::new(&agent));
        matches!(step, TransferProgress::Ended).then_some(())
    });
    completion.wait().result.unwrap();
    assert!(!has(&agent, &overlapping));
}
