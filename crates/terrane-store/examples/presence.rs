//! Measures lookups of random keys: `presence [KEYS] [KEY_BYTES]`.

use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use terrane_store::{KeyHasher, StoredBlock, TierIndex};

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1).filter_map(|text| text.parse().ok());
    let count: u32 = arguments.next().unwrap_or(1_000_000);
    let hasher = KeyHasher::new(&[3; 16]);
    let key = |number: u32| {
        let mut key = [0; 36];
        key[..4].copy_from_slice(&number.to_le_bytes());
        key
    };
    let blocks: Vec<_> = (0..count)
        .filter_map(|slot| {
            let block = StoredBlock { slot, length: 1, checksum: 2 };
            Some((hasher.hash(&key(slot)).ok()?, block))
        })
        .collect();
    let index = TierIndex::new(count);
    let begin = Instant::now();
    index.insert_all(&blocks);
    let loaded = begin.elapsed();
    let mut random = 88_172_645_463_325_252_u64;
    let keys: Vec<_> = (0..1_000_000)
        .map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            key(u32::try_from(random % u64::from(count)).unwrap_or(0))
        })
        .collect();
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "loaded in {loaded:?}; {} bytes a block",
        index.memory_bytes() / blocks.len().max(1)
    )?;
    for _ in 0..5 {
        let begin = Instant::now();
        let mut found = 0;
        for key in &keys {
            found += usize::from(hasher.hash(key).ok().and_then(|key| index.get(key)).is_some());
        }
        let alone = begin.elapsed().as_secs_f64() * 1e9 / 1e6;
        let begin = Instant::now();
        for batch in keys.chunks(64) {
            let mut hashes = [None; 64];
            for (hash, key) in hashes.iter_mut().zip(batch) {
                *hash = hasher.hash(key).ok();
            }
            index.prefetch(hashes.iter().flatten().copied());
            found += hashes.iter().flatten().filter(|key| index.get(**key).is_some()).count();
        }
        let batched = begin.elapsed().as_secs_f64() * 1e9 / 1e6;
        writeln!(
            out,
            "alone {alone:.0} ns, in batches of 64 {batched:.0} ns ({})",
            black_box(found)
        )?;
    }
    Ok(())
}
