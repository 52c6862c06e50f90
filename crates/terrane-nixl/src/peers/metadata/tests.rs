//! Valid and malformed metadata of NIXL agents.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects by panicking"
)]

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::select;
use terrane_testkit::damage::Damage;

use super::*;

fn item(tag: &str, value: &[u8]) -> Vec<u8> {
    [tag.as_bytes(), &value.len().to_ne_bytes(), value, b"|"].concat()
}

fn number(tag: &str, value: u64) -> Vec<u8> {
    item(tag, &value.to_ne_bytes())
}

fn key(address: u64, length: u64) -> Vec<u8> {
    let location = [address, length, 0].map(u64::to_ne_bytes).concat();
    item("", &[location, vec![1, 2, 3]].concat())
}

fn parts() -> Vec<Vec<u8>> {
    vec![
        MAGIC.to_vec(),
        item("Agent", b"alpha"),
        number("Conns", 1),
        item("t", b"UCX"),
        item("c", &[7; 9]),
        item("", b"MemSection"),
        number("nixlSecElms", 1),
        item("bknd", b"UCX"),
        item("nixlDList", b"nixlSDList"),
        item("t", &0_u32.to_ne_bytes()),
        number("n", 2),
        key(4096, 100),
        key(8192, 100),
    ]
}

/// Metadata with this many connections, and the name of each one's backend.
fn connections(count: u64, name: fn(u64) -> String) -> Vec<u8> {
    let mut parts = parts();
    let each = (0..count).flat_map(|index| [item("t", name(index).as_bytes()), item("c", &[7; 9])]);
    parts.splice(2..5, std::iter::once(number("Conns", count)).chain(each));
    parts.concat()
}

fn distinct(index: u64) -> String {
    format!("B{index}")
}

/// A name, malformed metadata, and the item that the parser reports as missing.
type Handmade = (String, Vec<u8>, &'static str);

fn handmade() -> Vec<Handmade> {
    let with = |name: &str, at: usize, part: Vec<u8>, expected| {
        let mut parts = parts();
        parts[at] = part;
        (name.to_owned(), parts.concat(), expected)
    };
    let mut all = vec![
        ("empty".to_owned(), vec![], "`nixlSerDes|`"),
        ("trailing".to_owned(), [parts().concat(), vec![0]].concat(), "end"),
        with("connections-most", 2, number("Conns", u64::MAX), "number of connections up to 64"),
        ("connections-65".to_owned(), connections(65, distinct), "number of connections up to 64"),
        (
            "connections-repeated".to_owned(),
            connections(2, |_| "UCX".to_owned()),
            "backend without an earlier connection",
        ),
        with("connections-of-4-bytes", 2, item("Conns", &[1; 4]), "number of connections"),
        with("connection-without-data", 4, item("c", &[]), "data of a connection"),
        with("sections-most", 6, number("nixlSecElms", u64::MAX), "backend of a section"),
        with("keys-most", 10, number("n", u64::MAX), "key of memory"),
        with("keys-fewer", 10, number("n", 1), "end"),
        with("keys-none", 10, number("n", 0), "key"),
        with("memory-9", 9, item("t", &9_u32.to_ne_bytes()), "type of memory"),
        with("key-overflow", 11, key(u64::MAX - 10, 100), "key of memory"),
        with("key-of-23-bytes", 11, item("", &[0; 23]), "key of memory"),
    ];
    for length in [u64::MAX, u64::MAX - 8, 1 << 40, 6] {
        let agent = [b"Agent", &length.to_ne_bytes()[..], b"alpha|"].concat();
        all.push(with(&format!("agent-of-{length}"), 1, agent, "name of an agent"));
    }
    for (kind, name) in
        [("empty", &b""[..]), ("nul", b"al\0pha"), ("no-text", b"\xff\xfe"), ("lines", b"a\nb")]
    {
        let (agent, backend) = (item("Agent", name), item("bknd", name));
        all.push(with(&format!("agent-{kind}"), 1, agent, "name of an agent"));
        all.push(with(&format!("section-{kind}"), 7, backend, "backend of a section"));
    }
    all
}

/// The files of a folder of `tests/corpus`, and their names.
fn corpus(folder: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(folder);
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_stem().unwrap().to_string_lossy().into(), fs::read(path).unwrap()))
        .collect();
    files.sort_unstable();
    files
}

/// The corpus has a file for each former defect, and one for each handmade input.
#[test]
fn the_corpus_is_refused() {
    let (handmade, files) = (handmade(), corpus("refused"));
    for (name, bytes) in handmade
        .iter()
        .map(|(name, bytes, _)| (name, bytes))
        .chain(files.iter().map(|(name, bytes)| (name, bytes)))
    {
        let malformed = Metadata::parse(bytes).expect_err(name);
        if let Some((_, _, expected)) = handmade.iter().find(|(known, ..)| known == name) {
            assert_eq!(malformed.expected, *expected, "{name}: {malformed}");
        }
    }
    for (name, bytes, _) in &handmade {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(files.iter().any(|(found, _)| found == name), "no refused/{name}.bin: {hex}");
    }
}

/// The output of NIXL 1.5.1 on an x86-64 machine. It detects a change of the form.
#[test]
#[cfg(target_endian = "little")]
fn stored_output_of_nixl_is_parsed() {
    for (name, bytes) in corpus("written") {
        let metadata = Metadata::parse(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(metadata.agent, "alpha", "{name}");
        let of_keys: Vec<&str> = metadata.memory.iter().map(|key| key.location.backend).collect();
        let of_connections: Vec<&str> = metadata.connections.iter().map(|c| c.backend).collect();
        match name.as_str() {
            "connection" => assert_eq!((of_connections, of_keys), (vec!["UCX"], vec![])),
            "keys" => assert_eq!((of_connections, of_keys), (vec![], vec!["UCX"])),
            other => panic!("unexpected file {other}"),
        }
        assert_eq!(metadata.write(), bytes, "{name} is written as NIXL wrote it");
    }
    assert_eq!(corpus("written").len(), 2);
}

#[test]
fn output_of_nixl_is_parsed() {
    let bytes = parts().concat();
    let metadata = Metadata::parse(&bytes).unwrap();
    assert_eq!(metadata.agent, "alpha");
    assert_eq!(metadata.connections, [ConnectionInfo { backend: "UCX", data: &[7; 9] }]);
    assert_eq!(metadata.write(), bytes);
    let [first, second] = metadata.memory.as_slice() else { panic!("{metadata:?}") };
    assert_eq!((first.location.address, second.location.address), (4096, 8192));
    assert_eq!((first.location.memory, first.key), (MemoryType::Host, &[1, 2, 3][..]));
}

#[test]
fn an_agent_has_up_to_64_connections() {
    let bytes = connections(64, distinct);
    assert_eq!(Metadata::parse(&bytes).unwrap().connections.len(), MAX_CONNECTIONS);
}

#[test]
fn truncated_and_changed_metadata_never_panics() {
    let bytes = parts().concat();
    for end in 0..bytes.len() {
        assert!(Metadata::parse(&bytes[..end]).is_err(), "{end}");
    }
    for at in 0..bytes.len() {
        for flip in 1..=255 {
            let mut bytes = bytes.clone();
            bytes[at] ^= flip;
            // Some inputs are valid with other contents. None panics or runs forever.
            let _ = Metadata::parse(&bytes);
        }
    }
}

#[test]
fn coverage_does_not_wrap() {
    let location = KeyLocation {
        backend: "UCX",
        memory: MemoryType::Host,
        device: 0,
        address: 4096,
        length: 100,
    };
    let covers =
        |address, length| location.covers(MemoryType::Host, 0, address, ByteCount::new(length));
    assert!(covers(4096, 100) && covers(4100, 96) && covers(4196, 0));
    assert!(!covers(4095, 2) && !covers(4100, 97) && !covers(u64::MAX - 10, 20));
    assert!(!location.covers(MemoryType::Device, 0, 4096, ByteCount::new(1)));
    assert!(!location.covers(MemoryType::Host, 1, 4096, ByteCount::new(1)));
}

/// Checks the properties of parsed metadata that the rest of the crate relies on.
fn assert_sound(metadata: &Metadata<'_>) {
    let is_name = |name: &str| !name.is_empty() && !name.chars().any(char::is_control);
    assert!(is_name(metadata.agent) && metadata.connections.iter().all(|c| is_name(c.backend)));
    let backends: HashSet<&str> = metadata.connections.iter().map(|c| c.backend).collect();
    assert_eq!(backends.len(), metadata.connections.len());
    // Written and parsed again, it is the same.
    assert_eq!(Metadata::parse(&metadata.write()).as_ref(), Ok(metadata));
    for MemoryKey { location, .. } in &metadata.memory {
        assert!(is_name(location.backend), "{location:?}");
        assert!(location.address.checked_add(location.length).is_some(), "{location:?}");
    }
}

proptest! {
    #[test]
    fn damaged_metadata_is_refused_or_sound(damage in Damage::up_to(6)) {
        let mut bytes = parts().concat();
        damage.iter().for_each(|damage| damage.apply(&mut bytes));
        if let Ok(metadata) = Metadata::parse(&bytes) {
            assert_sound(&metadata);
        }
    }

    /// The items are well-formed, and their contents are arbitrary.
    #[test]
    fn items_may_have_any_contents(
        at in 1_usize..13,
        tag in select(vec!["Agent", "Conns", "t", "c", "", "nixlSecElms", "bknd", "nixlDList", "n"]),
        value in prop::collection::vec(any::<u8>(), 0..64),
        again: bool,
    ) {
        let mut parts = parts();
        let item = item(tag, &value);
        if again {
            parts.insert(at, item);
        } else {
            parts[at] = item;
        }
        let bytes = parts.concat();
        if let Ok(metadata) = Metadata::parse(&bytes) {
            assert_sound(&metadata);
        }
    }
}
