//! Any two formats of equal shape convert into each other, byte by byte as in the oracle.

use terrane_layout::{Geometry, RegionOffset};

use crate::oracle::{self, Format, indices};
use terrane_testkit::formats::{self as cases, SMALL};

/// Memory in which a number identifies every byte; 0 for bytes that were not written.
type Bytes = Vec<Vec<u32>>;

fn numbered(regions: &[u64]) -> Bytes {
    let mut next = 0;
    let mut region = |&bytes: &u64| {
        (0..bytes)
            .map(|_| {
                next += 1;
                next
            })
            .collect()
    };
    regions.iter().map(&mut region).collect()
}

fn empty(regions: &[u64]) -> Bytes {
    regions.iter().map(|&bytes| vec![0; usize::try_from(bytes).unwrap()]).collect()
}

fn at(place: RegionOffset, byte: u32) -> (usize, usize) {
    let offset = place.offset + u64::from(byte);
    (usize::try_from(place.region).unwrap(), usize::try_from(offset).unwrap())
}

/// Moves every element by the geometries' arithmetic.
fn converted(source: &Geometry, destination: &Geometry, from: &Bytes, to: &mut Bytes) {
    for section in source.sections() {
        let other = destination.section(section.name()).unwrap();
        for (outside, inside) in indices(source.num_blocks(), section) {
            let places = [section.place(outside, inside), other.place(outside, inside)];
            for byte in 0..section.shape().element_bytes {
                let [(a, b), (c, d)] = places.map(|place| at(place, byte));
                to[c][d] = from[a][b];
            }
        }
    }
}

/// Moves every element between the positions of the oracle.
fn expected(source: &Format, destination: &Format, from: &Bytes, to: &mut Bytes) {
    for section in &source.sections {
        let mut others = destination.sections.iter();
        let other = others.find(|other| other.name == section.name).unwrap();
        for places in section.places.iter().zip(&other.places) {
            for byte in 0..section.shape[4] {
                let [(a, b), (c, d)] = [places.0, places.1].map(|place| at(*place, byte));
                to[c][d] = from[a][b];
            }
        }
    }
}

/// The bytes of a block in canonical order.
fn canonical(geometry: &Geometry, block: u32, memory: &Bytes) -> Vec<u32> {
    let mut bytes = Vec::new();
    geometry.canonical_spans(block, u32::MAX, &mut |start, length| {
        let (region, offset) = at(start, 0);
        let end = offset + usize::try_from(length).unwrap();
        bytes.extend_from_slice(&memory[region][offset..end]);
    });
    bytes
}

fn shapes(format: &Format) -> Vec<(&str, [u32; 5])> {
    let mut shapes: Vec<_> =
        format.sections.iter().map(|section| (section.name.as_str(), section.shape)).collect();
    shapes.sort_unstable();
    shapes
}

#[test]
fn every_pair_of_equal_shape_converts() {
    let formats = oracle::parse(oracle::EXPECTED);
    let geometries: Vec<Geometry> =
        cases::all(SMALL).into_iter().map(|(_, geometry)| geometry.unwrap()).collect();
    let mut pairs = 0;
    for (source, from_format) in geometries.iter().zip(&formats) {
        let from = numbered(&from_format.regions);
        for (destination, to_format) in geometries.iter().zip(&formats) {
            if shapes(from_format) != shapes(to_format) {
                continue;
            }
            let mut found = empty(&to_format.regions);
            let mut wanted = found.clone();
            converted(source, destination, &from, &mut found);
            expected(from_format, to_format, &from, &mut wanted);
            assert!(found == wanted, "{} to {}", from_format.name, to_format.name);
            // All bytes of all blocks were moved.
            let arrived = found.iter().flatten().filter(|&&byte| byte != 0).count();
            assert_eq!(arrived, destination.total_bytes().to_usize(), "{}", to_format.name);
            for block in 0..source.num_blocks() {
                let (sent, received) =
                    (canonical(source, block, &from), canonical(destination, block, &found));
                assert!(sent == received, "{} and {}", from_format.name, to_format.name);
                assert_eq!(sent.len(), source.block_bytes().to_usize());
            }
            pairs += 1;
        }
    }
    // 35 formats of K and V, 8 of a latent, 3 of unequal rows, and 5 without a partner.
    assert_eq!(pairs, 35 * 35 + 8 * 8 + 3 * 3 + 5);
}
