//! Damaged slots: each of 10⁵ damages is caught. `TERRANE_STORE_DAMAGES` sets another number.

use std::fs::File;
use std::os::unix::fs::FileExt;

use terrane_testkit::random::Seeded;

use super::*;

const LENGTH: usize = 9 * 512 + 100;
const STRIDE: u64 = 8192;
const SLOTS: u32 = 500;

/// How many times each slot is damaged.
#[expect(clippy::disallowed_methods, reason = "the ban is for library code; this is a test")]
fn rounds() -> u64 {
    let asked = std::env::var("TERRANE_STORE_DAMAGES");
    let damages: u64 = asked.map_or(100_000, |count| count.parse().unwrap());
    damages.div_ceil(u64::from(SLOTS))
}

/// The content of a slot in a round.
fn content(round: u64, slot: u32) -> Vec<u8> {
    pattern(round * 1_000_000 + u64::from(slot), LENGTH)
}

/// The bytes of the slot after some damage.
fn damaged(round: u64, slot: u32, random: &mut Seeded) -> Vec<u8> {
    let mut bytes = content(round, slot);
    let sectors = LENGTH.div_ceil(512);
    match random.below(6) {
        0 => {
            let older = content(round - 1, slot);
            let begin = random.below(sectors) * 512;
            let end = (begin + 512).min(LENGTH);
            bytes[begin..end].copy_from_slice(&older[begin..end]);
        }
        1 => bytes = content(round - 1, slot),
        2 => bytes = content(round, (slot + 1 + super::slot(random.below(3))) % SLOTS),
        3 => {
            let begin = random.below(sectors) * 512;
            bytes[begin..].fill(0);
        }
        4 => {
            bytes.rotate_right(512);
            bytes[..512].fill(0);
        }
        _ => {
            let bit = random.below(LENGTH * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
    bytes
}

#[test]
fn a_hundred_thousand_damages_are_caught() {
    let folder = memory_folder();
    let slabs = open_one(folder.path(), group(LENGTH as u64, SLOTS), &SlabOptions::default());
    let file = File::options().write(true).open(folder.path().join("slab.0.000")).unwrap();
    let mut random = Seeded::new(42);
    let mut memory: Vec<Guarded> = (0..SLOTS).map(|_| Guarded::new(&[(0, LENGTH)])).collect();
    let results = Arc::new(Results::default());
    let mut caught = 0;
    for round in 1..=rounds() {
        let mut submit = |direction: &dyn Fn(usize) -> SlabDirection| {
            let requests = memory.iter_mut().enumerate().map(|(index, memory)| {
                if direction(index) == SlabDirection::Write {
                    memory.fill(&content(round, slot(index)));
                }
                let new = request(slot(index), memory.buffers(), direction(index));
                NewRequest { index, ..new }.to(&results)
            });
            let requests = requests.collect();
            // SAFETY: the memory is kept until all have ended.
            unsafe { slabs.submit(requests) };
            let mut ended = results.take(SLOTS as usize);
            ended.sort_by_key(|(index, _)| *index);
            ended.into_iter().map(|(_, result)| result)
        };
        let sums: Vec<u64> =
            submit(&|_| SlabDirection::Write).map(|result| result.unwrap().checksum).collect();
        for slot in 0..SLOTS {
            let bytes = damaged(round, slot, &mut random);
            assert_ne!(bytes, content(round, slot));
            file.write_all_at(&bytes, u64::from(slot) * STRIDE).unwrap();
        }
        for result in submit(&|index| SlabDirection::Read { checksum: sums[index] }) {
            let is_corrupt = matches!(result, Err(SlabFailure::Corrupt { expected, found })
                if expected != found);
            assert!(is_corrupt, "{result:?}");
            caught += 1;
        }
    }
    assert_eq!(caught, rounds() * u64::from(SLOTS));
}
