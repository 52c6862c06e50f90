//! Who goes first: the agent, the engine, either end, or the outcome of a transfer that is on its way.

use std::any::Any;
use std::time::{Duration, Instant};

use terrane_nixl::{AgentBuilder, NixlEngine, NixlEngineOptions, NixlError};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::support::*;

const PATIENCE: Duration = Duration::from_secs(120);

/// The permutation of five things of this number.
fn order(mut number: usize) -> Vec<usize> {
    let mut left: Vec<_> = (0..5).collect();
    let mut next = |choices| {
        let choice = left.remove(number % choices);
        number /= choices;
        choice
    };
    [5, 4, 3, 2, 1].map(&mut next).to_vec()
}

#[test]
fn a_transfer_arrives_in_whichever_order_all_else_drops() {
    let there = agent();
    let target = registered(&HeapAllocator::system(), &there, config(64), CONTIGUOUS);
    let export = there.export(&target).unwrap();
    let target = Endpoint::new(target).unwrap();
    let (all, back): (Vec<u32>, Vec<u32>) = (0..64).map(|id| (id, 63 - id)).unzip();
    // 18 of the 120, in which each goes first, and last, several times.
    for number in (0..120).step_by(7) {
        let here = AgentBuilder::unnamed().backend(terrane_nixl::BackendConfig::new("UCX"));
        let here = here.build().unwrap();
        let name = here.name().clone();
        let remote = here.import(&export).unwrap();
        let local = registered(&HeapAllocator::system(), &here, config(64), CONTIGUOUS);
        let local = Endpoint::new(local).unwrap();
        let image = Image::scribble(&local, &InProcess, number);
        let mut expected = Image::of(&target, &InProcess);
        expected.transfer(&image, &all, &back, 0..2);
        let engine = NixlEngine::new(&here, NixlEngineOptions::default()).unwrap();
        let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
        let write = Transfer::new(&local, remote.endpoint()).blocks(&all, &back);
        let weak = local.downgrade();
        let completion = manager.submit(write.notify(*b"all"), ()).unwrap();

        let mut things: [Option<Box<dyn Any>>; 5] = [
            Some(Box::new(here)),
            Some(Box::new(manager)),
            Some(Box::new(remote)),
            Some(Box::new(local)),
            Some(Box::new(completion)),
        ];
        for place in order(usize::try_from(number).unwrap()) {
            drop(things[place].take());
        }

        let told = there.wait_for_notifications(Instant::now() + PATIENCE).unwrap();
        let [told] = told.as_slice() else { panic!("{told:?} in order {number}") };
        assert_eq!((&told.from, told.message.as_slice()), (&name, &b"all"[..]));
        let what = format!("in order {number}");
        Image::of(&target, &InProcess).assert_equals(&expected, &what);
        // Then nothing is left: neither memory nor agent.
        let begun = Instant::now();
        while let Err(error) = AgentBuilder::new(name.clone()).build() {
            assert!(matches!(error, NixlError::NameTaken { .. }), "{error}");
            assert!(begun.elapsed() < PATIENCE, "{what} the agent lives on");
            std::thread::yield_now();
        }
        assert!(weak.has_gone(), "{what}");
    }
}
