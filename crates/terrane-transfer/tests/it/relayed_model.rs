//! Random relayed transfers equal the model of bytes: in slots of every size, with some heads and
//! layers, in either direction, by layer and by block.

use std::sync::Arc;

use proptest::prelude::*;
use terrane_core::{ByteCount, StorageKind};
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::engine::SimulatedEngine;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_transfer::engines::{RelayEngine, RelayOptions};
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, Quote, TransferManager, TransferOptions, TransferPlan,
};

use crate::model::{Case, cases};
use crate::plans::check_agreement;
use crate::relays::{to_device, to_system};
use crate::support::*;

/// Checks the plan of every part.
#[derive(Debug)]
struct Checking(SimulatedEngine);

// SAFETY: the inner engine executes the jobs.
unsafe impl CopyEngine for Checking {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.0.quote(plan, options)
    }

    fn submit(&self, job: CopyJob) {
        check_agreement(job.plan());
        self.0.submit(job);
    }
}

/// The bytes of one layer of a block in a slot, without bytes that are not copied.
fn layer_bytes(case: &Case) -> u64 {
    let all = u64::from(case.ends[0].num_heads);
    let heads = case.heads.as_ref().map_or(all, |[read, _]| u64::from(read.end - read.start));
    // The shape is that of one head, or of a row without heads.
    let heads = if case.shape.num_heads().is_some() { heads } else { 1 };
    case.shape.piece_bytes().get() * u64::from(case.shape.outer_dim()) * heads
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn relayed_transfers_copy_the_same_bytes_as_the_model(
        mut case in cases(),
        back in any::<bool>(),
        layer_by_layer in any::<bool>(),
        (count, quarters) in (1..4_usize, 4..40_u64),
    ) {
        let (from, to) = if back { (1, 0) } else { (0, 1) };
        case.ends[from].storage = DEVICE;
        case.ends[to].storage = StorageKind::System;
        let [source, destination] = case.endpoints();
        let before = Image::scribble(&source, &InProcess, case.seed);
        let mut expected = Image::scribble(&destination, &InProcess, !case.seed);
        match case.heads.clone() {
            None => expected.transfer(&before, &case.from, &case.to, case.layers.clone()),
            Some(heads) => {
                let layers = case.layers.clone();
                expected.transfer_heads(&before, &case.from, &case.to, layers, heads);
            }
        }

        // The smallest slot has room for exactly one layer of a block.
        let slot_bytes = ByteCount::new(layer_bytes(&case) * quarters / 4);
        let hops = [to_device(), to_system()]
            .map(|options| Arc::new(Checking(SimulatedEngine::new(options.reordering(case.seed)))));
        let [first, second] = hops;
        let options = RelayOptions { slots: count, slot_bytes };
        let relay = RelayEngine::new(first, second, HeapAllocator::pinned(), &options).unwrap();
        let manager = TransferManager::new([Arc::new(relay) as _]);
        let transfer = ordered(case.transfer(&source, &destination), &source, &destination);
        let transfer = if layer_by_layer { transfer.layer_by_layer() } else { transfer };
        let completion = manager.submit(transfer, ()).unwrap();
        let layers = completion.layers();
        end_of(completion).result.unwrap();
        Image::of(&destination, &InProcess).assert_equals(&expected, "destination");
        Image::of(&source, &InProcess).assert_equals(&before, "source");
        prop_assert_eq!(layers.is_some(), layer_by_layer);
        if let Some(layers) = layers {
            prop_assert!(case.layers.clone().all(|layer| layers.is_done(layer)));
        }
    }
}
