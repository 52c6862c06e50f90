//! Imports and exports of arrays on a device.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow_schema::DataType;
use terrane_arrow::arrays::abi::{ArrowArray, ArrowDeviceArray, Owned, Released};
use terrane_arrow::arrays::{
    DeviceType, ExportError, ImportError, Ready, ReleaseOrder, export_array, export_device_array,
    import_device_array,
};
use terrane_arrow::columns::{Column, ColumnBuffer, ColumnParts, Origin};
use terrane_core::{
    Allocate, ByteCount, DeviceId, ForeignMemory, Location, Memory, Region, RegionRequest,
    StorageKind,
};
use terrane_cuda::{Context, Event, PinnedAllocator, PinnedOptions, Stream};
use terrane_testkit::needs::LITTLE;

use crate::needs::{device, two_devices};
use crate::support::{RecordsIdle, filled, read, simulated};

/// A foreign array, of a column without children in memory that is not exported.
pub fn foreign(column: &Column, ready: Ready) -> Owned<ArrowDeviceArray> {
    struct Theirs {
        _column: Column,
        buffers: Vec<*const c_void>,
        event: Option<(Box<*mut c_void>, Event)>,
    }
    /// # Safety
    ///
    /// The array was created here, or moved from such an array.
    unsafe extern "C" fn release(array: *mut ArrowArray) {
        // SAFETY: the caller owns the array during its release.
        let array = unsafe { &mut *array };
        assert!(array.release.take().is_some(), "released once");
        // SAFETY: boxed below, and converted back once.
        drop(unsafe { Box::from_raw(array.private_data.cast::<Theirs>()) });
    }
    let address = |buffer: &Option<ColumnBuffer>| match buffer.as_ref().map(ColumnBuffer::location)
    {
        Some(Location::Device { address, .. }) => {
            ptr::without_provenance(ByteCount::new(address.get()).to_usize())
        }
        Some(Location::Host(address)) => address.as_ptr().cast_const().cast(),
        _ => ptr::null(),
    };
    let event = match ready {
        Ready::Now => None,
        Ready::After(event) => Some((Box::new(event.handle()), event)),
    };
    let mut theirs = Box::new(Theirs {
        _column: column.clone(),
        buffers: column.buffers().iter().map(address).collect(),
        event,
    });
    let handle = theirs.event.as_mut().map(|(handle, _)| ptr::from_mut(&mut **handle).cast());
    let is_pinned = column.kind() == Some(StorageKind::Pinned);
    let array = ArrowArray {
        length: i64::try_from(column.len()).unwrap(),
        n_buffers: i64::try_from(theirs.buffers.len()).unwrap(),
        buffers: theirs.buffers.as_mut_ptr(),
        release: Some(release),
        private_data: Box::into_raw(theirs).cast(),
        ..ArrowArray::EMPTY
    };
    let array = ArrowDeviceArray {
        array,
        device_id: 0,
        device_type: if is_pinned { DeviceType::CUDA_HOST } else { DeviceType::CUDA },
        sync_event: handle.unwrap_or(ptr::null_mut()),
        reserved: [0; 3],
    };
    // SAFETY: the callback may be called once, after any move and on any thread.
    unsafe { Owned::new(array) }
}

fn texts(context: &Context, stream: &Stream) -> Column {
    let offsets = [0_i32, 3, 3, 7].map(i32::to_ne_bytes).concat();
    let buffers = vec![
        None,
        Some(filled(context, stream, &offsets).into()),
        Some(filled(context, stream, b"onetwo?").into()),
    ];
    let parts = ColumnParts {
        data_type: DataType::Utf8,
        length: 3,
        offset: 0,
        null_count: Some(0),
        buffers,
        children: vec![],
        dictionary: None,
    };
    Column::from_parts(parts).unwrap()
}

#[test]
fn device_arrays_are_reimported_unchanged() {
    let name = "device_arrays_are_reimported_unchanged";
    let Some(context) = device(name, LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let column = texts(&context, &stream);
    // SAFETY: no code writes the column.
    let refused = unsafe { export_array(&column) };
    assert!(matches!(refused, Err(ExportError::NotHost { .. })));
    for ready in [Ready::Now, Ready::after(&stream).unwrap()] {
        // SAFETY: no code writes the column.
        let array =
            unsafe { export_device_array(&column, ready, ReleaseOrder::AtRelease) }.unwrap();
        assert_eq!((array.get().device_type.0, array.get().device_id), (2, 0));
        // SAFETY: this crate created the array.
        let back = unsafe { import_device_array(&DataType::Utf8, array) }.unwrap();
        assert!(back.wait_on(&stream).unwrap().is_same(&column));
    }
}

#[test]
fn foreign_arrays_of_the_device_are_columns_without_a_copy() {
    let name = "foreign_arrays_of_the_device_are_columns_without_a_copy";
    let Some(context) = device(name, LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let before = context.usage().device;
    let column = texts(&context, &stream);
    for by_stream in [true, false] {
        let ready = Ready::after(&stream).unwrap();
        let array = foreign(&column, ready);
        // SAFETY: it obeys the specification.
        let array = unsafe { import_device_array(&DataType::Utf8, array) }.unwrap();
        assert!(array.has_event());
        assert_eq!(array.kind(), StorageKind::Device(DeviceId::new(0)));
        let back = match by_stream {
            true => array.wait_on(&stream).unwrap(),
            false => array.wait(&context).unwrap(),
        };
        assert_eq!(back.origin(), Origin::Arrow);
        let [_, ours, data] = column.buffers() else { panic!("three buffers") };
        let [_, theirs, read_data] = back.buffers() else { panic!("three buffers") };
        let location = |buffer: &Option<ColumnBuffer>| buffer.as_ref().unwrap().location();
        assert_eq!(location(ours), location(theirs));
        // The length of the texts was read on the device, from their offsets.
        assert_eq!(read_data.as_ref().unwrap().length(), ByteCount::new(7));
        assert_eq!(location(data), location(read_data));
        assert_eq!(read(&stream, location(read_data), 7), b"onetwo?");
        assert!(read_data.as_ref().unwrap().region().is_err(), "for reading only");
    }
    drop(column);
    let after = context.usage().device;
    assert_eq!(after, before, "all of it has been released");
}

#[test]
fn an_array_is_released_when_the_consumers_stream_has_run() {
    let name = "arrays::an_array_is_released_when_the_consumers_stream_has_run";
    terrane_testkit::process::in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let stream = Stream::new(&context).unwrap();
        let bytes = filled(&context, &stream, &[7; 64]);
        let target = filled(&context, &stream, &[0; 64]);
        let had_run = Arc::new(AtomicBool::new(false));
        let sees = RecordsIdle { stream: stream.clone(), had_run: Arc::clone(&had_run) };
        let span = bytes.span();
        // SAFETY: the allocation is kept alive, and only the consumer's stream uses its bytes.
        let memory = unsafe { ForeignMemory::new(span, (sees, bytes)) };
        let column = Column::new(DataType::Int8, 64, Region::new(memory)).unwrap();
        // SAFETY: the stream outlives the borrowed one, which drops with the array.
        let consumer = unsafe { Stream::borrow(&context, stream.handle(), ()) }.unwrap();
        let done = ReleaseOrder::After(consumer);
        // SAFETY: no code writes the column.
        let array = unsafe { export_device_array(&column, Ready::Now, done) }.unwrap();
        drop(column);
        // SAFETY: the array keeps the source until the stream has run; the target lives longer.
        unsafe { stream.copy(span.location, target.location(), span.length) }.unwrap();
        drop(array);
        assert!(had_run.load(Ordering::SeqCst), "the memory was freed during the copy");
        assert_eq!(read(&stream, target.location(), 64), [7; 64]);
        assert_eq!(context.failed_drops(), 0);
    });
}

/// A view of `text`, which is too long to be inline.
fn view(text: &[u8]) -> [u8; 16] {
    let mut view = [0; 16];
    view[..4].copy_from_slice(&i32::try_from(text.len()).unwrap().to_ne_bytes());
    view[4..8].copy_from_slice(&text[..4]);
    view
}

#[test]
fn views_have_the_lengths_of_their_data_on_the_host() {
    let name = "views_have_the_lengths_of_their_data_on_the_host";
    let Some(context) = device(name, LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let text = b"longer than twelve bytes";
    let lengths = 24_i64.to_ne_bytes();
    let host = {
        let region = terrane_testkit::memory::HeapAllocator::system();
        let request = RegionRequest::new(ByteCount::new(8));
        let request = request.aligned_to(terrane_core::Alignment::of(8));
        Region::new(region.allocate(&request).unwrap())
    };
    let Location::Host(place) = host.location() else { panic!("{host:?}") };
    // SAFETY: eight bytes, and no other code's.
    unsafe { place.as_ptr().copy_from_nonoverlapping(lengths.as_ptr(), 8) };
    // On the host, as in Arrow C++; on the device, as in other libraries; and omitted.
    let on_device = filled(&context, &stream, &lengths);
    for sizes in [Some(host), Some(on_device), None] {
        let is_stated = sizes.is_some();
        let parts = ColumnParts {
            data_type: DataType::Utf8View,
            length: 1,
            offset: 0,
            null_count: Some(0),
            buffers: vec![
                None,
                Some(filled(&context, &stream, &view(text)).into()),
                Some(filled(&context, &stream, text).into()),
                sizes.map(ColumnBuffer::from),
            ],
            children: vec![],
            dictionary: None,
        };
        let column = Column::from_parts(parts).unwrap();
        assert_eq!(column.kind(), Some(StorageKind::Device(DeviceId::new(0))));
        // SAFETY: no code writes the column.
        let out =
            unsafe { export_device_array(&column, Ready::Now, ReleaseOrder::AtRelease) }.unwrap();
        // SAFETY: there are four buffers.
        let last = unsafe { *out.get().array.buffers.wrapping_add(3) };
        // SAFETY: the last one points to one length, on the host.
        assert_eq!(unsafe { last.cast::<i64>().read() }, 24);
        drop(out);
        if !is_stated {
            continue;
        }
        let array = foreign(&column, Ready::after(&stream).unwrap());
        // SAFETY: it obeys the specification.
        let array = unsafe { import_device_array(&DataType::Utf8View, array) }.unwrap();
        let back = array.wait_on(&stream).unwrap();
        let data = back.buffers()[2].as_ref().unwrap();
        assert_eq!(data.length(), ByteCount::new(24));
        assert_eq!(read(&stream, data.location(), 24), text);
    }
}

#[test]
fn memory_of_ours_is_recognised_whoever_hands_it_over() {
    let name = "memory_of_ours_is_recognised_whoever_hands_it_over";
    let Some(context) = device(name, LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let column = texts(&context, &stream);
    let theirs = foreign(&column, Ready::Now);
    // While the column is exported, a foreign array over the same bytes is over Terrane's memory.
    // SAFETY: no code writes the column.
    let out = unsafe { export_device_array(&column, Ready::Now, ReleaseOrder::AtRelease) }.unwrap();
    // SAFETY: it obeys the specification.
    let back = unsafe { import_device_array(&DataType::Utf8, theirs) }.unwrap();
    let back = back.wait_on(&stream).unwrap();
    drop(out);
    assert_eq!(back.origin(), Origin::Owned);
    for (ours, back) in column.buffers().iter().zip(back.buffers()) {
        let Some((ours, back)) = ours.as_ref().zip(back.as_ref()) else { continue };
        assert!(back.same_memory(ours) && back.region().is_err());
    }
}

#[test]
fn memory_outside_the_device_is_refused() {
    let name = "memory_outside_the_device_is_refused";
    let Some(context) = device(name, LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let region = filled(&context, &stream, &[1; 64]);
    let column = Column::new(DataType::Int64, 8, region).unwrap();
    let spoiled = |spoil: fn(&mut ArrowDeviceArray)| {
        let mut array = foreign(&column, Ready::Now).into_inner();
        spoil(&mut array);
        // SAFETY: the callback reads no changed field.
        let array = unsafe { Owned::new(array) };
        // SAFETY: the driver checks the memory before it is used.
        unsafe { import_device_array(&DataType::Int64, array) }.unwrap().wait_on(&stream)
    };
    assert!(spoiled(|_| ()).is_ok());
    // Longer than the allocation, even if the driver rounds its size up.
    let error = spoiled(|array| array.array.length = 1 << 40).unwrap_err();
    assert!(matches!(error, ImportError::Cuda { .. }), "{error}");
    let error = spoiled(|array| array.device_id = 1).unwrap_err();
    assert!(matches!(error, ImportError::WrongDevice { .. }), "{error}");
    let mut on_the_host = [0_i64; 8];
    let mut buffers: [*const c_void; 2] = [ptr::null(), (&raw mut on_the_host).cast()];
    let mut array = foreign(&column, Ready::Now).into_inner();
    array.array.buffers = (&raw mut buffers).cast();
    // SAFETY: the callback reads no buffer.
    let array = unsafe { Owned::new(array) };
    // SAFETY: the driver checks the memory before it is used.
    let array = unsafe { import_device_array(&DataType::Int64, array) }.unwrap();
    let error = array.wait_on(&stream).unwrap_err();
    assert!(matches!(error, ImportError::Cuda { .. }), "{error}");
}

#[test]
fn pinned_arrays_wait_for_their_event_too() {
    let name = "pinned_arrays_wait_for_their_event_too";
    let Some(context) = device(name, LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let source = filled(&context, &stream, &[7; 4096]);
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let pinned = Region::new(pinned.allocate(&RegionRequest::new(source.length())).unwrap());
    let column = Column::new(DataType::UInt8, 4096, pinned.clone()).unwrap();
    // SAFETY: both live until the synchronisation of the stream, and no other code uses them.
    unsafe { stream.copy(source.location(), pinned.location(), source.length()) }.unwrap();
    let array = foreign(&column, Ready::after(&stream).unwrap());
    assert_eq!((array.get().device_type.0, array.get().device_id), (3, 0));
    // SAFETY: it obeys the specification.
    let array = unsafe { import_device_array(&DataType::UInt8, array) }.unwrap();
    let column = array.wait(&context).unwrap();
    // SAFETY: no code writes the memory any more.
    let array = unsafe { terrane_arrow::arrays::to_arrow(&column) }.unwrap();
    assert!(array.buffers()[0].iter().all(|byte| *byte == 7), "the copy has completed");
}

#[test]
fn a_consumers_stream_runs_behind_what_the_producer_was_still_doing() {
    let name = "arrays::a_consumers_stream_runs_behind_what_the_producer_was_still_doing";
    terrane_testkit::process::in_child(name, || {
        let Some((context, driver)) = simulated(name, LITTLE) else { return };
        let (producer, consumer) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
        let region = filled(&context, &producer, &[0; 64]);
        let column = Column::new(DataType::UInt8, 64, region.clone()).unwrap();
        let held = driver.hold(producer.handle());
        // SAFETY: the memory lives until the synchronisation of the streams.
        unsafe { producer.fill(region.location(), 9, region.length()) }.unwrap();
        let array = foreign(&column, Ready::after(&producer).unwrap());
        // SAFETY: it obeys the specification.
        let array = unsafe { import_device_array(&DataType::UInt8, array) }.unwrap();
        let back = array.wait_on(&consumer).unwrap();
        for _ in 0..100 {
            assert!(!consumer.is_idle().unwrap(), "it waits for the producer");
        }
        drop(held);
        assert_eq!(read(&consumer, back.values().unwrap(), 64), [9; 64]);
    });
}

#[test]
fn ten_thousand_arrays_leave_nothing_on_the_device() {
    let name = "arrays::ten_thousand_arrays_leave_nothing_on_the_device";
    terrane_testkit::process::in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let stream = Stream::new(&context).unwrap();
        let column = texts(&context, &stream);
        let round = || {
            let ready = Ready::after(&stream).unwrap();
            let array = foreign(&column, ready);
            // SAFETY: it obeys the specification.
            let array = unsafe { import_device_array(&DataType::Utf8, array) }.unwrap();
            drop(array.wait_on(&stream).unwrap());
        };
        round();
        let before = (context.usage(), terrane_testkit::leaks::Held::now().descriptors);
        for _ in 0..10_000 {
            round();
        }
        let after = (context.usage(), terrane_testkit::leaks::Held::now().descriptors);
        assert_eq!(format!("{after:?}"), format!("{before:?}"));
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}

#[test]
fn an_event_of_another_device_is_refused() {
    let name = "an_event_of_another_device_is_refused";
    let Some([context, other]) = two_devices(name, LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let column = texts(&context, &stream);
    let ready = Ready::after(&Stream::new(&other).unwrap()).unwrap();
    // SAFETY: no code writes the column.
    let refused =
        unsafe { export_device_array(&column, ready, ReleaseOrder::AtRelease) }.unwrap_err();
    let (device, found) = (context.device().id, other.device().id);
    assert!(
        matches!(refused, ExportError::EventOfOther { device: d, found: f } if (d, f) == (device, found)),
        "{refused}"
    );
}
