//! Drops during a transfer: of the agent, the engine, either end, and the completion, in any order.

use std::any::Any;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use terrane_core::{AgentName, Memory};
use terrane_nixl::{AgentBuilder, NixlEngine, NixlEngineOptions, NixlError};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_testkit::permutations::{self, permutation};
use terrane_transfer::{Endpoint, Transfer, TransferManager, WeakEndpoint};

use super::support::*;
use crate::support::posix;

const TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn a_transfer_completes_in_any_order_of_drops() {
    let there = agent();
    let target = registered(&HeapAllocator::system(), &there, config(64), CONTIGUOUS);
    let export = there.export(&target).unwrap();
    let target = Endpoint::new(target).unwrap();
    let (all, back): (Vec<u32>, Vec<u32>) = (0..64).map(|id| (id, 63 - id)).unzip();
    for number in 0..120 {
        let here = AgentBuilder::unnamed().backend(terrane_nixl::BackendConfig::new("UCX"));
        let here = here.build().unwrap();
        let name = here.name().clone();
        let remote = here.import(&export).unwrap();
        // Blocks that are one run each, or as many as they have pieces, from prepared lists.
        let kind = if number % 2 == 0 { CONTIGUOUS } else { APART };
        let local = registered(&HeapAllocator::system(), &here, config(64), kind);
        let local = Endpoint::new(local).unwrap();
        let image = Image::scribble(&local, &InProcess, number);
        let mut expected = Image::of(&target, &InProcess);
        expected.transfer(&image, &all, &back, 0..2);
        let options = NixlEngineOptions { prepare_threshold: 0, ..NixlEngineOptions::default() };
        let engine = NixlEngine::new(&here, options).unwrap();
        let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
        let write = Transfer::new(&local, remote.endpoint()).blocks(&all, &back);
        let weak = local.downgrade();
        let completion = manager.submit(write.notify(*b"all"), ()).unwrap();

        let mut things: [Option<Box<dyn Any>>; 5] = [
            Some(Box::new(here)),
            Some(Box::new(manager)),
            Some(Box::new(remote)),
            Some(Box::new(local)),
            Some(Box::new(completion)),
        ];
        for place in permutation(usize::try_from(number).unwrap(), 5) {
            drop(things[place].take());
        }

        let notifications = there.wait_for_notifications(Instant::now() + TIMEOUT).unwrap();
        let [notification] = notifications.as_slice() else {
            panic!("{notifications:?} in order {number}")
        };
        assert_eq!((&notification.from, notification.message.as_slice()), (&name, &b"all"[..]));
        let what = format!("in order {number}");
        Image::of(&target, &InProcess).assert_equals(&expected, &what);
        // Then nothing remains: neither memory nor agent.
        wait_for_the_name(&name, &what);
        assert!(weak.has_gone(), "{what}");
    }
}

/// Waits until the agent and all of its registrations have been dropped.
#[track_caller]
fn wait_for_the_name(name: &AgentName, what: &str) {
    let begun = Instant::now();
    while let Err(error) = AgentBuilder::new(name.clone()).build() {
        assert!(matches!(error, NixlError::NameTaken { .. }), "{error}");
        assert!(begun.elapsed() < TIMEOUT, "{what} the agent lives on");
        std::thread::yield_now();
    }
}

/// The file is open while the transfer is in flight, and closed afterwards.
#[test]
fn a_transfer_to_a_file_completes_in_any_order_of_drops() {
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let all: Vec<u32> = (0..64).collect();
    permutations::for_each(5, |number, order| {
        let here = AgentBuilder::unnamed().backend(posix()).build().unwrap();
        let name = here.name().clone();
        let end = |layout| Endpoint::new(layout).unwrap();
        let local = end(registered(&HeapAllocator::system(), &here, config(64), CONTIGUOUS));
        let file = end(registered(&files, &here, config(64), CONTIGUOUS));
        Image::scribble(&local, &InProcess, u64::try_from(number).unwrap());
        // Both have the same layout, so the file's bytes equal those of the memory.
        let region = &local.layout().regions()[0];
        let mut expected = vec![0; region.length().to_usize()];
        // SAFETY: the memory is alive, and no thread writes to it.
        unsafe { InProcess.read(region.location(), &mut expected) }.unwrap();
        // The file, opened a second time.
        let descriptor = file.layout().regions()[0].location().as_file().unwrap().file.descriptor;
        let path = format!("/proc/self/fd/{descriptor}");
        let (mut opened, mut found) = (File::open(path).unwrap(), Vec::new());

        let engine = NixlEngine::new(&here, NixlEngineOptions::default()).unwrap();
        let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
        let write = Transfer::new(&local, &file).blocks(&all, &all);
        let weak = [local.downgrade(), file.downgrade()];
        let completion = manager.submit(write, ()).unwrap();
        let mut things: [Option<Box<dyn Any>>; 5] = [
            Some(Box::new(here)),
            Some(Box::new(manager)),
            Some(Box::new(file)),
            Some(Box::new(local)),
            Some(Box::new(completion)),
        ];
        for &place in order {
            drop(things[place].take());
        }

        let what = format!("in order {number}");
        wait_for_the_name(&name, &what);
        opened.read_to_end(&mut found).unwrap();
        assert!(found == expected, "{what} the file is not what the memory was");
        assert!(weak.iter().all(WeakEndpoint::has_gone), "{what}");
        assert_eq!(descriptors_of(&opened), 1, "{what} the file is not closed");
    });
}

/// The number of this process's descriptors of a file.
fn descriptors_of(file: &File) -> usize {
    let file = file.metadata().unwrap();
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    // Other descriptors are opened and closed concurrently.
    let open = entries.filter_map(|entry| std::fs::metadata(entry.ok()?.path()).ok());
    open.filter(|open| (open.dev(), open.ino()) == (file.dev(), file.ino())).count()
}
