//! Transfers that the device holds up, and those that it does not.

use std::time::{Duration, Instant};

use terrane_cuda::{CopyPath, DeviceEngineOptions, Stream};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{
    Completion, DeviceOrder, Endpoint, StreamHandle, Transfer, TransferManager,
};

use super::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device};

const PATIENCE: Duration = Duration::from_secs(120);

/// However many transfers wait for the device, the end of another is noticed by the engine itself,
/// and others begin when their own order has been reached.
fn others_go_on(name: &str, path: CopyPath, blocks_each: u32) {
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    let options = DeviceEngineOptions { path: Some(path), ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    // Nobody helps.
    let manager = TransferManager::new([fixture.engine()]).with_attention(Duration::ZERO);
    let shape = config(8 * blocks_each, 8, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let image = Image::scribble(&here, fixture.access(), 5);
    let mut expected = Image::of(&there, fixture.access());
    let ids = |number: u32| (number * blocks_each..(number + 1) * blocks_each).collect::<Vec<_>>();
    let transfer = |number: u32| Transfer::new(&here, &there).blocks(&ids(number), &ids(number));
    // Whatever is made when it is first needed.
    run(&manager, &here, &there, &ids(7));
    let streams = [(); 2].map(|()| Stream::new(&context).unwrap());
    let [held, reached] = [0, 1].map(|number| driver.hold(streams[number].handle()));
    let [after_held, after_reached] = [0, 1].map(|number| after(&streams[number]));
    let waiting: Vec<_> = (0..6)
        .map(|number| manager.submit(transfer(number).device_order(after_held), ()).unwrap())
        .collect();
    let free = ordered(transfer(6), &here, &there);
    must_end(manager.submit(free, ()).unwrap());
    let next = manager.submit(transfer(7).device_order(after_reached), ()).unwrap();
    drop(reached);
    must_end(next);
    assert!(waiting.iter().all(|completion| !completion.has_ended()));
    drop(held);
    waiting.into_iter().for_each(|completion| drop(end_of(completion).result.unwrap()));
    (0..8).for_each(|number| expected.transfer(&image, &ids(number), &ids(number), 0..8));
    Image::of(&there, fixture.access()).assert_equals(&expected, name);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

fn after(stream: &Stream) -> DeviceOrder {
    let raw = stream.handle().expose_provenance().try_into().unwrap();
    // SAFETY: the stream outlives the transfers.
    DeviceOrder::AfterStream(unsafe { StreamHandle::from_raw(stream.context().device().id, raw) })
}

fn run(manager: &TransferManager, here: &Endpoint, there: &Endpoint, ids: &[u32]) {
    let transfer = ordered(Transfer::new(here, there), here, there).blocks(ids, ids);
    end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
}

#[track_caller]
fn must_end(completion: Completion<()>) {
    match completion.wait_until(Instant::now() + PATIENCE) {
        Ok(outcome) => drop(outcome.result.unwrap()),
        Err(completion) => panic!("held up by others: {completion:?}"),
    }
}

#[test]
fn small_transfers_that_wait_hold_up_no_other() {
    others_go_on("small_transfers_that_wait_hold_up_no_other", CopyPath::Direct, 1);
}

#[test]
fn large_transfers_that_wait_hold_up_no_other() {
    others_go_on("large_transfers_that_wait_hold_up_no_other", CopyPath::Staged, 16);
}
