//! Layouts of any strides on a device: every named format, by every path.

use terrane_core::{Alignment, Allocate, ByteCount, Memory, Region, RegionRequest};
use terrane_cuda::{
    Context, CopyPath, DeviceAllocator, DeviceEngineOptions, PinnedAllocator, PinnedOptions,
};
use terrane_layout::{Geometry, LayoutBuilder};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::ordered;
use terrane_testkit::conformance::formats::{Tried, convert_all, endpoint};
use terrane_testkit::formats::{self, SMALL, Sizes};
use terrane_testkit::regions::{Copied, RegionBytes};
use terrane_transfer::{Endpoint, Transfer};

use super::fixture::{DEVICE, Fixture, PINNED};
use crate::needs::{Needs, device_with_kernels as device, is_simulated};

const ROOM: Needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };

fn fixture(context: &Context, path: Option<CopyPath>) -> Fixture {
    match path {
        Some(path) => Fixture::in_small_parts(context, path, &[DEVICE, PINNED]),
        None => Fixture::new(context, DeviceEngineOptions::default(), &[DEVICE, PINNED]),
    }
}

/// Formats of engines on a device: one tensor per layer, some of them in separate allocations.
pub fn is_on_device(name: &str) -> bool {
    const NAMES: [&str; 9] = [
        "vllm.hnd",
        "vllm.lbnhc",
        "vllm.bhlnc",
        "flashinfer.nhd",
        "sglang.device",
        "paged.pairs_of_tensors",
        "paged.aiter_shuffled",
        "model.scales_beside",
        "model.state_pages",
    ];
    NAMES.contains(&name) || name.contains("mla") || name.contains("unequal")
}

/// Formats of pages in host memory.
pub fn is_of_pages(name: &str) -> bool {
    const NAMES: [&str; 8] = [
        "vllm.offload_rows",
        "vllm.blhnc",
        "sglang.page_head",
        "sglang.page_first_direct",
        "lmcache.kv_2ltd",
        "flexkv.layer_first",
        "model.scales_beside",
        "model.state_pages",
    ];
    NAMES.contains(&name) || name.contains("mla") || name.contains("unequal")
}

/// One allocation per region, at irregular distances.
pub fn apart(context: &Context, geometry: &Geometry) -> Endpoint {
    let allocator = DeviceAllocator::new(context);
    let regions = (0..geometry.region_count()).map(|number| {
        let (first, bytes) =
            (ByteCount::new(4096 * u64::from(number % 3)), geometry.region_bytes(number));
        let request =
            RegionRequest::new(bytes.checked_add(first).unwrap()).aligned_to(Alignment::PAGE);
        let region = Region::new(allocator.allocate(&request).unwrap());
        assert!(!region.length().is_zero());
        region.view(first, bytes).unwrap()
    });
    let layout = LayoutBuilder::from_geometry(geometry.clone()).adopt(regions.collect::<Vec<_>>());
    Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
}

#[test]
fn formats_convert_between_the_device_and_pinned_pages_by_every_path() {
    let name = "formats_convert_between_the_device_and_pinned_pages_by_every_path";
    let Some(context) = device(name, ROOM) else { return };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let on_host = |geometry: &Geometry| endpoint(geometry, &pinned);
    let on_device = |geometry: &Geometry| apart(&context, geometry);
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged), Some(CopyPath::Batched)] {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        let here = Tried { endpoint: on_device, is_tried: is_on_device };
        let there = Tried { endpoint: on_host, is_tried: is_of_pages };
        let transfers = convert_all(&manager, fixture.access(), &here, &there);
        assert!(transfers > 250, "{path:?}: {transfers}");
        let transfers = convert_all(&manager, fixture.access(), &there, &here);
        assert!(transfers > 250, "{path:?}: {transfers}");
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn every_format_converts_into_every_other_within_the_device() {
    let name = "every_format_converts_into_every_other_within_the_device";
    let Some(context) = device(name, ROOM) else { return };
    let on_device = |geometry: &Geometry| apart(&context, geometry);
    // Simulated kernels are slow, so a simulated device copies fewer pairs.
    let is_tried: fn(&str) -> bool = if is_simulated(&context) { is_on_device } else { |_| true };
    let fixture = fixture(&context, None);
    let [from, to] = [on_device; 2].map(|endpoint| Tried { endpoint, is_tried });
    let transfers = convert_all(&fixture.manager(), fixture.access(), &from, &to);
    assert!(transfers > 250, "{transfers}");
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Rows of the host with several blocks each, as in vLLM's offloading. The distances between their
/// blocks are uneven, and one row is longer than its blocks.
#[test]
fn blocks_in_chunks_are_copied_by_kernels() {
    let name = "blocks_in_chunks_are_copied_by_kernels";
    let Some(context) = device(name, ROOM) else { return };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let sizes = Sizes { blocks: 12, tokens: 3, ..SMALL };
    let formats = formats::all(sizes);
    let format = |name| {
        let (_, geometry) = formats.iter().find(|(known, _)| *known == name).unwrap();
        geometry.as_ref().unwrap().clone()
    };
    let (direct, staged) = (CopyPath::Direct, CopyPath::Staged);
    let cases = [
        // K and V of a token are adjacent, so a page of one section is no stretch to stage.
        (direct, "vllm.lbnhc", "vllm.offload_rows"),
        (direct, "vllm.lbhnc", "vllm.offload_rows_padded"),
        (direct, "vllm.nhd", "lmcache.kv_2ltd"),
        (staged, "vllm.nhd", "lmcache.kv_2ltd"),
    ];
    for (path, device, host) in cases {
        let fixture = fixture(&context, Some(path));
        let manager = fixture.manager();
        let (here, there) = (apart(&context, &format(device)), endpoint(&format(host), &pinned));
        for (from, to) in [(&here, &there), (&there, &here)] {
            // Neighbours in a chunk, neighbours in two chunks, and single blocks.
            let copied = Copied {
                from: vec![4, 5, 6, 0, 9, 11, 1],
                to: vec![10, 2, 3, 7, 6, 0, 8],
                layers: 0..3,
                heads: None,
                tokens: None,
            };
            let transfer = Transfer::new(from, to).blocks(&copied.from, &copied.to);
            let transfer = ordered(transfer, from, to);
            assert_eq!(manager.explain(&transfer).unwrap().path(), path.name(), "{host}");
            let source = RegionBytes::scribble(from, fixture.access(), 1);
            let mut expected = RegionBytes::scribble(to, fixture.access(), 2);
            let geometry = |end: &Endpoint| end.layout().geometry().clone();
            expected.convert(&geometry(to), &source, &geometry(from), &copied);
            manager.submit(transfer, ()).unwrap().wait().result.unwrap();
            RegionBytes::of(to, fixture.access()).assert_equals(&expected, host);
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
