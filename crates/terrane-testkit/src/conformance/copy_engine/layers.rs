//! The rules of layer-by-layer transfers.

use std::thread;
use std::time::{Duration, Instant};

use terrane_layout::LayoutKind;
use terrane_transfer::{LayerState, Layers, Transfer, TransferManager};

use super::{EngineFixture, TIMEOUT, end_of, for_all_pairs, odd_config, ordered, two_ends};
use crate::model::Image;

/// When a layer of a layer-by-layer transfer is reported as complete, its bytes are complete. At
/// the end all layers are complete, whether or not the engine reports layers.
pub fn layers_are_complete_when_the_engine_reports_them(fixture: &impl EngineFixture) {
    let manager = TransferManager::new([fixture.engine()]);
    for_all_pairs(fixture, |source, destination| {
        for (kinds, range) in [([0, 2], 0..3), ([2, 0], 1..3), ([0, 0], 0..3), ([1, 1], 0..2)] {
            let [from, to] = [(source, kinds[0]), (destination, kinds[1])].map(|(name, kind)| {
                fixture.endpoint(name, odd_config(4, 1), LayoutKind::ALL[kind])
            });
            let image = Image::scribble(&from, fixture.access(), 20);
            let mut expected = Image::scribble(&to, fixture.access(), 21);
            expected.transfer(&image, &[0, 1, 3], &[3, 2, 1], range.clone());
            let transfer = Transfer::new(&from, &to).blocks(&[0, 1, 3], &[3, 2, 1]);
            let transfer = ordered(transfer, &from, &to).layers(range.clone()).layer_by_layer();
            let completion = manager.submit(transfer, ()).expect("it is accepted");
            let layers = completion.layers().expect("layers were requested");
            assert_eq!(layers.range(), range);
            for layer in range.clone() {
                match end_of_layer(&layers, layer) {
                    LayerState::Done => {
                        expected.assert_layer(&to, fixture.access(), &[1, 2, 3], layer);
                    }
                    other => panic!("layer {layer} is {other:?}"),
                }
                assert_eq!(layers.event(layer), Ok(None), "layer {layer} is done");
            }
            end_of(completion).result.expect("it succeeds");
            assert!(range.into_iter().all(|layer| layers.is_done(layer)), "{layers:?}");
            let found = Image::of(&to, fixture.access());
            found.assert_equals(&expected, "after a layer-by-layer transfer");
        }
    });
}

/// Each layer of a failed transfer is complete or has failed, so no waiting thread hangs.
pub fn every_layer_of_a_failed_transfer_ends(fixture: &impl EngineFixture) {
    let manager = TransferManager::new([fixture.engine()]);
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&[0, 1], &[3, 2]);
        let transfer = transfer.layer_by_layer().deadline(Instant::now());
        let completion = manager.submit(transfer, ()).expect("it is accepted");
        let layers = completion.layers().expect("layers were requested");
        end_of(completion).result.expect_err("the deadline had passed before the transfer began");
        for layer in 0..3 {
            end_of_layer(&layers, layer);
        }
        assert!((0..3).any(|layer| layers.wait(layer).is_err()), "{layers:?}");
    });
}

/// Waits until a layer is complete or has failed, and panics if it never is.
#[track_caller]
fn end_of_layer(layers: &Layers, layer: u32) -> LayerState {
    let begun = Instant::now();
    loop {
        match layers.state(layer).expect("a layer of the transfer") {
            LayerState::Waiting | LayerState::Submitted(_) => {}
            end => return end,
        }
        assert!(begun.elapsed() < TIMEOUT, "layer {layer} has not ended: {layers:?}");
        thread::sleep(Duration::from_micros(50));
    }
}
