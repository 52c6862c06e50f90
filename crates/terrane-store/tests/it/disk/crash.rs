//! Every state that a crash can leave, for short histories, and random ones for long histories.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use terrane_testkit::random::Seeded;

use super::harness::{
    Expected, Key, Note, SLAB, SLOTS, Step, Store, check, created, expected, run, sum,
};
use super::recorder::{History, Image, Recorder, Skip};
use Step::{Checkpoint, Clear, Put, PutRecordFirst, Remove, Reopen, Sync};

/// All subsets of so many parts are tried.
const MOST_SUBSETS: usize = 12;

/// One state in so many is used further, and crashes again.
const SECOND_LIFE: usize = 16;

/// Random states at each place of a long history. Raise it for a longer search.
fn states_of_each_place() -> u32 {
    #[expect(clippy::disallowed_methods, reason = "a longer search is asked for")]
    let asked = std::env::var("TERRANE_STORE_CRASH_STATES").ok();
    asked.map_or(5, |count| count.parse().expect("a number"))
}

/// The findings of a search.
#[derive(Debug, Default)]
struct Search {
    /// Random states at each place with too many parts for all subsets.
    states: u32,
    /// Different states that were tried.
    tried: HashSet<u64>,
    second_lives: usize,
    violation: Option<String>,
}

impl Search {
    /// Tries the states after each entry of the log, until one is wrong.
    fn history(&mut self, history: &History<Note>, random: &mut Seeded) {
        for end in 0..=history.log.len() {
            let expected = expected(history, end);
            let pending = history.pending(end);
            let subsets = 1_u32.checked_shl(pending.len().try_into().unwrap()).unwrap_or(0);
            let is_short = pending.len() <= MOST_SUBSETS;
            let rounds = if is_short { subsets } else { self.states };
            for round in 0..rounds {
                if self.violation.is_some() {
                    return;
                }
                let (share, seed) = (random.below(5), random.next_u64());
                let kept = |at: usize| match round {
                    _ if is_short => round >> at & 1 == 1,
                    0 => true,
                    1 => false,
                    _ => Seeded::new(seed ^ (at as u64) << 32).below(4) < share,
                };
                self.state(&history.crash(end, &pending, kept), &expected, random);
            }
        }
    }

    fn state(&mut self, image: &Image, expected: &Expected, random: &mut Seeded) {
        let mut hasher = DefaultHasher::new();
        expected.hash(&mut hasher);
        for (name, inode) in &image.names {
            // The checksum is much faster than the hasher.
            (name, sum(&image.inodes[*inode])).hash(&mut hasher);
        }
        if !self.tried.insert(hasher.finish()) {
            return;
        }
        let outcome = check(image, expected).and_then(|(readable, opening)| {
            if !random.once_in(SECOND_LIFE) {
                return Ok(());
            }
            self.second_lives += 1;
            // The opening itself crashes.
            let may = expected.may.clone();
            let again = Expected { must: readable.clone(), may };
            crash_at_random(&opening.history(), &again, random)?;
            if image.file(SLAB).is_none() {
                return Ok(());
            }
            // The store is used further, and crashes.
            let files = Recorder::new(image.clone(), None);
            second_life(&files, &readable.into_iter().collect::<Vec<_>>(), random)
        });
        if let Err(violation) = outcome {
            self.violation.get_or_insert(violation);
        }
    }
}

/// Tries a few states of a log, during which the expectation does not change.
fn crash_at_random(
    history: &History<Note>,
    expected: &Expected,
    random: &mut Seeded,
) -> Result<(), String> {
    for _ in 0..3 {
        let end = random.below(history.log.len() + 1);
        let pending = history.pending(end);
        let seed = random.next_u64();
        let kept = |at: usize| Seeded::new(seed ^ (at as u64) << 32).once_in(2);
        check(&history.crash(end, &pending, kept), expected)
            .map_err(|error| format!("the opening crashed: {error}"))?;
    }
    Ok(())
}

/// Blocks that were readable stay durable without another sync: the opening has synced them.
fn second_life(
    files: &Recorder<Note>,
    readable: &[Key],
    random: &mut Seeded,
) -> Result<(), String> {
    let error = |error| format!("a second life fails: {error}");
    let mut store = Store::open(files, 0).map_err(error)?;
    let new: Key = 60;
    let slot = (0..SLOTS).find(|slot| !store.index.values().any(|taken| taken == slot));
    let slot = slot.expect("the histories leave a slot free");
    let removed = readable.first().copied();
    let steps = [Put(new, slot), Sync, Remove(removed.into_iter().collect()), Sync, Put(61, slot)];
    let steps = &steps[..random.below(steps.len()) + 1];
    for step in steps {
        store.step(step).map_err(error)?;
    }
    let history = files.history();
    let end = history.log.len();
    let mut now = expected(&history, end);
    for key in readable {
        let is_removed = steps.len() > 2 && removed == Some(*key);
        // A removal that has been synced is final; one that has not may have happened.
        if !is_removed {
            now.must.insert(*key);
        }
        if !(is_removed && steps.len() > 3) {
            now.may.insert(*key);
        }
    }
    let pending = history.pending(end);
    let seed = random.next_u64();
    let kept = |at: usize| Seeded::new(seed ^ (at as u64) << 32).once_in(2);
    let image = history.crash(end, &pending, kept);
    check(&image, &now).map(|_| ()).map_err(|error| format!("in its second life: {error}"))
}

/// Runs the histories with a step of durability left out, if any, and searches their states.
fn search(histories: &[Vec<Step>], skip: Option<Skip>) -> Search {
    // A mutant ends the search, so that it may be longer.
    let states = if skip.is_some() { 300 } else { states_of_each_place() };
    let mut search = Search { states, ..Search::default() };
    let mut random = Seeded::new(11);
    for steps in histories {
        if search.violation.is_some() {
            break;
        }
        let files = Recorder::new(created(), skip);
        if run(&files, steps).is_err() && skip.is_none() {
            search.violation.get_or_insert_with(|| format!("a step fails: {steps:?}"));
        }
        search.history(&files.history(), &mut random);
    }
    search
}

/// Few changes between two syncs, so that all subsets are tried at most places.
fn short_histories() -> Vec<Vec<Step>> {
    vec![
        vec![Put(1, 0), Sync, Put(2, 1), Sync],
        vec![PutRecordFirst(1, 0), Sync, PutRecordFirst(2, 0), Sync],
        vec![Put(1, 0), Put(4, 1), Sync, Remove(vec![1]), Sync, Put(1, 2), Sync],
        vec![Put(1, 0), Sync, Remove(vec![1]), Put(2, 0), Sync, Remove(vec![2])],
        vec![Put(1, 0), Sync, Clear, Put(2, 1), Sync, Clear],
        vec![Put(1, 0), Sync, Clear, Clear],
        vec![Put(1, 0), Sync, Checkpoint(vec![]), Put(2, 1), Sync],
        vec![Put(1, 0), Remove(vec![1]), Sync, Put(2, 0), Sync, Checkpoint(vec![Put(3, 0)]), Sync],
        vec![Put(1, 0), Sync, Checkpoint(vec![Remove(vec![1]), Sync]), Checkpoint(vec![])],
        vec![Put(1, 0), Put(2, 1), Sync, Checkpoint(vec![]), Remove(vec![2]), Sync, Clear],
        vec![Put(1, 0), Sync, Remove(vec![1]), Reopen, Put(2, 0), Sync, Reopen],
        vec![Put(1, 0), Checkpoint(vec![Put(2, 1), Sync]), Reopen, Clear, Reopen],
    ]
}

/// Random steps over a few keys and slots.
fn long_history(seed: u64, steps: usize) -> Vec<Step> {
    let mut random = Seeded::new(seed);
    let mut step = |inner: bool| {
        let key = |random: &mut Seeded| Key::try_from(random.below(12)).unwrap();
        // The last slot stays free, for second lives.
        let slot = u32::try_from(random.below(8)).unwrap();
        match random.below(if inner { 14 } else { 18 }) {
            0..=4 => Put(key(&mut random), slot),
            5..=6 => PutRecordFirst(key(&mut random), slot),
            7..=9 => Remove(vec![key(&mut random), key(&mut random)]),
            10..=13 => Sync,
            14 => Clear,
            15 => Reopen,
            _ => Checkpoint(Vec::new()),
        }
    };
    let steps = (0..steps).map(|_| match step(false) {
        Checkpoint(_) => Checkpoint((0..3).map(|_| step(true)).collect()),
        other => other,
    });
    steps.collect()
}

#[test]
fn every_state_of_short_histories_recovers() {
    let found = search(&short_histories(), None);
    println!("{} states, {} second lives", found.tried.len(), found.second_lives);
    assert_eq!(found.violation, None);
    assert!(found.tried.len() > 1000, "{}", found.tried.len());
}

#[test]
fn random_states_of_long_histories_recover() {
    let histories: Vec<Vec<Step>> = (0..4).map(|seed| long_history(seed, 16)).collect();
    let found = search(&histories, None);
    println!("{} states, {} second lives", found.tried.len(), found.second_lives);
    assert_eq!(found.violation, None);
}

#[test]
fn the_creation_of_a_store_may_crash() {
    let files: Recorder<Note> = Recorder::new(Image::default(), None);
    drop(super::harness::open(&files).unwrap());
    let mut search = Search { states: 100, ..Search::default() };
    search.history(&files.history(), &mut Seeded::new(5));
    println!("{} states", search.tried.len());
    assert_eq!(search.violation, None);
}

#[test]
fn the_checker_finds_a_missing_sync_of_the_slab() {
    let found = search(&short_histories(), Some(Skip::SlabSync));
    assert!(found.violation.unwrap().contains("durable but absent"));
}

#[test]
fn the_checker_finds_a_missing_sync_of_the_directory() {
    let found = search(&short_histories(), Some(Skip::DirectorySync));
    assert!(found.violation.is_some());
}

#[test]
fn the_checker_finds_a_missing_second_superblock() {
    let found = search(&short_histories(), Some(Skip::SecondSuperblock));
    assert!(found.violation.is_some());
}

/// Each changing call fails once, in each history, with each of two errors.
#[test]
fn a_call_that_fails_leaves_what_was_durable() {
    let mut random = Seeded::new(3);
    let mut faults = 0;
    for steps in short_histories() {
        for code in [libc::ENOSPC, libc::EIO] {
            for calls in 0.. {
                let files = Recorder::new(created(), None);
                files.fail_after(calls, code);
                let outcome = run(&files, &steps);
                if files.has_fault() {
                    assert_eq!(outcome, Ok(()), "no call failed");
                    break;
                }
                faults += 1;
                assert!(!files.synced_again(), "a file was synced again: {steps:?}, {calls}");
                let history = files.history();
                let end = history.log.len();
                let now = expected(&history, end);
                for _ in 0..4 {
                    let seed = random.next_u64();
                    let kept = |at: usize| Seeded::new(seed ^ (at as u64) << 32).once_in(2);
                    let image = history.crash(end, &history.pending(end), kept);
                    let checked = check(&image, &now).map(|_| ());
                    assert_eq!(checked, Ok(()), "{steps:?}, call {calls}, error {code}");
                }
            }
        }
    }
    println!("{faults} faults");
    assert!(faults > 300);
}
