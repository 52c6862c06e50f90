//! The resources that a process uses through a context.

use terrane_core::{Allocate, ByteCount, RegionRequest, Requirement};
use terrane_cuda::{
    DeviceAllocator, DevicePool, Event, PinnedAllocator, PinnedOptions, ResourceCount, Stream,
    Timing,
};

use crate::needs::{LITTLE, device};

#[test]
fn live_resources_are_counted_and_dropped_ones_are_not() {
    let name = "live_resources_are_counted_and_dropped_ones_are_not";
    let Some(context) = device(name, LITTLE) else { return };
    let held = |count, mib| ResourceCount { count, bytes: ByteCount::mib(mib) };
    let before = context.usage();
    assert_eq!((before.device, before.registered, before.handles), (held(0, 0), held(0, 0), 1));
    let request = RegionRequest::new(ByteCount::mib(3));
    let pool = DevicePool::new(&context, ByteCount::mib(64)).unwrap();
    let by_driver = PinnedOptions { registration: Requirement::Off, ..PinnedOptions::default() };
    let in_chunks =
        PinnedOptions { largest_registration: ByteCount::mib(2), ..PinnedOptions::default() };
    let memory = (
        DeviceAllocator::new(&context).allocate(&request).unwrap(),
        pool.allocate(&request).unwrap(),
        PinnedAllocator::new(&context, in_chunks).unwrap().allocate(&request).unwrap(),
        PinnedAllocator::new(&context, by_driver).unwrap().allocate(&request).unwrap(),
    );
    let stream = Stream::new(&context).unwrap();
    let events = [Timing::Off, Timing::On].map(|timing| Event::new(&context, timing).unwrap());
    let now = context.usage();
    assert_eq!((now.device, now.pooled), (held(1, 3), held(1, 3)));
    assert_eq!((now.registered, now.host), (held(2, 3), held(1, 3)));
    assert_eq!((now.streams, now.events, now.events_idle), (2, 2, 0), "a pool has a stream");
    assert_eq!(now.events_created, 2);
    assert!(now.handles > before.handles);
    eprintln!("{now}");
    drop((memory, stream, events, pool));
    let after = context.usage();
    assert_eq!((after.events, after.events_idle), (2, 2), "kept for the next user");
    assert_eq!(
        (after.device, after.pooled, after.registered, after.host, after.streams, after.handles),
        (before.device, before.pooled, before.registered, before.host, 0, before.handles)
    );
    let [first, second] = [(); 2].map(|()| Event::new(&context, Timing::Off));
    assert!(first.is_ok() && second.is_ok());
    assert_eq!(context.usage().events_created, 3, "one of the two was there");
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}
