//! Tensors that are imported, and exported tensors that are imported again.

use std::thread;

use terrane_core::{
    Alignment, Allocate, ByteCount, Location, Memory, Region, RegionRequest, StorageKind,
};
use terrane_interop::dlpack::{
    ElementType, ExportError, ImportError, Importer, TensorDevice, TensorExport, TensorShape,
};
use terrane_testkit::memory::HeapAllocator;

use crate::peer::{Axes, Deleted, Fields, reclaim};

/// Bytes aligned for numbers.
fn request(bytes: u64) -> RegionRequest {
    RegionRequest::new(ByteCount::new(bytes)).aligned_to(Alignment::SECTOR)
}

#[test]
fn a_foreign_tensor_is_memory_at_its_place() {
    let mut bytes = vec![7_u8; 64];
    let fields = Fields { byte_offset: 4, ..Fields::over(&mut bytes, &[2, 3]) };
    let deleted = Deleted::default();
    // SAFETY: the bytes outlive the tensor, and no code uses them until then.
    let tensor = unsafe { Importer::new().versioned(fields.versioned(&deleted)) }.unwrap();
    assert_eq!((tensor.shape().sizes(), tensor.shape().strides()), (&[2, 3][..], &[3, 1][..]));
    assert_eq!(tensor.shape().element(), ElementType::BF16);
    assert_eq!(tensor.device(), TensorDevice::Host);
    let region = Region::new(tensor.memory().unwrap());
    assert_eq!((region.kind(), region.length()), (StorageKind::System, ByteCount::new(12)));
    let expected = u64::try_from(fields.data).unwrap() + 4;
    assert_eq!(region.location().as_host().unwrap().get(), expected);
    drop(tensor);
    let view = region.view(ByteCount::new(2), ByteCount::new(2)).unwrap();
    drop(region);
    assert_eq!(deleted.count(), 0);
    drop(view);
    assert_eq!(deleted.count(), 1);
}

#[test]
fn a_deleter_runs_on_the_thread_of_the_last_user() {
    let mut bytes = vec![0_u8; 64];
    let deleted = Deleted::default();
    let tensor = Fields::over(&mut bytes, &[4]).versioned(&deleted);
    // SAFETY: as above.
    let tensor = unsafe { Importer::new().versioned(tensor) }.unwrap();
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let memory = tensor.memory().unwrap();
            let builder = thread::Builder::new().name(format!("user {number}"));
            builder.spawn(move || drop(memory)).unwrap()
        })
        .collect();
    drop(tensor);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(deleted.count(), 1);
}

#[test]
fn a_null_deleter_is_not_called() {
    let mut bytes = vec![0_u8; 64];
    let deleted = Deleted::default();
    let fields = Fields { has_deleter: false, ..Fields::over(&mut bytes, &[4]) };
    let pointer = fields.versioned(&deleted);
    // SAFETY: as above.
    drop(unsafe { Importer::new().versioned(pointer) }.unwrap());
    assert_eq!(deleted.count(), 0);
    // SAFETY: no code has it any more.
    unsafe { reclaim(pointer) };
}

#[test]
fn flags_and_gaps_are_seen() {
    let mut bytes = vec![0_u8; 64];
    let import = |fields: Fields| {
        // SAFETY: as above.
        unsafe { Importer::new().versioned(fields.versioned(&Deleted::default())) }.unwrap()
    };
    let good = Fields::over(&mut bytes, &[2, 3]);
    let read_only = import(Fields { flags: 3, ..good.clone() });
    assert!(read_only.is_read_only() && read_only.is_copied());
    assert!(matches!(read_only.memory(), Err(ImportError::ReadOnly)));
    // SAFETY: there are no gaps.
    assert!(matches!(unsafe { read_only.memory_with_gaps() }, Err(ImportError::ReadOnly)));

    let gaps = import(Fields { strides: Axes::There(vec![8, 1]), ..good.clone() });
    let refused = gaps.memory().unwrap_err();
    assert!(matches!(refused, ImportError::Gaps { elements: 6, .. }), "{refused}");
    // SAFETY: no other code uses the bytes between the elements.
    assert_eq!(unsafe { gaps.memory_with_gaps() }.unwrap().length(), ByteCount::new(22));

    let transposed = import(Fields { strides: Axes::There(vec![1, 2]), ..good.clone() });
    assert_eq!(transposed.memory().unwrap().length(), ByteCount::new(12));

    let pinned = import(Fields { device: (3, 1), ..good });
    assert_eq!((pinned.kind(), pinned.device()), (StorageKind::Pinned, TensorDevice::PinnedHost));
}

#[test]
fn a_tensor_of_nothing_has_no_bytes() {
    let mut none = Vec::new();
    let fields = Fields { data: 0, ..Fields::over(&mut none, &[3, 0]) };
    let deleted = Deleted::default();
    // SAFETY: there are no bytes.
    let tensor = unsafe { Importer::new().versioned(fields.versioned(&deleted)) }.unwrap();
    let memory = tensor.memory().unwrap();
    assert!(memory.length().is_zero());
    drop((tensor, memory));
    assert_eq!(deleted.count(), 1);
}

#[test]
fn exported_tensors_are_reimported_unchanged() {
    let allocator = HeapAllocator::pinned();
    let region = Region::new(allocator.allocate(&request(512)).unwrap());
    let part = region.view(ByteCount::new(128), ByteCount::new(256)).unwrap();
    let location = part.location();
    let shape = TensorShape::strided(ElementType::F16, &[4, 3, 8], &[24, 8, 1]).unwrap();
    for by_offset in [false, true] {
        for legacy in [false, true] {
            // SAFETY: no code uses the bytes.
            let export = unsafe { TensorExport::new(part.clone(), shape.clone()) }.unwrap();
            let export = if by_offset { export.by_offset() } else { export };
            // SAFETY: as above.
            let export = unsafe { export.released_when_done() };
            let importer = Importer::new();
            let tensor = if legacy {
                let pointer = export.into_legacy().unwrap().into_raw();
                // SAFETY: no other code has the tensor, and no code uses the bytes.
                let offset = unsafe { (*pointer.as_ptr()).dl_tensor.byte_offset };
                assert_eq!(offset, if by_offset { 128 } else { 0 });
                // SAFETY: as above.
                unsafe { importer.legacy(pointer.as_ptr()) }
            } else {
                let pointer = export.into_versioned().unwrap().into_raw();
                // SAFETY: as above.
                unsafe { importer.versioned(pointer.as_ptr()) }
            };
            let tensor = tensor.unwrap();
            assert_eq!(tensor.shape(), &shape);
            assert_eq!((tensor.location(), tensor.kind()), (location, StorageKind::Pinned));
            assert!(!tensor.is_read_only());
        }
    }
    drop((region, part));
    assert_eq!(allocator.live(), 0);
}

#[test]
fn memory_lives_until_the_deleter_of_what_was_never_handed_over() {
    let allocator = HeapAllocator::system();
    let memory = allocator.allocate(&request(64)).unwrap();
    let shape = TensorShape::compact(ElementType::U8, &[64]).unwrap();
    // SAFETY: no code uses the bytes.
    let export = unsafe { TensorExport::new(Region::new(memory), shape) }.unwrap();
    let tensor = export.read_only().into_versioned().unwrap();
    assert_eq!(allocator.live(), 1);
    // SAFETY: the structure exists until the tensor drops.
    let structure = unsafe { &*tensor.as_ptr() };
    assert_eq!((structure.version.major, structure.version.minor, structure.flags), (1, 3, 1));
    assert!(matches!(structure.dl_tensor.device.device_type, 1));
    drop(tensor);
    assert_eq!(allocator.live(), 0);
}

#[test]
fn memory_of_a_device_keeps_its_address_and_number() {
    let allocator = HeapAllocator::simulated_device(3);
    let memory = allocator.allocate(&request(64)).unwrap();
    let Location::Device { address, .. } = memory.location() else { panic!("{memory:?}") };
    let shape = TensorShape::compact(ElementType::BF16, &[32]).unwrap();
    // SAFETY: no code uses the bytes.
    let export = unsafe { TensorExport::new(Region::new(memory), shape) }.unwrap();
    assert_eq!(export.device().to_pair(), (2, 3));
    // SAFETY: as above.
    let export = unsafe { export.released_when_done() };
    let tensor = export.into_versioned().unwrap();
    // SAFETY: the structure exists until the tensor drops.
    let structure = unsafe { &*tensor.as_ptr() };
    assert_eq!(u64::try_from(structure.dl_tensor.data.addr()).unwrap(), address.get());
}

#[test]
fn a_neighbour_s_bits_are_not_given_away() {
    let mut bytes = vec![0_u8; 64];
    for (elements, is_whole) in [(9, false), (10, true)] {
        let fields = Fields { dtype: (17, 4, 1), ..Fields::over(&mut bytes, &[elements]) };
        let tensor = fields.versioned(&Deleted::default());
        // SAFETY: the bytes outlive the tensor, and no code uses them until then.
        let tensor = unsafe { Importer::new().versioned(tensor) }.unwrap();
        match tensor.memory() {
            Ok(memory) => assert!(is_whole && memory.length() == ByteCount::new(5)),
            Err(error) => {
                assert!(!is_whole && matches!(error, ImportError::Gaps { .. }), "{error}")
            }
        }
        // SAFETY: as above.
        assert_eq!(unsafe { tensor.memory_with_gaps() }.unwrap().length(), ByteCount::new(5));
    }
}

#[test]
fn memory_that_devices_reach_does_not_go_out_before_its_end_is_known() {
    let shape = || TensorShape::compact(ElementType::U8, &[64]).unwrap();
    for allocator in [HeapAllocator::pinned(), HeapAllocator::simulated_device(0)] {
        let export = || {
            let memory = allocator.allocate(&request(64)).unwrap();
            // SAFETY: no code uses the bytes.
            unsafe { TensorExport::new(Region::new(memory), shape()) }.unwrap()
        };
        let kind = allocator.kind();
        for refused in [export().into_versioned().map(drop), export().into_legacy().map(drop)] {
            let refused = refused.unwrap_err();
            assert!(
                matches!(refused, ExportError::ReleaseNotStated { kind: k } if k == kind),
                "{refused}"
            );
        }
        // SAFETY: no code uses the bytes.
        drop(unsafe { export().released_when_done() }.into_versioned().unwrap());
        allocator.assert_all_freed();
    }
}

#[test]
fn pinned_memory_is_the_host_s_for_who_asks_for_that() {
    let allocator = HeapAllocator::pinned();
    let memory = Region::new(allocator.allocate(&request(64)).unwrap());
    let shape = TensorShape::compact(ElementType::U8, &[64]).unwrap();
    // SAFETY: no code uses the bytes.
    let export = unsafe { TensorExport::new(memory.clone(), shape.clone()) }.unwrap();
    assert_eq!(export.device(), TensorDevice::PinnedHost);
    let export = export.as_host().unwrap();
    assert_eq!(export.device().to_pair(), (1, 0));
    // SAFETY: no code uses the bytes.
    let tensor = unsafe { export.released_when_done() }.into_versioned().unwrap().into_raw();
    // SAFETY: as above, and no other code has the tensor.
    let tensor = unsafe { Importer::new().versioned(tensor.as_ptr()) }.unwrap();
    assert_eq!((tensor.device(), tensor.location()), (TensorDevice::Host, memory.location()));
    let device = HeapAllocator::simulated_device(0).allocate(&request(64)).unwrap();
    // SAFETY: no code uses the bytes.
    let refused = unsafe { TensorExport::new(Region::new(device), shape) }.unwrap().as_host();
    assert!(matches!(refused, Err(ExportError::NotHost { .. })));
}
