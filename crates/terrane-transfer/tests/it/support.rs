//! The setup of most tests.

use std::any::Any;
use std::sync::Arc;

use terrane_core::{Allocate, DeviceId, StorageKind};
use terrane_layout::{
    BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutConfigBuilder, LayoutKind,
};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::{SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::{
    DeviceOrder, Endpoint, Outcome, Rejected, Transfer, TransferError, TransferManager,
};

pub const CONTIGUOUS: LayoutKind = LayoutKind::FullyContiguous;
pub const BLOCK_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
pub const OUTER_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
pub const DEVICE: StorageKind = StorageKind::Device(DeviceId::new(0));

/// 4 layers, K and V, pieces of 3 tokens of 10 elements of 2 bytes.
pub fn shape() -> LayoutConfigBuilder {
    LayoutConfig::builder()
        .num_blocks(8)
        .num_layers(4)
        .outer_dim(2)
        .page_size(3)
        .inner_dim(10)
        .element(ElementFormat::Width(2))
}

pub const PIECE: u64 = 60;

pub fn config(num_blocks: u32) -> LayoutConfig {
    shape().num_blocks(num_blocks).build().unwrap()
}

pub fn endpoint_in<A: Allocate>(allocator: &A, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
    let builder = LayoutBuilder::new(config).kind(kind).allocate(allocator);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

pub fn endpoint(config: LayoutConfig, kind: LayoutKind) -> Endpoint {
    endpoint_in(&HeapAllocator::system(), config, kind)
}

/// Two ends of `num_blocks` blocks, and a manager with an engine that the test controls.
pub struct Rig {
    pub engine: Arc<SimulatedEngine>,
    pub manager: TransferManager,
    pub source: Endpoint,
    pub destination: Endpoint,
}

impl Rig {
    pub fn new(num_blocks: u32) -> Self {
        Self::with_options(num_blocks, SimulatedEngineOptions::default())
    }

    pub fn with_options(num_blocks: u32, options: SimulatedEngineOptions) -> Self {
        let engine = Arc::new(SimulatedEngine::new(options));
        let manager = TransferManager::new([engine.clone() as _]);
        let source = endpoint(config(num_blocks), CONTIGUOUS);
        let destination = endpoint(config(num_blocks), OUTER_FIRST);
        Self { engine, manager, source, destination }
    }

    /// Copies blocks of the source to blocks of the destination.
    pub fn transfer(&self, from: &[u32], to: &[u32]) -> Transfer {
        Transfer::new(&self.source, &self.destination).blocks(from, to)
    }

    /// Copies blocks of the destination back to the source.
    pub fn back(&self, from: &[u32], to: &[u32]) -> Transfer {
        Transfer::new(&self.destination, &self.source).blocks(from, to)
    }

    /// Submits, and returns the cause of the refusal.
    #[track_caller]
    pub fn refused(&self, transfer: Transfer) -> TransferError {
        refused(&self.manager, transfer)
    }

    /// Panics unless every block of both ends is free.
    #[track_caller]
    pub fn assert_nothing_claimed(&self) {
        for end in [&self.source, &self.destination] {
            assert_unclaimed(end);
        }
    }
}

#[track_caller]
pub fn refused(manager: &TransferManager, transfer: Transfer) -> TransferError {
    let guard = Arc::new(());
    match manager.submit(transfer, Arc::clone(&guard)) {
        Ok(completion) => panic!("not refused: {completion:?}"),
        Err(Rejected { guard: back, cause }) => {
            assert!(Arc::ptr_eq(&guard, &back), "another guard was returned");
            assert!(cause.is_refusal(), "{cause} is no refusal");
            cause
        }
    }
}

#[track_caller]
pub fn assert_unclaimed(end: &Endpoint) {
    let blocks: Vec<_> = (0..end.layout().geometry().num_blocks()).collect();
    drop(end.hold_for_write(&blocks).expect("blocks are still claimed"));
}

/// Submits and waits. The transfer must succeed.
#[track_caller]
pub fn run(manager: &TransferManager, transfer: Transfer) {
    let Outcome { result, .. } = end_of(manager.submit(transfer, ()).unwrap());
    result.unwrap();
}

/// Asserts that the message of an error contains each of these.
#[track_caller]
pub fn assert_says(error: &TransferError, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

/// An order of the simulated device that is satisfied when the value beside it drops.
pub fn unreached() -> (DeviceOrder, Box<dyn Any>) {
    struct Held(SimulatedStream);

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.finish_one();
        }
    }

    let stream = SimulatedStream::new(DeviceId::new(0));
    stream.launch();
    (stream.order(), Box::new(Held(stream)))
}
