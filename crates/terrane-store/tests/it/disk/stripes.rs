//! The creation of a striped store: crashes and failures at each step.

use std::path::Path;
use std::sync::Arc;

use terrane_core::Alignment;
use terrane_store::disk::{
    Catalog, CatalogError, CatalogOptions, Files, FoundStripe, OpenMode, Recovered, Stripes,
};
use terrane_testkit::random::Seeded;

use super::harness::{Note, groups, namespace};
use super::history::Image;
use super::recorder::Recorder;

/// The file of the second directory, and a slab file there.
const STRIPE: &str = "stripe.001";
const SLAB: &str = "slab.0.001";

fn open(
    first: &Recorder<Note>,
    second: &Recorder<Note>,
) -> Result<(Catalog, Recovered), CatalogError> {
    let stripes =
        Stripes::new(Alignment::PAGE).also_in(Arc::new(second.clone()), Path::new("second"));
    let (namespace, groups, options) = (namespace(), groups(), CatalogOptions::default());
    let first = Arc::new(first.clone());
    Catalog::open_striped(first, Path::new("first"), &namespace, &groups, options, &stripes)
}

/// Opens the store and creates its slab file in the second directory, as a user of the catalog does.
fn use_store(first: &Recorder<Note>, second: &Recorder<Note>) -> Result<(), CatalogError> {
    let opened = open(first, second)?;
    drop(second.open(SLAB, OpenMode::Create).unwrap());
    second.sync_directory().unwrap();
    drop(opened);
    Ok(())
}

fn files(image: Image) -> Recorder<Note> {
    Recorder::new(image, None)
}

/// One folder is both directories, so that one log has all changes in their order.
#[test]
fn the_creation_of_a_striped_store_may_crash() {
    let both = files(Image::default());
    use_store(&both, &both).unwrap();
    let (history, mut random, mut tried) = (both.history(), Seeded::new(17), 0);
    for end in 0..=history.log.len() {
        let pending = history.pending(end);
        let is_short = pending.len() <= 12;
        let rounds = if is_short { 1_u32 << pending.len() } else { 300 };
        for round in 0..rounds {
            let seed = random.next_u64();
            let kept = |at: usize| match is_short {
                true => round >> at & 1 == 1,
                false => Seeded::new(seed ^ (at as u64) << 32).once_in(2),
            };
            let again = files(history.crash(end, &pending, kept));
            use_store(&again, &again).unwrap_or_else(|error| panic!("after {end}: {error}"));
            // The second opening crashes, too.
            let second = again.history();
            let at = random.below(second.log.len() + 1);
            let lost = second.pending(at);
            let kept = |at: usize| Seeded::new(!seed ^ (at as u64) << 32).once_in(2);
            let third = files(second.crash(at, &lost, kept));
            use_store(&third, &third).unwrap_or_else(|error| panic!("after {end}, {at}: {error}"));
            tried += 1;
        }
    }
    assert!(tried > 1000, "{tried}");
}

#[test]
fn a_creation_that_fails_is_repeated() {
    for calls in 0.. {
        let [first, second] = [(); 2].map(|()| files(Image::default()));
        first.fail_after(calls, libc::EIO);
        let outcome = open(&first, &second).map(|_| ());
        if first.has_fault() {
            assert!(calls > 4, "{calls} calls");
            break;
        }
        let superblocks = ["superblock.a", "superblock.b"];
        if superblocks.iter().any(|name| first.image().file(name).is_some()) {
            // It was durable before the first superblock was created.
            let history = second.history();
            let last = history.log.len();
            assert!(second.image().file(STRIPE).is_some());
            assert_eq!(history.pending(last), []);
        }
        drop(outcome);
        use_store(&first, &second).unwrap_or_else(|error| panic!("after call {calls}: {error}"));
    }
    for calls in 0.. {
        let [first, second] = [(); 2].map(|()| files(Image::default()));
        second.fail_after(calls, libc::ENOSPC);
        let outcome = open(&first, &second);
        if second.has_fault() {
            assert_eq!(calls, 4, "create, write, and a sync of the file and of its name");
            break;
        }
        assert!(matches!(outcome.unwrap_err(), CatalogError::NoSpace { .. }));
        assert!(first.image().file("superblock.a").is_none());
        use_store(&first, &second).unwrap();
    }
}

#[test]
fn damage_of_a_stripe_file_is_a_typed_error() {
    let [first, second] = [(); 2].map(|()| files(Image::default()));
    use_store(&first, &second).unwrap();
    let whole = second.image();
    let length = whole.file(STRIPE).unwrap().len();
    for at in 0..=length {
        let mut image = whole.clone();
        match image.file_mut(STRIPE) {
            bytes if at < length => bytes[at] ^= 1,
            bytes => bytes.truncate(length - 1),
        }
        let second = files(image.clone());
        let error = open(&first, &second).unwrap_err();
        let CatalogError::StripeDiffers { index: 1, found, .. } = &error else { panic!("{error}") };
        assert_eq!(*found, FoundStripe::Damaged { file: STRIPE.into() }, "{at}");
        // A creation does not replace it either: it may be of another store.
        assert!(open(&files(Image::default()), &second).is_err());
        assert_eq!(second.image().file(STRIPE), image.file(STRIPE));
    }
    open(&first, &files(whole)).unwrap();
}
