//! Random operations from several threads, checked against what may be there.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_store::{
    BlockResult, CompletionQueue, JobOptions, Priority, Store, TierId, WritePolicy,
};
use terrane_testkit::random::Seeded;

use super::harness::{assert_at_rest, builder, content, found, get, key, soon, submit_put};

const BLOCK: usize = 4096;

/// The operations of a run. Raise it for a longer search.
#[expect(clippy::disallowed_methods, reason = "a longer search is asked for")]
fn operations() -> usize {
    std::env::var("TERRANE_STORE_OPERATIONS").map_or(6000, |count| count.parse().unwrap())
}

/// The keys of one thread that were put and not removed since.
type Model = HashMap<usize, bool>;

struct Actor<'a> {
    store: &'a Store,
    random: Seeded,
    /// The keys of this thread begin here; no other thread changes them.
    first: usize,
    model: Model,
    queue: CompletionQueue<terrane_store::JobOutcome>,
}

impl Actor<'_> {
    fn below(&mut self, most: usize) -> usize {
        self.random.below(most)
    }

    fn keys(&mut self) -> (Vec<usize>, Vec<Vec<u8>>) {
        let (first, count) = (self.below(60), 1 + self.below(4));
        let numbers: Vec<usize> = (0..count).map(|n| self.first + (first + n) % 60).collect();
        let keys = numbers.iter().map(|&number| key(number)).collect();
        (numbers, keys)
    }

    fn options(&mut self) -> JobOptions {
        match self.below(8) {
            0 => JobOptions::new().deadline(Instant::now()),
            1 => JobOptions::new().deadline(Instant::now() + Duration::from_micros(300)),
            2 => JobOptions::new().priority(Priority::High),
            _ => JobOptions::new(),
        }
    }

    /// The keys may be stored from now on.
    fn may_have(&mut self, numbers: &[usize]) {
        self.model.extend(numbers.iter().map(|&number| (number, true)));
    }

    fn step(&mut self) {
        let (numbers, keys) = self.keys();
        let options = self.options();
        match self.below(20) {
            0..=6 => {
                let job = submit_put(self.store, &keys, BLOCK, options);
                let outcome = job.wait();
                assert_eq!(outcome.results.len(), keys.len());
                // A put that timed out may have stored some of them.
                self.may_have(&numbers);
            }
            7..=13 => {
                let (outcome, blocks) = get(self.store, &keys, BLOCK, options);
                for ((number, block), result) in numbers.iter().zip(blocks).zip(&outcome.results) {
                    if let BlockResult::Done { .. } = result {
                        assert!(block == content(&key(*number), BLOCK), "wrong bytes");
                        assert_eq!(self.model.get(number), Some(&true), "a removed key came back");
                    }
                }
            }
            14 => {
                let outcome = self.store.remove(0, &keys).unwrap().wait();
                for (number, result) in numbers.iter().zip(outcome.results) {
                    assert!(matches!(result, BlockResult::Done { .. } | BlockResult::Absent));
                    self.model.remove(number);
                }
            }
            15 => drop(self.store.promote(&keys, TierId::new(0), options).unwrap().wait()),
            16 => {
                let lease = self.store.acquire(0, &keys, Duration::from_millis(2));
                if self.below(2) == 0 {
                    #[expect(clippy::disallowed_methods, reason = "the test leaks it")]
                    std::mem::forget(lease);
                }
            }
            17 => {
                // Dropped, leaked or cancelled half-way.
                let job = submit_put(self.store, &keys, BLOCK, options);
                self.may_have(&numbers);
                match self.below(3) {
                    0 => drop(job),
                    #[expect(clippy::disallowed_methods, reason = "the test leaks it")]
                    1 => std::mem::forget(job),
                    _ => job.cancel(),
                }
                // Later steps of this thread come after it.
                assert_eq!(self.store.drain(soon()).left, 0);
            }
            18 => {
                let options = options.queue(&self.queue, 7);
                let job = submit_put(self.store, &keys, BLOCK, options);
                job.raise(Priority::High);
                let outcome = self.queue.wait(Some(soon())).unwrap();
                assert_eq!((outcome.tag, outcome.results.len()), (7, keys.len()));
                self.may_have(&numbers);
            }
            _ => self.store.touch(0, &keys),
        }
    }
}

fn run(store: &Store, operations: usize) -> Mutex<Model> {
    let all = Mutex::new(Model::new());
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (store, all) = (store, &all);
            scope.spawn(move || {
                let seed = u64::try_from(thread).unwrap() + 11;
                let queue = CompletionQueue::new(8).unwrap();
                let random = Seeded::new(seed);
                let first = thread * 1000;
                let mut actor = Actor { store, random, first, model: Model::new(), queue };
                (0..operations / 4).for_each(|_| actor.step());
                all.lock().unwrap().extend(actor.model);
            });
        }
    });
    all
}

#[test]
fn random_operations_leave_what_the_model_allows() {
    for (policy, host) in [
        (WritePolicy::Through, 16),
        (WritePolicy::Back, 16),
        (WritePolicy::Back, 4),
        (WritePolicy::AfterUses(2), 8),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let open = || {
            let builder = builder(directory.path(), 4096, 100).host(ByteCount::kib(4 * host));
            builder.write_policy(policy).open().unwrap()
        };
        let (store, _) = open();
        let model = run(&store, operations() / 4).into_inner().unwrap();
        assert_at_rest(&store);
        drop(store);
        let (store, _) = open();
        for number in (0..4).flat_map(|thread| thread * 1000..thread * 1000 + 60) {
            if found(&store, &[key(number)], BLOCK) == [true] {
                assert!(model.contains_key(&number), "a removed key came back after a restart");
            }
        }
        assert_at_rest(&store);
    }
}
