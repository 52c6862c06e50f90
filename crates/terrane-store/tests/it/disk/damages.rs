//! Ways to damage the files of a store, each with what is left.

use std::collections::BTreeSet;

use terrane_store::disk::{CatalogError, Recovered};
use terrane_testkit::random::Seeded;

use super::harness::{
    Expected, Key, Note, SLAB, SLOT, Step, check, created, expected, key_bytes, key_of, open, run,
    sum,
};
use super::recorder::{Image, Recorder};
use Step::{Checkpoint, Put, Remove, Sync};

const RECORD: usize = 128;
const JOURNAL: &str = "journal.3";
const CHECKPOINT: &str = "checkpoint.3";

/// The blocks of an undamaged store.
const ALL: &[Key] = &[2, 3, 4, 5, 6, 9];

/// A checkpoint with keys 1, 2, 3 and 4 (two records), and a journal with these records:
/// 0 mark, 1 put 5, 2 mark, 3 removal of 1, 4 mark, 5 put 6, 6 mark, 7 and 8 put 9, 9 mark.
fn store() -> Image {
    let files = Recorder::new(created(), None);
    let steps = [
        Put(1, 0),
        Put(2, 1),
        Put(3, 2),
        Put(4, 3),
        Checkpoint(vec![]),
        Put(5, 4),
        Sync,
        Remove(vec![1]),
        Sync,
        Put(6, 5),
        Sync,
        Put(9, 6),
        Sync,
    ];
    run(&files, &steps).unwrap();
    let history = files.history();
    let now = expected(&history, history.log.len());
    // The blocks before the checkpoint were never synced by the user; here all are on disk.
    assert_eq!(now.must.into_iter().collect::<Vec<_>>(), ALL);
    files.image()
}

/// The blocks that are left of a damaged store.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    readable: Vec<Key>,
    damaged: u64,
    torn: u64,
    dropped: u64,
    repaired: bool,
}

fn left(readable: &[Key], damaged: u64, torn: u64, dropped: u64) -> Left {
    Left { readable: readable.to_vec(), damaged, torn, dropped, repaired: false }
}

fn repaired() -> Left {
    Left { repaired: true, ..left(ALL, 0, 0, 0) }
}

fn readable(image: &Image, recovered: &Recovered) -> Vec<Key> {
    let slab = image.file(SLAB).cloned().unwrap_or_default();
    let is_true = |slot: u32, length: u64, checksum: u64| {
        let from = usize::try_from(u64::from(slot) * SLOT).unwrap();
        let bytes = slab.get(from..from + usize::try_from(length).unwrap());
        bytes.is_some_and(|bytes| sum(bytes) == checksum)
    };
    let live = recovered.live.iter().filter(|live| is_true(live.slot, live.length, live.checksum));
    let keys: BTreeSet<Key> = live.filter_map(|live| key_of(live.key_hash)).collect();
    keys.into_iter().collect()
}

/// Opens a damaged store twice: the second opening finds the same blocks.
fn recover(name: &str, image: &Image) -> Result<Left, CatalogError> {
    let files: Recorder<Note> = Recorder::new(image.clone(), None);
    let (catalog, recovered) = open(&files)?;
    drop(catalog);
    let readable_first = readable(image, &recovered);
    let (_catalog, again) = open(&files).expect("the second opening");
    assert_eq!(readable(image, &again), readable_first, "{name}: the second opening differs");
    assert!(!again.superblock_repaired, "the superblock was not repaired");
    Ok(Left {
        readable: readable_first,
        damaged: recovered.damaged,
        torn: recovered.torn,
        dropped: recovered.dropped,
        repaired: recovered.superblock_repaired,
    })
}

fn remove(image: &mut Image, name: &str) {
    image.names.remove(name).expect("the file is there");
}

fn flip(image: &mut Image, name: &str, at: usize) {
    image.file_mut(name)[at] ^= 0x20;
}

fn flip_record(image: &mut Image, index: usize) {
    flip(image, JOURNAL, index * RECORD + 60);
}

fn set_version(image: &mut Image) {
    for name in ["superblock.a", "superblock.b"] {
        let bytes = image.file_mut(name);
        bytes[8] = 2;
        let sum = sum(&bytes[..4088]);
        bytes[4088..].copy_from_slice(&sum.to_le_bytes());
    }
}

type Damage = fn(&mut Image);

const BOTH: [&str; 2] = ["superblock.a", "superblock.b"];

fn survivable() -> Vec<(&'static str, Damage, Left)> {
    vec![
        ("nothing", |_| {}, left(ALL, 0, 0, 0)),
        ("a put in the journal", |i| flip_record(i, 1), left(&[2, 3, 4, 6, 9], 1, 0, 0)),
        ("a removal: all that is older goes", |i| flip_record(i, 3), left(&[6, 9], 1, 0, 5)),
        ("a mark", |i| flip_record(i, 2), left(ALL, 1, 0, 0)),
        ("the last mark, which was not durable", |i| flip_record(i, 9), left(ALL, 0, 1, 0)),
        (
            "the last mark and a removal",
            |i| [3, 9].into_iter().for_each(|at| flip_record(i, at)),
            left(&[6, 9], 1, 1, 5),
        ),
        ("the rest of a key", |i| flip_record(i, 8), left(ALL, 1, 0, 0)),
        ("the first record of the journal", |i| flip_record(i, 0), left(ALL, 1, 0, 0)),
        (
            "the first sector of the journal",
            |i| i.file_mut(JOURNAL)[..512].fill(0),
            left(&[6, 9], 4, 0, 4),
        ),
        (
            "the journal's end is cut",
            |i| i.file_mut(JOURNAL).truncate(640),
            left(&[2, 3, 4, 5], 0, 0, 0),
        ),
        (
            "the journal is cut within a record",
            |i| i.file_mut(JOURNAL).truncate(700),
            left(&[2, 3, 4, 5], 0, 1, 0),
        ),
        // Removals at the very end of the journal are lost with it: see the format's rules.
        ("the journal is empty", |i| i.file_mut(JOURNAL).clear(), left(&[1, 2, 3, 4], 0, 0, 0)),
        ("the journal is gone", |i| remove(i, JOURNAL), left(&[], 1, 0, 4)),
        ("the checkpoint is gone", |i| remove(i, CHECKPOINT), left(&[5, 6, 9], 0, 0, 0)),
        ("the checkpoint's header", |i| flip(i, CHECKPOINT, 40), left(&[5, 6, 9], 1, 0, 0)),
        ("a checkpoint's block", |i| flip(i, CHECKPOINT, 300), left(&[3, 4, 5, 6, 9], 1, 0, 0)),
        (
            "the checkpoint's end is cut",
            |i| i.file_mut(CHECKPOINT).truncate(3 * RECORD),
            left(&[2, 5, 6, 9], 3, 0, 0),
        ),
        ("the checkpoint is empty", |i| i.file_mut(CHECKPOINT).clear(), left(&[5, 6, 9], 1, 0, 0)),
        (
            "the journal holds the checkpoint",
            |i| *i.file_mut(JOURNAL) = i.file(CHECKPOINT).unwrap().clone(),
            left(&[], 7, 0, 4),
        ),
        ("the first superblock", |i| flip(i, BOTH[0], 100), repaired()),
        ("the second superblock is gone", |i| remove(i, BOTH[1]), repaired()),
        ("the first superblock is zeros", |i| i.file_mut(BOTH[0]).fill(0), repaired()),
        ("the second superblock is cut", |i| i.file_mut(BOTH[1]).truncate(100), repaired()),
        ("the first superblock is foreign", |i| i.file_mut(BOTH[0]).fill(0x55), repaired()),
        (
            "a sector of the journal holds another",
            |i| i.file_mut(JOURNAL).copy_within(512..1024, 0),
            left(&[6, 9], 4, 0, 4),
        ),
        (
            "the journal a second time",
            |i| {
                let copy = i.file(JOURNAL).unwrap().clone();
                i.insert("journal.4", copy);
            },
            left(ALL, 10, 0, 0),
        ),
        (
            "the journal is shifted",
            |i| drop(i.file_mut(JOURNAL).splice(..0, [0; 512])),
            left(&[], 15, 0, 4),
        ),
        (
            "other files",
            |i| {
                i.insert("journal.x", vec![1; 300]);
                i.insert("notes.txt", vec![1; 300]);
            },
            left(ALL, 0, 0, 0),
        ),
        (
            "an unfinished checkpoint",
            |i| i.insert("checkpoint.4.new", vec![1; 300]),
            left(ALL, 0, 0, 0),
        ),
        (
            "a journal from before the checkpoint",
            |i| {
                let copy = i.file(JOURNAL).unwrap().clone();
                i.insert("journal.2", copy);
            },
            left(ALL, 0, 0, 0),
        ),
        (
            "other bytes after the journal",
            |i| i.file_mut(JOURNAL).extend([0xa5; 1000]),
            left(ALL, 0, 8, 0),
        ),
        (
            "a slot of zeros",
            |i| i.file_mut(SLAB)[1024..2048].fill(0),
            left(&[3, 4, 5, 6, 9], 0, 0, 0),
        ),
        (
            "a slot with the block of another",
            |i| i.file_mut(SLAB).copy_within(1024..2048, 2048),
            left(&[2, 4, 5, 6, 9], 0, 0, 0),
        ),
        ("the slab is gone", |i| remove(i, SLAB), left(&[], 0, 0, 0)),
    ]
}

#[test]
fn each_damage_leaves_what_it_must() {
    let cases = survivable();
    assert!(cases.len() >= 30, "{}", cases.len());
    let whole = store();
    for (name, damage, expected) in cases {
        let mut image = whole.clone();
        damage(&mut image);
        let found = recover(name, &image).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found, expected, "{name}");
    }
}

/// The number of removals after the opening includes the lost one and those that no mark counts.
#[test]
fn a_lost_removal_stays_lost_after_later_removals() {
    let files = Recorder::new(created(), None);
    let steps = [Put(1, 0), Sync, Remove(vec![1]), Sync, Put(2, 1), Remove(vec![2])];
    run(&files, &steps).unwrap();
    let mut image = files.image();
    flip(&mut image, "journal.2", 3 * RECORD + 60);
    let found = recover("a removal before another", &image).unwrap();
    assert_eq!(found, left(&[], 1, 0, 1));
}

#[test]
fn unusable_superblocks_are_typed_errors() {
    type Judge = fn(&CatalogError) -> bool;
    let cases: [(&str, Damage, Judge); 5] = [
        (
            "both damaged",
            |i| BOTH.iter().for_each(|name| flip(i, name, 100)),
            |e| matches!(e, CatalogError::SuperblockDamaged { file, .. } if file == CHECKPOINT),
        ),
        (
            "both gone",
            |i| BOTH.iter().for_each(|name| remove(i, name)),
            |e| matches!(e, CatalogError::SuperblockDamaged { .. }),
        ),
        (
            "both empty",
            |i| BOTH.iter().for_each(|name| i.file_mut(name).clear()),
            |e| matches!(e, CatalogError::SuperblockDamaged { .. }),
        ),
        (
            "foreign",
            |i| BOTH.iter().for_each(|name| i.file_mut(name).fill(0x55)),
            |e| matches!(e, CatalogError::ForeignSuperblock { .. }),
        ),
        ("another version", set_version, |e| {
            matches!(e, CatalogError::UnsupportedVersion { found: 2, supported: 1, .. })
        }),
    ];
    for (name, damage, judge) in cases {
        let mut image = store();
        damage(&mut image);
        let error = recover(name, &image).unwrap_err();
        assert!(judge(&error), "{name}: {error}");
    }
}

#[test]
fn a_key_whose_rest_is_damaged_is_known_by_its_hash() {
    let mut image = store();
    let key = |image: &Image| {
        let files: Recorder<Note> = Recorder::new(image.clone(), None);
        let (_catalog, recovered) = open(&files).unwrap();
        let live = recovered.live.into_iter().find(|live| key_of(live.key_hash) == Some(9));
        live.unwrap().key
    };
    assert_eq!(key(&image).unwrap(), key_bytes(9).into());
    flip_record(&mut image, 8);
    assert_eq!(key(&image), None);
}

/// Any bytes: no panic, and every block that can be read is right.
#[test]
fn random_bytes_never_give_wrong_blocks() {
    let whole = store();
    let may: BTreeSet<Key> = (1..10).collect();
    let expected = Expected { must: BTreeSet::new(), may };
    let mut random = Seeded::new(77);
    let mut opened = 0;
    for _ in 0..1500 {
        let mut image = whole.clone();
        for _ in 0..=random.below(3) {
            let names: Vec<String> = image.names.keys().cloned().collect();
            let name = names[random.below(names.len())].clone();
            damage(image.file_mut(&name), &mut random);
        }
        match check(&image, &expected) {
            Ok(_) => opened += 1,
            Err(error) => assert!(error.starts_with("does not open"), "{error}"),
        }
    }
    assert!(opened > 700, "{opened}");
}

fn damage(bytes: &mut Vec<u8>, random: &mut Seeded) {
    let length = bytes.len();
    let at = random.below(length.max(1));
    match random.below(6) {
        0 => bytes.truncate(at),
        1 => (0..random.below(300)).for_each(|_| bytes.push(random.next_u64().to_le_bytes()[0])),
        2 => bytes.iter_mut().skip(at).take(512).for_each(|byte| *byte = 0),
        3 => bytes.iter_mut().for_each(|byte| *byte = random.next_u64().to_le_bytes()[0]),
        4 if length > 0 => drop(bytes.drain(at..length.min(at + random.below(200) + 1))),
        _ if length > 0 => bytes[at] ^= 1 << random.below(8),
        _ => {}
    }
}
