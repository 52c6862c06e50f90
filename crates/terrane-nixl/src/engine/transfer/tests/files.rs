//! Transfers to files, through POSIX.

use std::ops::Range;
use std::path::Path;

use terrane_storage::{DiskAllocator, DiskOptions};

use super::*;

/// UCX and POSIX post one descriptor after another, and report a failure without its position.
#[test]
fn a_failed_post_may_have_posted_some_of_its_descriptors() {
    // 64 I/Os.
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let agent = AgentBuilder::unnamed().backend(posix).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let config = LayoutConfig::builder().num_blocks(64).num_layers(1).outer_dim(1).page_size(16);
    let config = config.inner_dim(64).element(ElementFormat::Width(2)).build().unwrap();
    let builder = LayoutBuilder::new(config).kind(LayoutKind::FullyContiguous);
    let file = builder.allocate(&files).register(&agent).build().unwrap();
    let builder = LayoutBuilder::new(config).kind(LayoutKind::FullyContiguous);
    let local = builder.allocate(&HeapAllocator::system()).register(&agent).build().unwrap();
    let (file, local) = (Endpoint::new(file).unwrap(), Endpoint::new(local).unwrap());

    // The test uses nearly all I/Os without the engine's knowledge.
    let list = |memory| nixl_sys::XferDescList::new(memory).unwrap();
    let (mut here, mut there) = (list(nixl_sys::MemType::Dram), list(nixl_sys::MemType::File));
    let address = ByteCount::new(local.base(0).unwrap().as_host().unwrap().get()).to_usize();
    let position = file.base(0).unwrap().as_file().unwrap();
    let offset = ByteCount::new(position.offset.get()).to_usize();
    for _ in 0..60 {
        here.add_desc(address, 512, 0);
        there.add_desc(offset, 512, u64::try_from(position.file.descriptor).unwrap());
    }
    let (operation, name) = (nixl_sys::XferOp::Write, agent.name().as_str());
    let raw = agent.raw();
    let other = raw.create_xfer_req(operation, &here, &there, name, None).unwrap();
    assert!(raw.post_xfer_req(&other, None).unwrap());

    let (all, back): (Vec<u32>, Vec<u32>) = (0..64).map(|id| (id, 63 - id)).unzip();
    let write = Transfer::new(&local, &file).blocks(&all, &back);
    let (mut transfer, completion) = queued(&agent, write);
    let step = transfer.advance(&agent, &Rates::new(&agent));
    let TransferProgress::Orphaned(mut orphaned) = step else { panic!("not orphaned") };
    let error = completion.wait().result.unwrap_err();
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestError::Status { step: NixlStep::Post, peer: None, .. }) => {}
        cause => panic!("{cause:?} of {error:?}"),
    }
    // A file has no connection to close.
    assert_eq!(orphaned.poll(&agent), Outstanding::Unknowable);
    drop((transfer, orphaned));
    assert!(local.hold_for_write(&[5]).is_err(), "the memory was released");
    // The other request completes.
    poll_within_timeout(|| {
        matches!(raw.get_xfer_status(&other), Ok(nixl_sys::XferStatus::Success)).then_some(())
    });
}

/// A file and memory of `blocks` pages, registered with an agent of 64 I/Os.
fn ends(directory: &Path, blocks: u32) -> (Agent, Endpoint, Endpoint) {
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let agent = AgentBuilder::unnamed().backend(posix).build().unwrap();
    let files = DiskAllocator::new(directory, DiskOptions::default()).unwrap();
    let config = LayoutConfig::builder().num_blocks(blocks).num_layers(1).outer_dim(1);
    let config = config.page_size(16).inner_dim(64).element(ElementFormat::Width(2));
    let builder = || LayoutBuilder::new(config.build().unwrap()).fully_contiguous();
    let file = builder().allocate(&files).register(&agent).build().unwrap();
    let local = builder().allocate(&HeapAllocator::system()).register(&agent).build().unwrap();
    let (file, local) = (Endpoint::new(file).unwrap(), Endpoint::new(local).unwrap());
    (agent, local, file)
}

/// Posts a request of these blocks, and leaks it: its end is never known.
fn leak(agent: &Agent, local: &Endpoint, file: &Endpoint, blocks: Range<u32>) {
    let ids: Vec<u32> = blocks.step_by(2).collect();
    let (mut transfer, _) = queued(agent, Transfer::new(local, file).blocks(&ids, &ids));
    assert!(matches!(transfer.advance(agent, &Rates::new(agent)), TransferProgress::Changed));
    // A transfer that drops with a request in flight orphans it.
    drop(transfer);
}

#[test]
fn requests_need_no_ios_that_leaked_requests_keep() {
    let directory = tempfile::tempdir().unwrap();
    let (agent, local, file) = ends(directory.path(), 192);
    leak(&agent, &local, &file, 0..80);
    // 24 I/Os are left for 48 descriptors.
    let ids: Vec<u32> = (96..192).step_by(2).collect();
    let write = Transfer::new(&local, &file).blocks(&ids, &ids);
    let write = write.deadline(Instant::now() + Duration::from_secs(30));
    let (mut transfer, completion) = queued(&agent, write);
    poll_within_timeout(|| {
        let step = transfer.advance(&agent, &Rates::new(&agent));
        matches!(step, TransferProgress::Ended).then_some(())
    });
    completion.wait().result.unwrap();
}

#[test]
fn a_backend_whose_ios_are_all_lost_is_declined() {
    let directory = tempfile::tempdir().unwrap();
    let (agent, local, file) = ends(directory.path(), 192);
    let write = || Transfer::new(&local, &file).blocks(&[190], &[190]);
    let (mut late, completion) = queued(&agent, write());
    leak(&agent, &local, &file, 0..128);
    // A transfer that was already queued fails, and does not wait.
    let step = late.advance(&agent, &Rates::new(&agent));
    assert!(matches!(step, TransferProgress::Ended));
    let error = completion.wait().result.unwrap_err();
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestError::NoIosLeft { backend }) => assert_eq!(backend.as_str(), "POSIX"),
        cause => panic!("{cause:?} of {error:?}"),
    }
    let engine = Arc::<KeepsJobs>::default();
    let manager = TransferManager::new([Arc::clone(&engine) as _]);
    let _completion = manager.submit(write(), ()).unwrap();
    let job = engine.0.lock().unwrap().pop().unwrap();
    let declined = Route::of(&agent, &EndpointCache::default(), job.plan()).unwrap_err();
    assert_eq!(declined, Declined::NoIosLeft);
}

#[test]
fn a_file_that_ends_before_the_written_bytes_is_an_error() {
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let agent = AgentBuilder::unnamed().backend(posix).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let config = LayoutConfig::builder().num_blocks(4).num_layers(1).outer_dim(1).page_size(16);
    let config = config.inner_dim(64).element(ElementFormat::Width(2)).build().unwrap();
    let builder = || LayoutBuilder::new(config).kind(LayoutKind::FullyContiguous);
    let file = builder().allocate(&files).register(&agent).build().unwrap();
    let local = builder().allocate(&HeapAllocator::system()).register(&agent).build().unwrap();
    let (file, local) = (Endpoint::new(file).unwrap(), Endpoint::new(local).unwrap());
    let write = Transfer::new(&local, &file).blocks(&[1, 2], &[1, 2]);
    let (mut transfer, completion) = queued(&agent, write);
    let rates = Rates::new(&agent);
    // All bytes are written before the backend is polled.
    assert!(matches!(transfer.advance(&agent, &rates), TransferProgress::Changed));
    let descriptor = file.base(0).unwrap().as_file().unwrap().file.descriptor;
    let path = format!("/proc/self/fd/{descriptor}");
    let opened = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    poll_within_timeout(|| {
        opened.set_len(5000).unwrap();
        matches!(transfer.advance(&agent, &rates), TransferProgress::Ended).then_some(())
    });
    let error = completion.wait().result.unwrap_err();
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestError::WrittenShort { length: 5000, wanted: 6144 }) => {}
        cause => panic!("{cause:?} of {error:?}"),
    }
}
