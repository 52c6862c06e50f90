//! Transfers that no single engine copies: between the device and system memory or files, through
//! pinned memory.

use std::any::Any;
use std::sync::Arc;

use terrane_core::{Alignment, ByteCount};
use terrane_cuda::{
    Context, DeviceAllocator, DeviceEngine, DeviceEngineOptions, EnginesOptions, PinnedAllocator,
    PinnedOptions, engines,
};
use terrane_layout::{LayoutConfig, LayoutKind};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::conformance::copy_engine::check_transfer;
use terrane_testkit::conformance::{EngineFixture, check_copy_engine};
use terrane_testkit::model::Image;
use terrane_testkit::pattern::PieceAccess;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint, TransferManager};

use super::fixture::{APART, DEVICE, HeldStream, LAYERS_APART, PINNED, apart, config, endpoint};
use crate::needs::{LITTLE, OnDevice, device};

const FILE: &str = "file";
const ALIGNED_FILE: &str = "aligned file";
const SYSTEM: &str = "system";

/// A relay with its two engines.
struct Relayed {
    context: Context,
    options: RelayOptions,
    ends: &'static [&'static str],
    directory: tempfile::TempDir,
    access: OnDevice,
}

impl Relayed {
    fn new(context: &Context, options: RelayOptions, ends: &'static [&'static str]) -> Self {
        let (directory, access) = (tempfile::tempdir().unwrap(), OnDevice::new(context));
        Self { context: context.clone(), options, ends, directory, access }
    }

    fn pinned(&self) -> PinnedAllocator {
        PinnedAllocator::new(&self.context, PinnedOptions::default()).unwrap()
    }
}

impl EngineFixture for Relayed {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        let device = DeviceEngine::new(&self.context, DeviceEngineOptions::default()).unwrap();
        let other: Arc<dyn CopyEngine> = if self.ends.contains(&FILE) {
            Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap())
        } else {
            Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap())
        };
        Arc::new(RelayEngine::new(Arc::new(device), other, self.pinned(), &self.options).unwrap())
    }

    fn ends(&self) -> &[&'static str] {
        self.ends
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let files = || DiskAllocator::new(self.directory.path(), DiskOptions::default()).unwrap();
        match end {
            APART => apart(&self.context, config, kind),
            SYSTEM => endpoint(&SystemAllocator::new(SystemOptions::default()), config, kind),
            FILE => endpoint(&files(), config, kind),
            ALIGNED_FILE => {
                let aligned = config.with_block_alignment(Alignment::PAGE).unwrap();
                endpoint(&files(), aligned, kind)
            }
            PINNED => endpoint(&self.pinned(), config, kind),
            _ => endpoint(&DeviceAllocator::new(&self.context), config, kind),
        }
    }

    fn serves(&self, source: &str, destination: &str) -> bool {
        let on_device = |end| end == DEVICE || end == APART;
        on_device(source) != on_device(destination)
    }

    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        Some(endpoint(&self.pinned(), config, LayoutKind::FullyContiguous))
    }

    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        let held = HeldStream::new(&self.context);
        Some((held.order(), Box::new(held)))
    }

    fn least_relayouts(&self) -> usize {
        40
    }

    fn access(&self) -> &dyn PieceAccess {
        &self.access
    }
}

/// Slots with room for a layer of any of the suite's blocks, but not for every block.
const SCARCE: RelayOptions = RelayOptions { slots: 2, slot_bytes: ByteCount::kib(80) };

#[test]
fn device_and_disk_conform() {
    let Some(context) = device("device_and_disk_conform", LITTLE) else { return };
    for options in [RelayOptions::default(), SCARCE] {
        check_copy_engine(&Relayed::new(&context, options, &[DEVICE, APART, FILE, ALIGNED_FILE]));
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn device_and_system_memory_conform() {
    let Some(context) = device("device_and_system_memory_conform", LITTLE) else { return };
    for options in [RelayOptions::default(), SCARCE] {
        check_copy_engine(&Relayed::new(&context, options, &[DEVICE, APART, SYSTEM]));
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// One manager serves every pair of kinds of memory, each with the engine for that pair.
#[test]
fn all_engines_together_serve_every_pair() {
    let Some(context) = device("all_engines_together_serve_every_pair", LITTLE) else { return };
    let before = context.usage();
    let places = [DEVICE, APART, PINNED, SYSTEM, FILE];
    let fixture = Relayed::new(&context, RelayOptions::default(), &[DEVICE]);
    let manager = TransferManager::new(engines([&context], &EnginesOptions::default()).unwrap());
    let ids: Vec<u32> = (0..24).rev().collect();
    for (seed, (from, to)) in (0..).zip(places.iter().flat_map(|&from| places.map(|to| (from, to))))
    {
        let (shape, access) = (config(24, 3, 16), fixture.access());
        let source = fixture.endpoint(from, shape, LayoutKind::FullyContiguous);
        let destination = fixture.endpoint(to, shape, LAYERS_APART);
        Image::scribble(&source, access, seed);
        let report = check_transfer(&manager, access, (&source, &ids), (&destination, &ids), 0..3);
        let on_device = [from, to].map(|end| end == DEVICE || end == APART);
        let engine = match (on_device, [from, to]) {
            ([true, true], _) => "cuda",
            ([false, false], ends) if ends.contains(&FILE) => "disk",
            ([false, false], _) => "host",
            (_, ends) if ends.contains(&PINNED) => "cuda",
            _ => "relay",
        };
        assert_eq!(report.explanation.engine, engine, "from {from} to {to}: {report}");
    }
    drop((manager, fixture));
    let after = context.usage();
    assert_eq!((after.device, after.registered), (before.device, before.registered));
    assert_eq!((after.host, after.streams), (before.host, before.streams));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
