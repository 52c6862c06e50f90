//! The report of a transfer.

use terrane_nixl::{AgentBuilder, BackendConfig, NixlEngine, NixlEngineOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::support::*;

#[test]
fn times_are_what_nixl_measured() {
    let pair = Pair::new();
    let manager = pair.manager();
    let (local, remote) = (pair.local(config(8), CONTIGUOUS), pair.remote(config(8), CONTIGUOUS));
    let transfer = Transfer::new(&local, &remote).blocks(&[0, 2, 4], &[0, 2, 4]);
    let report = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
    let times = report.engine_times.expect("telemetry is on");
    assert_eq!((times.requests, times.descriptors), (1, 3));
    assert!(times.post <= times.transfer && times.transfer <= report.copied, "{report}");
    assert!(report.to_string().contains("1 requests of 3 descriptors"), "{report}");
}

#[test]
fn without_telemetry_there_are_no_times() {
    let pair = Pair::new();
    let ucx = BackendConfig::new("UCX");
    let here = AgentBuilder::unnamed().telemetry(false).backend(ucx).build().unwrap();
    let theirs = registered(&HeapAllocator::system(), &pair.there, config(1), CONTIGUOUS);
    let remote = here.import(&pair.there.export(&theirs).unwrap()).unwrap();
    let local = registered(&HeapAllocator::system(), &here, config(1), CONTIGUOUS);
    let local = Endpoint::new(local).unwrap();
    let engine = NixlEngine::new(&here, NixlEngineOptions::default()).unwrap();
    let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
    let transfer = Transfer::new(&local, remote.endpoint()).blocks(&[0], &[0]);
    let report = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
    assert_eq!(report.engine_times, None);
}
