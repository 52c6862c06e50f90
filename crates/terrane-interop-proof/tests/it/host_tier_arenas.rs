//! Arenas of an engine: each shape that pegainfer registers, and hostile ones.

use terrane::prelude::*;

use crate::arenas::{ArenaMemory, adopt_arenas};
use crate::contract::ArenaSpec;

/// An arena of 4 pages in `memory`, from this byte on.
fn arena(memory: &mut [u64], offset: usize, shape: (usize, usize, usize, usize)) -> ArenaSpec {
    let (segments, segment_bytes, kv_stride_bytes, block_stride_bytes) = shape;
    let start = memory.as_mut_ptr().expose_provenance() + offset;
    ArenaSpec {
        name: format!("at {offset}"),
        base_device_ptr: u64::try_from(start).unwrap(),
        size_bytes: memory.len() * 8 - offset,
        num_blocks: 4,
        segment_bytes,
        segments,
        kv_stride_bytes,
        block_stride_bytes,
    }
}

fn adopt(arenas: &[ArenaSpec]) -> anyhow::Result<Endpoint> {
    // SAFETY: the memory lives longer than the endpoint, and nothing uses it.
    unsafe { adopt_arenas(ArenaMemory::Host, arenas, ()) }
}

#[test]
fn arenas_of_every_shape_are_one_block() {
    let mut memory = vec![0_u64; 1 << 10];
    // Pages with all layers in one buffer: page, layer, segment.
    let layers: Vec<ArenaSpec> =
        (0..3).map(|layer| arena(&mut memory, layer * 128, (2, 64, 64, 384))).collect();
    let cache = adopt(&layers).unwrap();
    let geometry = cache.layout().geometry();
    assert_eq!((geometry.num_blocks(), geometry.num_layers()), (4, 3));
    assert_eq!(geometry.block_bytes(), ByteCount::new(3 * 2 * 64));
    assert_eq!(cache.layout().verify().unwrap().pieces, 4 * 3 * 2);
    drop(cache);
    // Latents of three layers, and an index for two of them.
    let mut arenas: Vec<ArenaSpec> =
        (0..3).map(|layer| arena(&mut memory, layer * 1024, (1, 96, 0, 256))).collect();
    arenas.insert(1, arena(&mut memory, 4096, (1, 32, 0, 32)));
    arenas.push(arena(&mut memory, 5120, (1, 32, 0, 32)));
    let cache = adopt(&arenas).unwrap();
    let geometry = cache.layout().geometry();
    assert_eq!((geometry.sections().len(), geometry.num_layers()), (3, 3));
    assert_eq!(geometry.block_bytes(), ByteCount::new(3 * 96 + 2 * 32));
    cache.layout().verify().unwrap();
}

#[test]
fn hostile_arenas_are_refused() {
    let mut memory = vec![0_u64; 1 << 10];
    let good = arena(&mut memory, 0, (2, 64, 64, 128));
    let refused = |change: fn(&mut ArenaSpec)| {
        let mut arena = good.clone();
        change(&mut arena);
        format!("{:#}", adopt(&[arena]).unwrap_err())
    };
    for (change, text) in [
        ((|arena| arena.size_bytes = 511) as fn(&mut ArenaSpec), "reach over 512 bytes"),
        (|arena| arena.num_blocks = 0, "state 1 or more"),
        (|arena| arena.segments = 0, "state 1 or more"),
        (|arena| arena.segment_bytes = 0, "state 1 or more"),
        (|arena| arena.segments = 3, "3 segments"),
        (|arena| arena.num_blocks = usize::MAX, "state 1 or more"),
        (|arena| arena.base_device_ptr = 0, "the address is null"),
        // K and V, or two pages, share bytes.
        (|arena| arena.kv_stride_bytes = 32, "strides"),
        (|arena| arena.block_stride_bytes = 64, "strides"),
    ] {
        let error = refused(change);
        assert!(error.contains(text), "{error}");
    }
    assert!(adopt(&[]).is_err());
    // Other page counts, and memory that another rank has adopted.
    let mut fewer = arena(&mut memory, 4096, (1, 32, 0, 32));
    fewer.num_blocks = 3;
    assert!(adopt(&[good.clone(), fewer]).is_err());
    let cache = adopt(std::slice::from_ref(&good)).unwrap();
    let error = adopt(std::slice::from_ref(&good)).unwrap_err().to_string();
    assert!(error.contains("in use by another endpoint"), "{error}");
    drop(cache);
    adopt(&[good]).unwrap();
}
