//! References of other projects' transfer tests: copies by plain index arithmetic.
//!
//! vLLM's `test_gpu_worker`, SGLang's `test_kvcacheio` and LMCache's connector tests compare their
//! kernels with such loops. The loops are reimplemented here, over bytes. They use nothing of
//! `terrane-layout`, so a wrong stride of a named format is detected.

pub mod lmcache;
pub mod sglang;
pub mod vllm;

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{Allocate, BoxedCause, ByteCount, Memory, Region, RegionRequest};
use terrane_layout::{Geometry, LayoutBuilder};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use crate::conformance::copy_engine::ordered;
use crate::pattern::PieceAccess;
use crate::random::Seeded;

/// The bytes of some tensors.
pub type Tensors = Vec<Vec<u8>>;

/// One end of a reference.
#[derive(Clone, Debug)]
pub struct End {
    /// Terrane's description of the tensors.
    pub geometry: Geometry,
    /// The bytes of each tensor before the transfer.
    pub tensors: Tensors,
    /// Bytes of each tensor before the part that the geometry describes.
    pub first: usize,
}

impl End {
    /// Tensors of these lengths with random bytes.
    pub fn random(geometry: Geometry, lengths: &[usize], random: &mut Seeded) -> Self {
        let tensors = lengths.iter().map(|&length| bytes(length, random)).collect();
        Self { geometry, tensors, first: 0 }
    }
}

/// A transfer and its expected bytes.
#[derive(Clone, Debug)]
pub struct Reference {
    /// The name of the case.
    pub name: String,
    /// The source of the blocks.
    pub source: End,
    /// The destination of the blocks.
    pub destination: End,
    /// Blocks of the source and those of the destination.
    pub blocks: [Vec<u32>; 2],
    /// The layers, if not all.
    pub layers: Option<Range<u32>>,
    /// The tensors of the destination after the transfer.
    pub expected: Tensors,
}

/// The maximum time for all transfers of a check.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Starts all transfers as one set, waits for them, and compares every byte of both ends.
///
/// # Panics
///
/// If a transfer is refused or fails, or if a byte differs from the reference.
pub fn check(
    references: &[Reference],
    manager: &TransferManager,
    access: &dyn PieceAccess,
    [from, to]: [&dyn Fn(usize) -> Region; 2],
) {
    let (mut transfers, mut regions) = (Vec::new(), Vec::new());
    for reference in references {
        let (source, of_source) = adopt(&reference.source, access, from);
        let (destination, of_destination) = adopt(&reference.destination, access, to);
        let [from, to] = &reference.blocks;
        let mut transfer = Transfer::new(&source, &destination).blocks(from, to);
        if let Some(layers) = reference.layers.clone() {
            transfer = transfer.layers(layers);
        }
        transfers.push((ordered(transfer, &source, &destination), ()));
        regions.push([of_source, of_destination]);
    }
    let set = manager.submit_all(transfers).unwrap_or_else(|error| panic!("refused: {error}"));
    let begun = Instant::now();
    while !set.has_ended() {
        assert!(begun.elapsed() < TIMEOUT, "{set:?} has not ended in {TIMEOUT:?}");
        thread::sleep(Duration::from_micros(50));
    }
    let ended = set.wait();
    let each = references.iter().zip(ended.outcomes).zip(regions);
    for ((reference, outcome), [source, destination]) in each {
        let name = &reference.name;
        if let Err(error) = outcome.result {
            panic!("{name}: {error}");
        }
        compare(&format!("{name}, source"), &source, &reference.source.tensors, access);
        compare(&format!("{name}, destination"), &destination, &reference.expected, access);
    }
}

/// Allocates regions from one allocator.
///
/// # Panics
///
/// The returned function panics if there is no memory.
pub fn allocated_by<A: Allocate>(allocator: &A) -> impl Fn(usize) -> Region + '_ {
    |length| {
        let request = RegionRequest::new(ByteCount::from_usize(length));
        Region::new(allocator.allocate(&request).unwrap())
    }
}

/// An endpoint in memory with the bytes of the tensors.
fn adopt(
    end: &End,
    access: &dyn PieceAccess,
    allocate: &dyn Fn(usize) -> Region,
) -> (Endpoint, Vec<Region>) {
    let regions: Vec<Region> = end.tensors.iter().map(|tensor| allocate(tensor.len())).collect();
    for (region, tensor) in regions.iter().zip(&end.tensors) {
        // SAFETY: the region has the tensor's length, and nothing else uses it yet.
        unsafe { access.write(region.location(), tensor) }.expect("the region is writable");
    }
    let first = ByteCount::from_usize(end.first);
    let views = (0..).zip(&regions).map(|(number, region)| {
        region.view(first, end.geometry.region_bytes(number)).expect("the tensor has these bytes")
    });
    let layout = LayoutBuilder::from_geometry(end.geometry.clone())
        .adopt(views.collect::<Vec<_>>())
        .unregistered();
    (Endpoint::new(layout.build().unwrap()).unwrap(), regions)
}

fn compare(what: &str, regions: &[Region], expected: &Tensors, access: &dyn PieceAccess) {
    for (number, (region, expected)) in regions.iter().zip(expected).enumerate() {
        let mut found = vec![0; expected.len()];
        // SAFETY: the region has these bytes, and its transfer has ended.
        let read: Result<(), BoxedCause> = unsafe { access.read(region.location(), &mut found) };
        read.expect("the region is readable");
        let differing: Vec<usize> =
            (0..found.len()).filter(|&at| found[at] != expected[at]).collect();
        if let Some(&at) = differing.first() {
            panic!(
                "{what}: byte {at} of tensor {number} is {:#04x}, expected {:#04x}; \
                 {} bytes of the tensor differ",
                found[at],
                expected[at],
                differing.len()
            );
        }
    }
}

/// Random bytes.
fn bytes(length: usize, random: &mut Seeded) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&random.next_u64().to_le_bytes()[..chunk.len()]);
    }
    bytes
}

/// `count` distinct numbers below `bound`, in random order.
fn sample(bound: usize, count: usize, random: &mut Seeded) -> Vec<usize> {
    let mut all: Vec<usize> = (0..bound).collect();
    random.shuffle(&mut all);
    all.truncate(count);
    all
}

fn ids(blocks: &[usize]) -> Vec<u32> {
    blocks.iter().copied().map(small).collect()
}

fn small(number: usize) -> u32 {
    u32::try_from(number).expect("tests are small")
}
