//! The queue compared with an in-memory model of a file: random offsets, sizes and lists of
//! buffers.

use std::os::unix::fs::FileExt;

use proptest::prelude::*;
use terrane_storage::{IoBuffer, IoRequest};

use crate::support::{buffer, count, drain, queues, target};

const FILE: usize = 1 << 16;

/// A batch of requests that do not overlap: a part of the file, and its division into buffers.
#[derive(Clone, Debug)]
struct Batch {
    is_write: bool,
    parts: Vec<(usize, Vec<usize>)>,
}

fn batch() -> impl Strategy<Value = Batch> {
    let cuts = prop::collection::vec(0_usize..3000, 0..12);
    let parts = prop::collection::vec((0_usize..4000, cuts), 1..10);
    (any::<bool>(), parts).prop_map(|(is_write, gaps)| {
        let mut at = 0;
        let parts = gaps.into_iter().filter_map(|(gap, cuts)| {
            let begin = at + gap;
            let length: usize = cuts.iter().sum();
            at = begin + length;
            (at <= FILE).then_some((begin, cuts))
        });
        Batch { is_write, parts: parts.collect() }
    })
}

fn cut<'a>(mut bytes: &'a mut [u8], lengths: &[usize]) -> Vec<&'a mut [u8]> {
    lengths
        .iter()
        .map(|&length| {
            let (head, tail) = std::mem::take(&mut bytes).split_at_mut(length);
            bytes = tail;
            head
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn the_file_equals_the_model(
        batches in prop::collection::vec(batch(), 1..6),
        seed in any::<u8>(),
    ) {
        for mut queue in queues("the_file_equals_the_model", 3) {
            let file = tempfile::tempfile().unwrap();
            let mut model: Vec<u8> = (0..FILE).map(|n| n.to_le_bytes()[0] ^ seed).collect();
            file.write_all_at(&model, 0).unwrap();
            let mut fill = seed;
            for batch in &batches {
                let mut memories: Vec<Vec<u8>> = batch.parts.iter().map(|(begin, cuts)| {
                    fill = fill.wrapping_mul(31).wrapping_add(7);
                    let length: usize = cuts.iter().sum();
                    (0..length).map(|n| (n + begin).to_le_bytes()[0] ^ fill).collect()
                }).collect();
                let mut completions = Vec::new();
                for (token, ((begin, cuts), memory)) in
                    (0..).zip(batch.parts.iter().zip(&mut memories))
                {
                    while !queue.has_room() {
                        queue.wait(None, &mut completions).unwrap();
                    }
                    let pieces: Vec<IoBuffer> =
                        cut(memory, cuts).into_iter().map(buffer).collect();
                    let offset = count(u64::try_from(*begin).unwrap());
                    let request = if batch.is_write {
                        IoRequest::write(token, target(&file), offset, &pieces)
                    } else {
                        IoRequest::read(token, target(&file), offset, &pieces)
                    };
                    // SAFETY: memories and file outlive the drain.
                    unsafe { queue.submit(&request) }.unwrap();
                }
                completions.extend(drain(&mut queue));
                prop_assert_eq!(completions.len(), batch.parts.len());
                for completion in &completions {
                    prop_assert_eq!(&completion.outcome, &Ok(()));
                }
                for ((begin, _), memory) in batch.parts.iter().zip(&memories) {
                    let part = &mut model[*begin..begin + memory.len()];
                    if batch.is_write {
                        part.copy_from_slice(memory);
                    } else {
                        prop_assert_eq!(&*part, &memory[..]);
                    }
                }
            }
            let mut held = vec![0; FILE];
            file.read_exact_at(&mut held, 0).unwrap();
            prop_assert!(held == model);
        }
    }
}
