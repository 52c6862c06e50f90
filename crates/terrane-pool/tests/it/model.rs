//! Random steps of one thread against a model that counts blocks and bytes.

use proptest::prelude::*;
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, Memory as _, Span};
use terrane_pool::{Pool, PoolOptions, SizeClasses};

use crate::support::{Block, Counted};

#[derive(Clone, Debug)]
enum Step {
    Acquire(u64),
    Release(usize),
    Trim(u64),
    Clear,
    Fault,
    Capacity(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..200_000_u64).prop_map(Step::Acquire),
        7 => any::<usize>().prop_map(Step::Release),
        1 => (0..500_000_u64).prop_map(Step::Trim),
        1 => Just(Step::Clear),
        1 => Just(Step::Fault),
        1 => (0..2_000_000_u64).prop_map(Step::Capacity),
    ];
    prop::collection::vec(step, 1..200)
}

fn classes() -> impl Strategy<Value = SizeClasses> {
    prop_oneof![
        Just(SizeClasses::PowerOfTwo),
        Just(SizeClasses::Steps4),
        Just(SizeClasses::Steps8),
        Just(SizeClasses::ExactSlab { stride: ByteCount::kib(18), count: 9 }),
    ]
}

proptest! {
    #[test]
    fn bytes_are_where_the_model_says(
        steps in steps(),
        classes in classes(),
        magazine_depth in 0..14_usize,
        cached in 0..400_000_u64,
        blocks_per_class in 0..20_usize,
    ) {
        let upstream = Counted::unlimited();
        let slabs = matches!(classes, SizeClasses::ExactSlab { .. });
        let options = PoolOptions {
            classes,
            magazine_depth,
            blocks_per_class,
            cached_bytes: ByteCount::new(cached),
            largest_class: ByteCount::kib(128),
            ..PoolOptions::default()
        };
        let pool = Pool::new(upstream.clone(), options).unwrap();
        let mut live: Vec<Block> = Vec::new();
        for step in steps {
            match step {
                Step::Acquire(bytes) => {
                    let before = upstream.bytes();
                    match pool.allocate_bytes(ByteCount::new(bytes)) {
                        Ok(block) => {
                            prop_assert!(block.granted().get() >= bytes);
                            let span = Span::of(&block);
                            prop_assert!(!live.iter().any(|other| span.overlaps(&Span::of(other))));
                            live.push(block);
                        }
                        Err(error) if error.is_exhaustion() => {
                            // All cached blocks have been freed, except in slabs that are in use.
                            prop_assert!(slabs || pool.snapshot().cached == ByteCount::ZERO);
                        }
                        Err(_) => prop_assert!(upstream.bytes() <= before),
                    }
                }
                Step::Release(at) if !live.is_empty() => drop(live.swap_remove(at % live.len())),
                Step::Release(_) => {}
                Step::Trim(to) => {
                    let (before, freed) = (upstream.bytes(), pool.trim(ByteCount::new(to)));
                    prop_assert_eq!(before.get() - freed.get(), upstream.bytes().get());
                    prop_assert!(slabs || pool.snapshot().cached.get() <= to);
                }
                Step::Clear => {
                    pool.clear();
                    prop_assert!(slabs || pool.snapshot().cached == ByteCount::ZERO);
                }
                Step::Fault => upstream.fail_next(1),
                Step::Capacity(more) => {
                    upstream.set_capacity(ByteCount::new(upstream.bytes().get() + more));
                }
            }
            let seen = pool.snapshot();
            let expected: u64 = live.iter().map(|block| block.length().get()).sum();
            prop_assert_eq!(seen.live.get(), expected);
            prop_assert_eq!(seen.held, upstream.bytes());
            prop_assert_eq!(seen.cached.get(), seen.held.get() - expected);
            prop_assert!(slabs || seen.cached.get() <= cached);
            prop_assert!(slabs || seen.classes.iter().all(|class| class.in_queue <= blocks_per_class));
        }
        let late = live.split_off(live.len() / 2);
        drop(live);
        pool.clear();
        prop_assert!(slabs || pool.snapshot().cached == ByteCount::ZERO);
        // The limit has neither lost bytes nor wrapped: as many blocks as fit are cached again.
        if !slabs && cached >= 512 {
            upstream.fail_next(0);
            upstream.set_capacity(ByteCount::gib(1));
            // A power of two from 512 on is a class of its own.
            let bytes = 1 << cached.min(128 << 10).ilog2();
            let fitting = (cached / bytes).min(to_u64(blocks_per_class));
            let allocate = |_| pool.allocate_bytes(ByteCount::new(bytes)).unwrap();
            drop((0..fitting).map(allocate).collect::<Vec<_>>());
            prop_assert_eq!(pool.snapshot().cached.get(), fitting * bytes);
        }
        drop(pool);
        drop(late);
        upstream.assert_empty();
    }
}
