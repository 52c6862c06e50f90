//! KV caches that another library allocated on the device, moved without a copy into other memory.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, DevicePtr};
use terrane_core::{ByteCount, DeviceAddress, ForeignMemory, Region};
use terrane_cuda::{Context, CopyPath, DeviceEngineOptions};
use terrane_layout::{BlockDimension, Geometry, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::check_transfer;
use terrane_testkit::model::Image;
use terrane_transfer::Endpoint;

use super::fixture::{Fixture, PINNED, config};
use crate::needs::{LITTLE, device_with_kernels as device};

/// K and V of a layer in one tensor, like those of serving engines.
const TENSORS: LayoutKind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };

/// One tensor per layer. Some begin in the middle of an allocation, like those of a caching
/// allocator.
fn adopted(
    context: &Context,
    tensors: &[Arc<CudaSlice<u8>>],
    shape: LayoutConfig,
    bytes: ByteCount,
) -> Endpoint {
    let regions = (0_u64..).zip(tensors).map(|(layer, tensor)| {
        let stream = tensor.stream();
        let (start, _in_use) = tensor.device_ptr(stream);
        let address = DeviceAddress::new(start + 512 * (layer % 3));
        let span = context.device_span(address, bytes).unwrap();
        // SAFETY: the owner is a reference to the tensor that has these bytes, and the test
        // accesses them through the endpoint alone.
        Region::new(unsafe { ForeignMemory::new(span, Arc::clone(tensor)) })
    });
    let builder = LayoutBuilder::new(shape).kind(TENSORS).adopt(regions.collect::<Vec<_>>());
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

#[test]
fn tensors_of_another_library_are_moved_and_kept() {
    let name = "tensors_of_another_library_are_moved_and_kept";
    let Some(context) = device(name, LITTLE) else { return };
    let shape = config(12, 5, 16);
    let bytes = Geometry::new(&shape, TENSORS).unwrap().region_bytes(0);
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let room = bytes.to_usize() + 1024;
    let tensors: Vec<_> =
        (0..5).map(|_| Arc::new(stream.alloc_zeros::<u8>(room).unwrap())).collect();
    stream.synchronize().unwrap();
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged), Some(CopyPath::Batched)] {
        let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &[PINNED]);
        let manager = fixture.manager();
        let cache = adopted(&context, &tensors, shape, bytes);
        assert!(tensors.iter().all(|tensor| Arc::strong_count(tensor) == 2));
        let tier = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        Image::scribble(&cache, fixture.access(), 2);
        Image::scribble(&tier, fixture.access(), 3);
        let (out, kept, home) = ([7, 0, 11, 3], [1, 2, 6, 5], [4, 9, 8, 0]);
        let access = fixture.access();
        check_transfer(&manager, access, (&cache, &out), (&tier, &kept), 0..5);
        check_transfer(&manager, access, (&tier, &kept), (&cache, &home), 0..5);
        drop((manager, cache));
        assert!(tensors.iter().all(|tensor| Arc::strong_count(tensor) == 1), "given back");
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
