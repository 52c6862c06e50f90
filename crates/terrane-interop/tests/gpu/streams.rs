//! A consumer's stream reads the producer's data after a handshake.

use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};
use terrane_cuda::{
    Context, DeviceAllocator, Event, PinnedAllocator, PinnedOptions, Stream, Timing,
};
use terrane_interop::dlpack::{ConsumerStream, Handshake, ProducerStream, TensorDevice, handshake};
use terrane_testkit::needs::{NO_MEMORY, Needs};

use crate::needs::{device, two_devices};

const LENGTH: ByteCount = ByteCount::mib(4);
const EXCHANGE: Needs = Needs::of_device(LENGTH).and_host(LENGTH);

/// Writes `value` on the producer's stream, performs the handshake, and reads on the consumer's
/// stream. Without a stream, the consumer uses the per-thread default stream, and the reading
/// stream waits for it.
fn exchange(
    context: &Context,
    value: u8,
    consumer: (Option<&Stream>, ConsumerStream),
    by_event: bool,
) -> Handshake {
    let producer = Stream::new(context).unwrap();
    let request = RegionRequest::new(LENGTH);
    let pinned = PinnedAllocator::new(context, PinnedOptions::default()).unwrap();
    let (from, to) = (
        DeviceAllocator::new(context).allocate(&request).unwrap(),
        pinned.allocate(&request).unwrap(),
    );
    // SAFETY: the memory lives until the synchronisation of both streams, and no other code uses
    // it.
    unsafe { producer.fill(from.location(), value, LENGTH) }.unwrap();
    let event = Event::new(context, Timing::Off).unwrap();
    event.record(&producer).unwrap();
    let written =
        if by_event { ProducerStream::Event(&event) } else { ProducerStream::Stream(&producer) };
    // SAFETY: the stream is the caller's and alive.
    let shaken = unsafe { handshake(context, written, consumer.1) }.unwrap();
    let reader = Stream::new(context).unwrap();
    let reader = consumer.0.unwrap_or_else(|| {
        let event = Event::new(context, Timing::Off).unwrap();
        event.record_on_thread_stream().unwrap();
        reader.wait_for(&event).unwrap();
        &reader
    });
    // SAFETY: as above.
    unsafe { reader.copy(from.location(), to.location(), LENGTH) }.unwrap();
    reader.synchronize().unwrap();
    producer.synchronize().unwrap();
    let Location::Host(address) = to.location() else { panic!("{to:?}") };
    // SAFETY: the copy has completed.
    let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), LENGTH.to_usize()) };
    assert!(bytes.iter().all(|&byte| byte == value));
    shaken
}

#[test]
fn a_consumer_finds_what_the_producer_wrote() {
    let Some(context) = device("streams::a_consumer_finds_what_the_producer_wrote", EXCHANGE)
    else {
        return;
    };
    let before = context.usage().streams;
    let own = Stream::new(&context).unwrap();
    // SAFETY: the default stream lives as long as the context.
    let legacy = unsafe { Stream::borrow(&context, std::ptr::null_mut(), ()) }.unwrap();
    let cuda = TensorDevice::Cuda(context.device().id);
    let named = |stream| ConsumerStream::from_python(cuda, stream).unwrap();
    let handle = i64::try_from(own.handle().addr()).unwrap();
    assert_eq!(ConsumerStream::of(&own), named(Some(handle)));
    let consumers = [
        (Some(&own), Some(handle)),
        (Some(&legacy), None),
        (Some(&legacy), Some(1)),
        (None, Some(2)),
    ];
    for (value, (stream, number)) in (1..).zip(consumers) {
        for by_event in [false, true] {
            let shaken = exchange(&context, value, (stream, named(number)), by_event);
            assert_eq!(shaken, Handshake::Waits, "{number:?}");
        }
    }
    drop((own, legacy));
    assert_eq!(context.usage().streams, before);
}

#[test]
fn unnecessary_waits_are_omitted() {
    let Some(context) = device("streams::unnecessary_waits_are_omitted", NO_MEMORY) else {
        return;
    };
    let stream = Stream::new(&context).unwrap();
    let mine = ConsumerStream::of(&stream);
    for (producer, consumer) in [
        (ProducerStream::Complete, mine),
        (ProducerStream::Complete, ConsumerStream::Unstated),
        (ProducerStream::Stream(&stream), mine),
        (ProducerStream::Stream(&stream), ConsumerStream::Unordered),
    ] {
        // SAFETY: the stream is alive.
        let shaken = unsafe { handshake(&context, producer, consumer) }.unwrap();
        assert_eq!(shaken, Handshake::Nothing);
    }
}

#[test]
fn a_consumer_s_stream_is_waited_for_only_if_it_is_one_on_all_threads() {
    let name = "streams::a_consumer_s_stream_is_waited_for_only_if_it_is_one_on_all_threads";
    let Some(context) = device(name, NO_MEMORY) else { return };
    let own = Stream::new(&context).unwrap();
    // SAFETY: the stream outlives the returned one.
    let named = |stream: ConsumerStream| unsafe { stream.to_stream(&context, ()) }.unwrap();
    assert_eq!(named(ConsumerStream::of(&own)).unwrap().handle(), own.handle());
    for consumer in [ConsumerStream::Unstated, ConsumerStream::LegacyDefault] {
        assert!(named(consumer).unwrap().handle().is_null());
    }
    for consumer in [ConsumerStream::Unordered, ConsumerStream::PerThreadDefault] {
        assert!(named(consumer).is_none());
    }
}

#[test]
fn default_streams_of_two_devices_are_two() {
    let test = "streams::default_streams_of_two_devices_are_two";
    let Some([context, other]) = two_devices(test, NO_MEMORY) else { return };
    for consumer in [ConsumerStream::LegacyDefault, ConsumerStream::Unstated] {
        // SAFETY: the default stream lives as long as the context.
        let theirs = unsafe { Stream::borrow(&other, std::ptr::null_mut(), ()) }.unwrap();
        // SAFETY: default streams are alive.
        let shaken = unsafe { handshake(&context, ProducerStream::Stream(&theirs), consumer) };
        assert_eq!(shaken.unwrap(), Handshake::Waits);
        // SAFETY: as above.
        let shaken = unsafe { handshake(&other, ProducerStream::Stream(&theirs), consumer) };
        assert_eq!(shaken.unwrap(), Handshake::Nothing);
    }
}
