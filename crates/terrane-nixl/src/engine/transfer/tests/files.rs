//! Transfers to files, through POSIX.

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
