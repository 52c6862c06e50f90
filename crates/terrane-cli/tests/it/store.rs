//! A store's directory, with and without a process that has it open.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::ptr::NonNull;

use terrane_core::ByteCount;
use terrane_store::disk::Namespace;
use terrane_store::{BlockGroup, Blocks, DiskTier, JobOptions, Spans, Store};
use terrane_testkit::needs::or_skipped;
use terrane_testkit::process::forbid;

use crate::schemas::check;
use crate::support::{json, refused, run, text};

const BLOCK: usize = 8192;

/// Opens a store in its directory.
pub fn open(directory: &Path, name: &str) -> Store {
    fs::create_dir_all(directory).unwrap();
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).unwrap();
    let namespace = Namespace::new(name, [("model", "llama-3.1-8b"), ("rank", "0")]).unwrap();
    let builder = Store::builder()
        .group(BlockGroup::new("kv", u32::try_from(BLOCK).unwrap()))
        .disk(DiskTier::new(directory, ByteCount::kib(256)))
        .namespace(namespace)
        .keep_keys(true);
    builder.open().unwrap().0
}

/// Stores a block durably.
pub fn put(store: &Store, key: &str, byte: u8) {
    let mut block = vec![byte; BLOCK];
    let mut spans = Spans::new();
    spans.add(NonNull::from(&mut block[..]).cast(), block.len());
    // SAFETY: the job's guard owns the bytes, and no other code uses them.
    let source = unsafe { Blocks::spans(spans) };
    let outcome = store.put(&[key], source, JobOptions::new().durable(true), block).unwrap().wait();
    assert!(outcome.is_ok(), "{outcome:?}");
}

#[test]
fn blocks_are_listed_and_found_while_their_writer_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let store = open(folder.path(), "llama");
    put(&store, "prefix-1", 1);
    put(&store, "prefix-2", 2);
    let list = json(&["store", "ls", path, "--json"]);
    let keys: Vec<&str> = list["blocks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|block| block["key"].as_str().unwrap())
        .collect();
    assert_eq!((keys, &list["all"]), (vec!["prefix-1", "prefix-2"], &2.into()));
    assert!(text(&["store", "ls", path]).contains("2 of 2 blocks"));
    assert!(text(&["store", "why", path, "prefix-2"]).starts_with("stored in slot"));
    assert!(text(&["store", "why", path, "0x7072656669782d31"]).contains("8,192 bytes"));
    assert!(text(&["store", "why", path, "prefix-3"]).starts_with("not stored in group 0"));

    let stat = json(&["store", "stat", path, "--json"]);
    assert_eq!((&stat["is_open"], &stat["groups"][0]["blocks"]), (&true.into(), &2.into()));
    assert_eq!(stat["fields"]["model"], "llama-3.1-8b");
    let human = text(&["store", "stat", path]);
    assert!(human.contains("open in process") && human.contains("model: llama-3.1-8b"), "{human}");
    // Another process cannot change an open store.
    for command in ["scrub", "clear"] {
        let mut arguments = vec!["store", command, path];
        arguments.extend((command == "clear").then_some("--yes"));
        let (error, status) = refused(&arguments);
        assert_eq!((error.lines().count(), status), (1, 1), "{error}");
        assert!(error.contains("is owned by process"), "{error}");
    }
    drop(store);
    assert_eq!(json(&["store", "stat", path, "--json"])["is_open"], false);
}

#[test]
fn damage_is_found_removed_and_reported_by_the_status() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let store = open(folder.path(), "llama");
    for number in 1..=4 {
        put(&store, &format!("prefix-{number}"), number);
    }
    drop(store);
    assert!(text(&["store", "verify", path]).contains("verified 4 blocks, 32 KiB"));
    // A byte of the block that is filled with the value three.
    let slab = fs::read_dir(folder.path().join("llama")).unwrap().map(|file| file.unwrap().path());
    let slab = slab
        .into_iter()
        .find(|file| file.file_name().unwrap().to_str().unwrap().starts_with("slab"))
        .unwrap();
    let mut file = fs::OpenOptions::new().read(true).write(true).open(slab).unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    let at = bytes.windows(64).position(|window| window == [3; 64]).unwrap();
    file.seek(SeekFrom::Start(at as u64 + 7)).unwrap();
    file.write_all(&[99]).unwrap();
    drop(file);

    let output = run(&["store", "verify", path]);
    let text_of = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(5), "{text_of}");
    assert!(text_of.contains("1 damaged") && text_of.contains("prefix-3"), "{text_of}");
    let output = run(&["store", "scrub", path, "--json"]);
    assert_eq!(output.status.code(), Some(5));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["damaged"][0]["key"], "prefix-3");
    assert!(text(&["store", "verify", path, "--rate", "1GB"]).contains("verified 3 blocks"));

    let (error, status) = refused(&["store", "clear", path]);
    assert!(error.contains("3 blocks") && error.contains("--yes") && status == 2, "{error}");
    assert_eq!(text(&["store", "clear", path, "--yes"]), "llama is empty\n");
    assert_eq!(json(&["store", "ls", path, "--json"])["all"], 0);
}

#[test]
fn a_scrub_reports_unreadable_blocks_apart_and_keeps_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let store = open(folder.path(), "llama");
    put(&store, "prefix-1", 1);
    drop(store);
    let outputs = std::thread::scope(|scope| {
        let scrub = || {
            // The command inherits it. Without io_uring, each read of a slab file is a call of preadv.
            forbid(&[libc::SYS_io_uring_setup], libc::EPERM)?;
            forbid(&[libc::SYS_preadv], libc::EIO)?;
            Ok([run(&["store", "scrub", path, "--json"]), run(&["store", "scrub", path])])
        };
        scope.spawn(scrub).join().unwrap()
    });
    let outputs = outputs.map_err(|error: std::io::Error| error.into());
    let test = "store::a_scrub_reports_unreadable_blocks_apart_and_keeps_them";
    let Some([report, text_of]) = or_skipped(test, outputs) else { return };
    assert_eq!((report.status.code(), text_of.status.code()), (Some(1), Some(1)));
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    check("store-verify", &report);
    assert_eq!(report["damaged"], serde_json::json!([]));
    assert_eq!(report["unreadable"][0]["block"]["key"], "prefix-1");
    let text_of = String::from_utf8(text_of.stdout).unwrap();
    assert!(text_of.contains("0 damaged; 1 unreadable"), "{text_of}");
    assert!(text_of.contains("unreadable: a read of the disk tier failed"), "{text_of}");
    assert!(text(&["store", "verify", path]).contains("verified 1 blocks"));
}

#[test]
fn bytes_a_day_give_the_years_of_a_drive() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap().to_owned();
    let store = open(folder.path(), "llama");
    put(&store, "before", 1);
    let stat = std::thread::scope(|scope| {
        let stat = scope.spawn(|| {
            json(&["store", "stat", &path, "--over", "2", "--drive-tbw", "600TB", "--json"])
        });
        // Until the command has ended, at least one block is written.
        let mut number = 0;
        while !stat.is_finished() {
            put(&store, &format!("prefix-{number}"), 7);
            number += 1;
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        stat.join().unwrap()
    });
    let day = stat["bytes_a_day"].as_f64().unwrap();
    assert!(day > 0.0, "{stat}");
    let years = stat["drive_years"].as_f64().unwrap();
    assert!((years * day * 365.25 / 600e12 - 1.0).abs() < 1e-6);
}

#[test]
fn a_directory_with_several_stores_or_none_asks_for_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let (error, status) = refused(&["store", "ls", path]);
    assert!(error.contains("has no store") && status == 2, "{error}");
    drop(open(folder.path(), "one"));
    drop(open(folder.path(), "two"));
    let (error, status) = refused(&["store", "ls", path]);
    assert!(error.contains("--namespace: one, two") && status == 2, "{error}");
    assert!(text(&["store", "stat", path, "--namespace", "two"]).starts_with("two, as of"));
    let (error, status) = refused(&["store", "stat", path, "--namespace", "three"]);
    assert_eq!((error.lines().count(), status), (1, 1), "{error}");
}
