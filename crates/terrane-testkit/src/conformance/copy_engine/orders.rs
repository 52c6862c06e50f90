//! The rules of [`CopyEngine`](terrane_transfer::CopyEngine) about a device's order.

use terrane_core::StorageKind;
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::{EngineFixture, check_transfer, end_of, for_all_pairs, two_ends};
use crate::model::Image;

/// A transfer ends only when the device's order is satisfied, even without blocks. Such an empty
/// transfer is used to wait for an order.
pub fn a_transfer_waits_for_its_device_order(fixture: &impl EngineFixture) {
    let manager = TransferManager::new([fixture.engine()]);
    let (mut stated, mut checked) = (false, 0);
    for_all_pairs(fixture, |source, destination| {
        for blocks in [&[][..], &[0, 1]] {
            let [from, to] = two_ends(fixture, source, destination);
            let [other_from, other_to] = two_ends(fixture, source, destination);
            let mut expected = Image::of(&to, fixture.access());
            expected.transfer(&Image::of(&from, fixture.access()), blocks, blocks, 0..3);
            let Some((order, held)) = fixture.unreached() else { return };
            stated = true;
            let takes_part =
                |end: &Endpoint| order.device().map(StorageKind::Device) == Some(end.kind());
            if !takes_part(&from) && !takes_part(&to) {
                return;
            }
            let transfer = Transfer::new(&from, &to).blocks(blocks, blocks).device_order(order);
            let waiting = manager.submit(transfer, ()).expect("it is accepted");
            // Enough time for an engine that does not wait: a later transfer has ended.
            let access = fixture.access();
            check_transfer(&manager, access, (&other_from, &[]), (&other_to, &[]), 0..3);
            assert!(
                !waiting.has_ended(),
                "from {source} to {destination}, a transfer of {} blocks ended before the device's \
                 order was reached",
                blocks.len()
            );
            drop(held);
            end_of(waiting).result.expect("it ends well");
            Image::of(&to, access).assert_equals(&expected, "after the device's order");
            checked += 1;
        }
    });
    assert!(checked > 0 || !stated, "no end is of the order's device, so nothing was checked");
}
