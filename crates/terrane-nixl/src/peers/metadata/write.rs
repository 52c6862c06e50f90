//! Writes metadata in NIXL's form: under another name, in one piece, or with fewer keys.

use terrane_core::convert::to_u64;

use super::{MAGIC, MEMORY_TYPES, MemoryKey, Metadata};

impl Metadata<'_> {
    /// The bytes that NIXL loads. Unchanged metadata gives the bytes from which it was parsed.
    pub(crate) fn write(&self) -> Vec<u8> {
        let mut output = MAGIC.to_vec();
        put(&mut output, b"Agent", &[self.agent.as_bytes()]);
        put_count(&mut output, b"Conns", self.connections.len());
        for connection in &self.connections {
            put(&mut output, b"t", &[connection.backend.as_bytes()]);
            put(&mut output, b"c", &[connection.data]);
        }
        put(&mut output, b"", &[b"MemSection"]);
        let same_section = |a: &MemoryKey<'_>, b: &MemoryKey<'_>| {
            (a.location.backend, a.location.memory) == (b.location.backend, b.location.memory)
        };
        let sections = || self.memory.chunk_by(same_section);
        put_count(&mut output, b"nixlSecElms", sections().count());
        for section in sections() {
            put_section(&mut output, section);
        }
        output
    }
}

/// The keys of one backend for one type of memory.
fn put_section(output: &mut Vec<u8>, keys: &[MemoryKey<'_>]) {
    let Some(first) = keys.first() else { return };
    let memory = MEMORY_TYPES.iter().find(|(_, memory)| *memory == first.location.memory);
    let tag = memory.map_or(u32::MAX, |(tag, _)| *tag);
    put(output, b"bknd", &[first.location.backend.as_bytes()]);
    put(output, b"nixlDList", &[b"nixlSDList"]);
    put(output, b"t", &[&tag.to_ne_bytes()]);
    put_count(output, b"n", keys.len());
    for MemoryKey { location, key } in keys {
        let [address, length, device] =
            [location.address, location.length, location.device].map(u64::to_ne_bytes);
        put(output, b"", &[&address, &length, &device, key]);
    }
}

/// A tag, the length of the value in 8 bytes, the value, and `|`.
fn put(output: &mut Vec<u8>, tag: &[u8], value: &[&[u8]]) {
    let length = value.iter().map(|part| part.len()).sum();
    output.extend_from_slice(tag);
    output.extend_from_slice(&number(length));
    value.iter().for_each(|part| output.extend_from_slice(part));
    output.push(b'|');
}

fn put_count(output: &mut Vec<u8>, tag: &[u8], count: usize) {
    put(output, tag, &[&number(count)]);
}

fn number(value: usize) -> [u8; 8] {
    to_u64(value).to_ne_bytes()
}
