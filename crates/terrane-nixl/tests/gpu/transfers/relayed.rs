//! A device and a file that no NIXL backend supports together: a relay copies through pinned memory, and
//! the explanation reports it.

use std::sync::Arc;

use terrane_core::BackendName;
use terrane_cuda::{Context, DeviceAllocator, EnginesOptions, engines};
use terrane_layout::{LayoutBuilder, RegistrationState};
use terrane_nixl::{
    Agent, AgentBuilder, BackendConfig, NixlEngine, NixlEngineOptions, Refusal, Status,
};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::pattern::Pattern;
use terrane_transfer::{
    CopyEngine, Declined, DeviceOrder, Endpoint, Side, Transfer, TransferManager,
};

use super::{CONTIGUOUS, SEPARATE, SOME, config, end};
use crate::chain;
use crate::machine::{device, with_gds};
use crate::needs::{OnDevice, device_with_kernels};

const BLOCKS: u32 = 8;

/// The agent has POSIX and no GDS, and registers only the file. So the engines of the device and of
/// the disk copy, although NIXL's engine is queried first. The explanation has its reason.
#[test]
fn without_gds_a_device_and_a_file_exchange_blocks_through_pinned_memory() {
    const TEST: &str =
        "transfers::relayed::without_gds_a_device_and_a_file_exchange_blocks_through_pinned_memory";
    // A simulated device suffices, because NIXL does not access it here.
    let Some(context) = device_with_kernels(TEST, SOME) else { return };
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let agent = AgentBuilder::unnamed().backend(posix).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = end(&files, &agent, BLOCKS, CONTIGUOUS);
    let on_device = LayoutBuilder::new(config(BLOCKS))
        .kind(SEPARATE)
        .allocate(&DeviceAllocator::new(&context))
        .register_if_supported(&agent)
        .build()
        .unwrap();
    // The layout has the refusals of its memory.
    let state = on_device.registration_state();
    let RegistrationState::Refused { cause, .. } = state else { panic!("{state:?}") };
    let said = chain(&**cause);
    assert!(said.contains("registers device 0 memory"), "{said}");
    let on_device = Endpoint::new(on_device).unwrap();

    exchange(&context, &agent, &on_device, &file, Declined::NotRegistered);
}

/// The agent has GDS, which accepts the device, and POSIX, which accepts the file: cuFile refuses
/// files without a name. Neither reaches both ends, and GDS does not copy a file that it refused.
#[test]
fn a_file_that_gds_refuses_is_copied_by_posix_and_to_a_device_through_pinned_memory() {
    const TEST: &str = "transfers::relayed::a_file_that_gds_refuses_is_copied_by_posix_and_to_a_device_through_pinned_memory";
    let Some(context) = device(TEST, SOME) else { return };
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let both = AgentBuilder::unnamed().backend(BackendConfig::new("GDS")).backend(posix);
    let Some(agent) = with_gds(TEST, both) else { return };
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = end(&files, &agent, BLOCKS, CONTIGUOUS);
    let on_device = end(&DeviceAllocator::new(&context), &agent, BLOCKS, SEPARATE);
    let record = |end: &Endpoint| end.layout().registrations()[0].record.clone();
    let (of_file, of_device) = (record(&file), record(&on_device));
    let (gds, posix) = (BackendName::from("GDS"), BackendName::from("POSIX"));
    let accepted = [&of_file, &of_device].map(|r| [r.accepted_by(&gds), r.accepted_by(&posix)]);
    assert_eq!(accepted, [[false, true], [true, false]], "{of_file:?}, {of_device:?}");
    // GDS was called for the file, and it supports files.
    let outcome = of_file.backends.iter().find(|outcome| outcome.backend == gds).unwrap();
    let refusal = outcome.refusal.as_ref().unwrap().downcast_ref::<Refusal>();
    assert!(matches!(refusal, Some(Refusal::Status(Status::Backend))), "{refusal:?}");

    // POSIX copies between host memory and the file, although GDS comes first and accepts host
    // memory.
    let host = end(&SystemAllocator::new(SystemOptions::default()), &agent, BLOCKS, SEPARATE);
    let nixl = NixlEngine::new(&agent, NixlEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(nixl) as Arc<dyn CopyEngine>]);
    let (data, blocks) = (Pattern::new(5), [1, 3]);
    data.fill(&host).unwrap();
    let transfer = Transfer::new(&host, &file).blocks(&blocks, &blocks);
    let report = manager.submit(transfer, ()).unwrap().wait().result.unwrap();
    assert!(report.explanation.path().starts_with("POSIX write"), "{report}");
    let access = OnDevice::new(&context);
    data.verify_with(&file, &blocks, &blocks, 0..4, &access).unwrap().assert_clean("by POSIX");

    exchange(&context, &agent, &on_device, &file, |_| Declined::NoCommonBackend);
}

/// Copies blocks between a device and a file by the relay. NIXL's engine declines them for this
/// reason, which depends on the device's side.
fn exchange(
    context: &Context,
    agent: &Agent,
    on_device: &Endpoint,
    file: &Endpoint,
    reason: impl Fn(Side) -> Declined,
) {
    let nixl = NixlEngine::new(agent, NixlEngineOptions::default()).unwrap();
    let mut all = vec![Arc::new(nixl) as Arc<dyn CopyEngine>];
    all.extend(engines([context], &EnginesOptions::default()).unwrap());
    let manager = TransferManager::new(all);
    let access = OnDevice::new(context);
    let (data, other) = (Pattern::new(7), Pattern::new(8));
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    data.fill_with(on_device, &blocks, &access).unwrap();
    other.fill(file).unwrap();
    let make = |transfer: Transfer, device_at: Side| {
        let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
        let explanation = manager.explain(&transfer).unwrap();
        assert_eq!(explanation.engine, "relay", "{explanation}");
        assert!(explanation.reason().contains("through pinned memory"), "{explanation}");
        let declined = ("nixl", reason(device_at));
        assert!(explanation.declined.contains(&declined), "{explanation:?}");
        let said = format!("declined by nixl: {}", declined.1);
        assert!(explanation.to_string().contains(&said), "{explanation}");
        let report = manager.submit(transfer, ()).unwrap().wait().result.unwrap();
        assert_eq!(report.explanation.engine, "relay", "{report}");
        assert!(report.explanation.declined.contains(&declined), "{report}");
    };

    // Some blocks to the file, whose other blocks are unchanged.
    make(Transfer::new(on_device, file).blocks(&[7, 2, 4], &[0, 5, 3]), Side::Source);
    data.verify_with(file, &[0, 5, 3], &[7, 2, 4], 0..4, &access).unwrap().assert_clean("written");
    let untouched = [1, 2, 4, 6, 7];
    let seen = other.verify_with(file, &untouched, &untouched, 0..4, &access).unwrap();
    seen.assert_clean("beside what was written");
    // And from the file to other blocks of the device.
    make(Transfer::new(file, on_device).blocks(&[5, 6], &[1, 0]), Side::Destination);
    data.verify_with(on_device, &[1], &[2], 0..4, &access).unwrap().assert_clean("read back");
    other.verify_with(on_device, &[0], &[6], 0..4, &access).unwrap().assert_clean("read");
    let untouched: Vec<u32> = (2..BLOCKS).collect();
    let seen = data.verify_with(on_device, &untouched, &untouched, 0..4, &access).unwrap();
    seen.assert_clean("beside what was read");
}
