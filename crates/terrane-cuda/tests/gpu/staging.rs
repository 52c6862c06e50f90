//! Staging tables over pooled pinned memory, with copies on real streams.

use std::sync::Arc;
use std::time::Duration;

use terrane_core::{ByteCount, Location, Memory, RegionRequest};
use terrane_cuda::{Context, CudaStreams, DeviceAllocator, PinnedAllocator, PinnedOptions, Stream};
use terrane_pool::adaptors::{Adapt, Budget, Limit};
use terrane_pool::staging::{Copying, Direction, StagingArea, StagingError, TransferTable};
use terrane_pool::{Pool, PoolOptions, StreamId, StreamSource};

use terrane_testkit::pattern::PieceAccess;

use crate::needs::{LITTLE, OnDevice, device};

const TIMEOUT: Duration = Duration::from_secs(120);

type Pinned = Arc<Pool<Limit<PinnedAllocator>>>;

struct Setup {
    context: Context,
    id: StreamId,
    stream: Stream,
    budget: Budget,
    pool: Pinned,
    area: StagingArea<Pinned>,
    on_device: StagingArea<Pool<DeviceAllocator>>,
}

impl Setup {
    fn new(context: Context) -> Self {
        let streams = CudaStreams::new(&context);
        let id = StreamSource::create(&streams).unwrap();
        let stream = streams.get(id).unwrap();
        let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
        let budget = Budget::new("pinned", ByteCount::mib(16));
        let upstream = pinned.limited(budget.clone());
        let pool = Arc::new(Pool::new(upstream, PoolOptions::default()).unwrap());
        let area = StagingArea::new(Arc::clone(&pool), Arc::new(streams.clone()), TIMEOUT);
        let device = Pool::new(DeviceAllocator::new(&context), PoolOptions::default()).unwrap();
        let on_device = StagingArea::new(device, Arc::new(streams), TIMEOUT);
        Self { context, id, stream, budget, pool, area, on_device }
    }

    /// Submits the table's copies: all uploads to `at`, one after the other, and the outputs from
    /// there.
    fn submit(&self, copying: &Copying<Pinned>, at: Location) {
        for direction in [Direction::ToDevice, Direction::FromDevice] {
            let mut offset = ByteCount::ZERO;
            for copy in copying.copies().filter(|copy| copy.direction == direction) {
                assert!(copy.device_alias.is_some());
                let place = at.checked_add(offset).unwrap();
                let (from, to) = match direction {
                    Direction::ToDevice => (copy.host.location, place),
                    Direction::FromDevice => (place, copy.host.location),
                };
                // SAFETY: the table keeps its buffers, and the dispatch keeps its own, until the
                // copies have completed.
                unsafe { self.stream.copy(from, to, copy.length) }.unwrap();
                offset = offset.checked_add(copy.length).unwrap();
            }
        }
    }
}

fn begun(table: TransferTable<Pinned>, id: StreamId) -> Copying<Pinned> {
    table.begin(&[id]).map_err(|(_, error)| error).unwrap()
}

#[test]
fn uploads_are_padded_and_outputs_return_after_them() {
    let name = "uploads_are_padded_and_outputs_return_after_them";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(context);
    let mut outputs = Vec::new();
    for round in 0..50_u8 {
        let mut set = setup.on_device.dispatch_set();
        let buffer = set.allocate(&RegionRequest::new(ByteCount::kib(256))).unwrap();
        let nothing = set.allocate(&RegionRequest::new(ByteCount::ZERO)).unwrap();
        set.parameters(ByteCount::new(64)).unwrap();
        let launched = set.begin(&[setup.id]).map_err(|(_, error)| error).unwrap();
        let at = launched.location(buffer).unwrap().unwrap();
        assert_eq!(launched.location(nothing).unwrap(), None);
        assert!(launched.parameters().is_some());

        let mut table = setup.area.transfer_table().unwrap();
        table.try_reserve(6).unwrap();
        table.upload_padded(&[round; 100], ByteCount::new(512)).unwrap();
        table.upload(&[]).unwrap();
        table.upload_words(&[u32::from(round), u32::MAX]).unwrap();
        let padded = table.output_padded(ByteCount::new(100), ByteCount::new(512)).unwrap();
        let empty = table.output(ByteCount::ZERO).unwrap();
        let words = table.output(ByteCount::new(8)).unwrap();
        let copying = begun(table, setup.id);
        setup.submit(&copying, at);
        let finished = copying.submitted().wait(TIMEOUT).map_err(|refused| refused.cause).unwrap();
        drop(launched.submitted());

        assert_eq!(finished.output(padded).unwrap(), [round; 100]);
        assert_eq!(finished.output(empty).unwrap(), [0_u8; 0]);
        assert_eq!(finished.output(words).unwrap(), [round, 0, 0, 0, 255, 255, 255, 255]);
        let range = finished.range(words, ByteCount::new(3), ByteCount::new(2)).unwrap();
        assert_eq!(range, [0, 255]);
        finished.collect(&mut outputs).unwrap();
        assert_eq!(outputs.iter().map(Vec::len).collect::<Vec<_>>(), [100, 0, 8]);
        let mut slices = [vec![0; 100], vec![], vec![0; 8]];
        let mut wanted: Vec<&mut [u8]> = slices.iter_mut().map(Vec::as_mut_slice).collect();
        finished.collect_into(&mut wanted).unwrap();
        assert_eq!(slices.as_slice(), outputs.as_slice());
    }
    setup.stream.synchronize().unwrap();
    setup.area.reap();
    setup.on_device.reap();
    assert_eq!((setup.area.pending(), setup.on_device.pending()), (0, 0));
    let snapshot = setup.pool.snapshot();
    assert!(snapshot.live.is_zero(), "some memory is still live: {}", snapshot.live);
    let hits: u64 =
        snapshot.classes.iter().map(|class| class.magazine_hits + class.shared_hits).sum();
    assert!(hits >= 100, "buffers are used again: {hits}");
    assert_eq!((setup.context.failed_drops(), setup.context.lost()), (0, None));
}

#[test]
fn a_table_dropped_in_flight_keeps_its_buffers_until_the_copies_end() {
    let name = "a_table_dropped_in_flight_keeps_its_buffers_until_the_copies_end";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(context);
    let device = DeviceAllocator::new(&setup.context);
    let target = device.allocate_memory(&RegionRequest::new(ByteCount::mib(8))).unwrap();
    let access = OnDevice::new(&setup.context);
    for round in 0..20_u8 {
        // Work that delays the copies.
        for value in 0..20 {
            // SAFETY: the memory lives until the stream has been synchronised.
            unsafe { setup.stream.fill(target.location(), value, target.length()) }.unwrap();
        }
        let mut table = setup.area.transfer_table().unwrap();
        table.upload(&vec![round; 1 << 20]).unwrap();
        table.output(ByteCount::mib(1)).unwrap();
        let copying = begun(table, setup.id);
        setup.submit(&copying, target.location());
        // Dropped in each of its states.
        if round % 2 == 0 {
            drop(copying)
        } else {
            drop(copying.submitted())
        }
        // No other code writes to buffers that copies still use.
        let mut other = setup.area.transfer_table().unwrap();
        other.upload(&vec![!round; 1 << 20]).unwrap();
        drop(other);
        setup.stream.synchronize().unwrap();
        let mut seen = vec![0; 4096];
        // SAFETY: no other code uses the memory.
        unsafe { access.read(target.location(), &mut seen) }.unwrap();
        assert!(seen.iter().all(|&byte| byte == round), "round {round}: {:?}", &seen[..4]);
    }
    setup.area.reap();
    assert_eq!(setup.area.pending(), 0);
    assert!(setup.pool.snapshot().live.is_zero());
}

#[test]
fn a_refusal_does_not_change_the_table_and_pending_buffers_are_waited_for() {
    let name = "a_refusal_does_not_change_the_table_and_pending_buffers_are_waited_for";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(context);
    let device = DeviceAllocator::new(&setup.context);
    let target = device.allocate_memory(&RegionRequest::new(ByteCount::mib(16))).unwrap();
    let mut table = setup.area.transfer_table().unwrap();
    table.upload(&[7; 1024]).unwrap();
    let error = table.output(ByteCount::mib(17)).unwrap_err();
    let StagingError::Allocate(refusal) = &error else { panic!("{error}") };
    assert!(refusal.is_exhaustion(), "{refusal}");
    let error = table.upload_padded(&[1; 9], ByteCount::new(8)).unwrap_err();
    assert!(matches!(error, StagingError::PaddingTooShort { .. }), "{error}");
    assert_eq!(table.len(), 1);
    // The budget has room for one buffer at a time: the second allocation waits for the stream.
    for _ in 0..3 {
        let mut table = setup.area.transfer_table().unwrap();
        table.output(ByteCount::mib(8)).unwrap();
        let copying = begun(table, setup.id);
        setup.submit(&copying, target.location());
        drop(copying.submitted());
    }
    let copying = begun(table, setup.id);
    setup.submit(&copying, target.location());
    let finished = copying.submitted().wait(TIMEOUT).map_err(|refused| refused.cause).unwrap();
    assert_eq!(finished.outputs(), 0);
    drop(finished);
    setup.stream.synchronize().unwrap();
    setup.area.reap();
    setup.pool.clear();
    assert_eq!(setup.budget.live(), ByteCount::ZERO);
    assert_eq!((setup.context.failed_drops(), setup.context.lost()), (0, None));
}
