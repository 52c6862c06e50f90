//! Damages, kills, forks, and what else goes wrong.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrane_core::{ByteCount, Requirement};
use terrane_store::disk::CatalogError;
use terrane_store::{
    BlockResult, CompletionQueue, JobOptions, KeyName, Presence, Store, StoreError, StoreEventKind,
    TierId, Why, WritePolicy, tools,
};
use terrane_testkit::events::AtEvents;
use terrane_testkit::mounted::tmpfs;
use terrane_testkit::needs::or_skipped;
use terrane_testkit::process::in_child;
use terrane_testkit::random::Seeded;
use tracing::{Event, Level};

use super::harness::{
    assert_at_rest, builder, damage_byte, disk, found, get, key, keys, open, put, put_ok, soon,
    submit_put,
};

const BLOCK: usize = 8192;

/// Damages one byte of the block of a key.
fn damage(directory: &Path, number: usize) {
    damage_byte(directory, number, 8192, 5000);
}

#[test]
fn a_damaged_block_costs_one_block() {
    let directory = tempfile::tempdir().unwrap();
    let store = builder(directory.path(), 8192, 16).keep_keys(true).open().unwrap().0;
    let events = store.events(100).unwrap();
    put_ok(&store, &keys(0..4), BLOCK);
    damage(directory.path(), 2);
    let (outcome, _) = get(&store, &keys(0..4), BLOCK, JobOptions::new());
    let corrupt: Vec<bool> =
        outcome.results.iter().map(|result| matches!(result, BlockResult::Corrupt)).collect();
    assert_eq!(corrupt, [false, false, true, false], "{outcome:?}");
    assert_eq!(store.why(0, &key(2)), Why::Corrupt);
    let mut taken = Vec::new();
    assert_eq!(events.take_all(&mut taken), 5);
    assert_eq!(taken[4].kind, StoreEventKind::Corrupt);
    assert_eq!(taken[4].key, Some(KeyName::Bytes(key(2).into())));
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true, true, false, true]);
    assert_eq!(store.snapshot().misses.corrupt, 1);
    put_ok(&store, &keys(2..3), BLOCK);
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true; 4]);
    assert_at_rest(&store);
}

#[test]
fn a_damaged_block_is_not_promoted() {
    let directory = tempfile::tempdir().unwrap();
    drop({
        let store = open(directory.path(), 8192, 16);
        put_ok(&store, &keys(0..3), BLOCK);
        store
    });
    let (store, _) = builder(directory.path(), 8192, 16).host(ByteCount::kib(64)).open().unwrap();
    damage(directory.path(), 1);
    let outcome = store.promote(&keys(0..3), TierId::new(0), JobOptions::new()).unwrap().wait();
    assert!(matches!(outcome.results[1], BlockResult::Corrupt), "{outcome:?}");
    assert_eq!(found(&store, &keys(0..3), BLOCK), [true, false, true]);
    assert_at_rest(&store);
}

#[test]
fn tools_report_a_live_store_and_scrub_a_closed_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let directories = [path.to_owned()];
    let store = open(path, 8192, 16);
    put_ok(&store, &keys(0..5), BLOCK);
    assert!(store.remove(0, &keys(4..5)).unwrap().wait().is_ok());
    let listing = tools::list(path, "model").unwrap();
    assert_eq!(listing.blocks.len(), 4);
    assert!(listing.as_of >= 6, "{}", listing.as_of);
    assert_eq!(listing.owner.unwrap().process, std::process::id());
    let names: Vec<String> = listing.blocks.iter().map(|block| block.key.to_string()).collect();
    assert!(names.contains(&String::from("0x7072656669782030")), "{names:?}");
    let stat = tools::stat(path, "model").unwrap();
    assert!(stat.is_open);
    assert_eq!((stat.groups[0].blocks, stat.groups[0].bytes.get()), (4, 4 * 8192));
    assert!(tools::why(path, "model", 0, &key(4)).unwrap().1.is_none());
    damage(path, 3);
    let report = tools::verify(&directories, "model", None).unwrap();
    assert_eq!((report.blocks, report.damaged.len()), (4, 1));
    assert_eq!(report.damaged[0].key, KeyName::Bytes(key(3).into()));
    for refused in
        [tools::scrub(&directories, "model", None).map(|_| ()), tools::clear(path, "model")]
    {
        let error = refused.unwrap_err();
        assert!(matches!(error, StoreError::Catalog(CatalogError::Owned { .. })), "{error}");
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    }
    drop(store);
    assert!(!tools::stat(path, "model").unwrap().is_open);
    let rate = Some(ByteCount::mib(1));
    let report = tools::scrub(&directories, "model", rate).unwrap();
    assert_eq!(report.damaged.len(), 1);
    assert!(report.took >= Duration::from_millis(30), "{:?}", report.took);
    assert_eq!(tools::list(path, "model").unwrap().blocks.len(), 3);
    tools::clear(path, "model").unwrap();
    assert!(tools::list(path, "model").unwrap().blocks.is_empty());
    assert!(matches!(
        tools::list(path, "other").unwrap_err(),
        StoreError::Catalog(CatalogError::NotFound { .. })
    ));
    assert!(!path.join("other").exists());
    let store = open(path, 8192, 16);
    assert_eq!(found(&store, &keys(0..5), BLOCK), [false; 5]);
}

const DIRECTORY: &str = "TERRANE_STORE_CHILD_IN";
const SEED: &str = "TERRANE_STORE_CHILD_SEED";
const TEST: &str = "store::faults::a_killed_store_has_what_was_durable_and_no_wrong_byte";

/// The processes that are killed. Raise it for a longer search.
#[expect(clippy::disallowed_methods, reason = "a longer search is asked for")]
fn kills() -> u64 {
    std::env::var("TERRANE_STORE_STORE_KILLS").map_or(20, |count| count.parse().unwrap())
}

fn child_store(directory: &Path, seed: u64) -> Store {
    let policy = if seed.is_multiple_of(2) { WritePolicy::Through } else { WritePolicy::Back };
    let builder = builder(directory, 8192, 40).host(ByteCount::kib(64));
    builder.write_policy(policy).open().unwrap().0
}

/// Puts, removes and gets until it is killed. It prints what is durable.
fn work_until_killed(directory: &Path, seed: u64) -> ! {
    // SAFETY: the call takes plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let store = child_store(directory, seed);
    println!("\nopened");
    let mut out = std::io::stdout();
    let mut say = |text: String| {
        out.write_all(text.as_bytes()).unwrap();
        out.flush().unwrap();
    };
    let mut random = Seeded::new(seed);
    loop {
        let number = random.below(30);
        let keys = [key(number)];
        match random.below(8) {
            0..=3 => {
                say(format!("puts {number} .\n"));
                drop(submit_put(&store, &keys, BLOCK, JobOptions::new()).wait());
            }
            4 | 5 => {
                say(format!("puts {number} .\n"));
                let job = submit_put(&store, &keys, BLOCK, JobOptions::new().durable(true));
                if job.wait().is_ok() {
                    say(format!("durable {number} .\n"));
                }
            }
            6 => {
                say(format!("removes {number} .\n"));
                if store.remove(0, &keys).unwrap().wait().results[0].is_ok() {
                    say(format!("removed {number} .\n"));
                }
            }
            _ => drop(found(&store, &keys, BLOCK)),
        }
    }
}

#[test]
fn a_killed_store_has_what_was_durable_and_no_wrong_byte() {
    #[expect(clippy::disallowed_methods, reason = "the child is told where to write")]
    if let (Some(directory), Ok(seed)) = (std::env::var_os(DIRECTORY), std::env::var(SEED)) {
        work_until_killed(Path::new(&directory), seed.parse().unwrap());
    }
    let directory = tempfile::tempdir().unwrap();
    let mut random = Seeded::new(5);
    let (mut durable, mut killed) = (0, 0);
    // If syncs are slow, more processes are killed, and later, until a block was durable before a kill.
    while killed < kills() || (durable == 0 && killed < kills() + 50) {
        let (seed, later) = (killed, 40 * killed.saturating_sub(kills()));
        killed += 1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
            .env(DIRECTORY, directory.path())
            .env(SEED, seed.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let opened = lines.by_ref().map(Result::unwrap).find(|line| line.contains("opened"));
        assert!(opened.is_some(), "the child does not open the store");
        let error = builder(directory.path(), 8192, 40).open().unwrap_err();
        assert!(error.to_string().contains(&child.id().to_string()), "{error}");
        thread::sleep(Duration::from_millis(later + u64::try_from(random.below(40)).unwrap()));
        child.kill().unwrap();
        child.wait().unwrap();
        // The last word about each key.
        let mut last: Vec<Option<String>> = vec![None; 30];
        for line in lines.map_while(Result::ok) {
            let Some(line) = line.strip_suffix(" .") else { continue };
            let (word, number) = line.split_once(' ').unwrap();
            last[number.parse::<usize>().unwrap()] = Some(word.to_owned());
        }
        let store = child_store(directory.path(), seed);
        for (number, last) in last.iter().enumerate() {
            // `found` checks each byte.
            let is_found = found(&store, &keys(number..number + 1), BLOCK) == [true];
            match last.as_deref() {
                Some("durable") => {
                    assert!(is_found, "kill {seed}: {number} was durable");
                    durable += 1;
                }
                Some("removed") => assert!(!is_found, "kill {seed}: {number} was removed"),
                _ => {}
            }
        }
        assert_at_rest(&store);
    }
    println!("{durable} durable blocks after {killed} kills");
    assert!(durable > 0, "no block was durable before one of {killed} kills");
}

#[test]
fn a_forked_child_gets_errors_and_leaves_the_store_alone() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 8192, 16);
    put_ok(&store, &keys(0..3), BLOCK);
    let job = submit_put(&store, &keys(3..4), BLOCK, JobOptions::new());
    let queue = CompletionQueue::new(2).unwrap();
    queue.reserve().unwrap().deliver(());
    let lease = store.acquire(0, &keys(0..3), Duration::from_secs(600));
    // SAFETY: the child calls methods that take no lock of another thread, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut presence = [Presence::Writing; 3];
        let keys = keys(0..3);
        store.presence(0, &keys, &mut presence);
        let is_right = matches!(store.sync(), Err(StoreError::Forked(_)))
            && presence == [Presence::Absent; 3]
            && store.prefix(0, &keys) == 0
            && matches!(store.remove(0, &keys), Err(StoreError::Forked(_)))
            && job.has_ended()
            && matches!(job.wait().results[..], [BlockResult::Failed(_)])
            && store.close(soon()).left == 0
            && queue.try_take().is_none()
            && queue.take_all(&mut Vec::new()) == 0
            && queue.reserve().is_err()
            && lease.pinned() == 0;
        drop((lease, queue));
        drop(store);
        // SAFETY: it ends the child without the parent's destructors.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = 0;
    // SAFETY: `status` is a live number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    let mut polled = [PollFd::new(&queue, PollFlags::IN)];
    assert_eq!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap(), 1);
    assert_eq!((queue.try_take(), lease.pinned()), (Some(()), 3));
    drop(lease);
    assert!(job.wait().is_ok());
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true; 4]);
    assert_at_rest(&store);
}

#[test]
fn a_queue_that_no_thread_drains_keeps_no_job_from_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 8192, 16);
    let queue = CompletionQueue::new(3).unwrap();
    for number in 0..3 {
        let options = JobOptions::new().queue(&queue, 1);
        drop(submit_put(&store, &[key(number)], BLOCK, options));
    }
    assert_at_rest(&store);
    assert_eq!(queue.len(), 3);
    assert_eq!(found(&store, &keys(0..3), BLOCK), [true; 3]);
    assert_eq!(store.close(soon()).left, 0);
}

#[test]
fn a_clear_beside_running_jobs_leaves_nothing_of_before() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = builder(directory.path(), 8192, 60).host(ByteCount::kib(128)).open().unwrap();
    for round in 0..10_usize {
        let before = keys(round * 100..round * 100 + 20);
        let jobs: Vec<_> = before
            .chunks(2)
            .map(|keys| submit_put(&store, keys, BLOCK, JobOptions::new()))
            .collect();
        let cleared = store.clear().unwrap().wait();
        assert!(cleared.is_ok(), "{cleared:?}");
        for job in jobs {
            let outcome = job.wait();
            assert!(outcome.is_ok(), "{outcome:?}");
        }
        assert_eq!(store.prefix(0, &before), 0);
        assert_eq!(found(&store, &before, BLOCK), [false; 20]);
        let after = keys(round * 100 + 50..round * 100 + 53);
        put_ok(&store, &after, BLOCK);
        assert_eq!(store.prefix(0, &after), 3);
        assert_at_rest(&store);
    }
    drop(store);
    let (store, recovery) =
        builder(directory.path(), 8192, 60).host(ByteCount::kib(128)).open().unwrap();
    assert_eq!(recovery.found, 3);
    assert_eq!(found(&store, &keys(950..953), BLOCK), [true; 3]);
}

#[test]
fn a_journal_without_space_costs_no_block() {
    const TEST: &str = "store::faults::a_journal_without_space_costs_no_block";
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let mounted = tmpfs(directory.path(), 2 << 20).map_err(Into::into);
        let Some(_mounted) = or_skipped(TEST, mounted) else { return };
        let tier = disk(directory.path(), 8 * 8192).preallocate(Requirement::Required);
        let store = builder(directory.path(), 8192, 8).disk(tier).open().unwrap().0;
        let events = store.events(10_000).unwrap();
        let mut filler = File::create(directory.path().join("filler")).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
        let failed =
            (0..1000).find(|&number| !put(&store, &keys(number..number + 1), BLOCK).is_ok());
        let failed = failed.unwrap();
        assert!(store.snapshot().tiers[0].read_only.is_some());
        let mut taken = Vec::new();
        events.take_all(&mut taken);
        let reported = taken.iter().filter(|event| event.kind == StoreEventKind::TierReadOnly);
        assert_eq!(reported.count(), 1);
        // The put that failed evicted one block. Later ones evict none.
        for number in 2000..2020 {
            assert!(!put(&store, &keys(number..number + 1), BLOCK).is_ok());
        }
        let kept = keys(failed.saturating_sub(7)..failed);
        assert_eq!(found(&store, &kept, BLOCK), vec![true; kept.len()]);
        assert_at_rest(&store);
    });
}

/// The store, and the warnings while it was there.
static WARNED: (OnceLock<Store>, AtomicUsize) = (OnceLock::new(), AtomicUsize::new(0));

/// Uses the store in each of its warnings.
fn use_store(event: &Event<'_>) {
    if *event.metadata().level() <= Level::WARN
        && let Some(store) = WARNED.0.get()
    {
        assert!(store.snapshot().tiers[0].read_only.is_some());
        store.resize(TierId::new(0), ByteCount::new(8 * 8192)).unwrap();
        assert!(!put(store, &keys(500..501), BLOCK).is_ok());
        WARNED.1.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_subscriber_may_use_the_store_when_its_disk_tier_becomes_read_only() {
    const TEST: &str =
        "store::faults::a_subscriber_may_use_the_store_when_its_disk_tier_becomes_read_only";
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path(), 8192, 8);
        // The longest file has room for the slots, and not for the records of many long keys.
        let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
        // SAFETY: the call takes numbers.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        // SAFETY: the limit outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        tracing::subscriber::set_global_default(AtEvents::any(use_store)).unwrap();
        assert!(WARNED.0.set(store.clone()).is_ok());
        let long = |number: usize| [vec![7; 60_000], key(number)].concat();
        let failed = (0..100).find(|&number| !put(&store, &[long(number)], BLOCK).is_ok());
        assert!(failed.is_some_and(|failed| failed > 1), "{failed:?}");
        assert_at_rest(&store);
        assert_eq!(WARNED.1.load(Ordering::SeqCst), 1);
    });
}
