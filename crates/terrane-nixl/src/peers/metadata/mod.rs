//! Parses the metadata of NIXL agents.
//!
//! NIXL's own reader trusts its input. A length that wraps moves the reader back, and a count that
//! is too large keeps it busy. A name that is not UTF-8 makes the bindings panic. This crate
//! therefore first parses a peer's metadata. It checks tags, lengths, counts, the agent's name, and
//! the memory of each backend.
//!
//! A backend's connection data and memory keys are opaque, and are not parsed.
//!
//! The form is that of NIXL 1.5: `nixlSerDes|`, then items of a tag, a length of 8 bytes, that many
//! bytes, and `|`, in the order in which `Metadata::parse` reads them.

pub(super) mod coverage;
pub(super) mod parts;
mod write;

use terrane_core::ByteCount;
use terrane_core::convert::to_u64;

use crate::bindings::memory_type::MemoryType;

const MAGIC: &[u8] = b"nixlSerDes|";

/// The maximum number of connections. NIXL keeps one connection for each of its backends, and has
/// fewer than 20 of them. Connections are compared in pairs, which this number limits.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// The types of memory, as `nixl_mem_t` numbers them.
const MEMORY_TYPES: [(u32, MemoryType); 5] = [
    (0, MemoryType::Host),
    (1, MemoryType::Device),
    (2, MemoryType::Block),
    (3, MemoryType::Object),
    (4, MemoryType::File),
];

/// The contents of an agent's metadata.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Metadata<'a> {
    /// The agent's name.
    pub(crate) agent: &'a str,
    /// The connection data of its backends, each named once.
    pub(crate) connections: Vec<ConnectionInfo<'a>>,
    /// The keys of its memory.
    pub(crate) memory: Vec<MemoryKey<'a>>,
}

/// The connection data of one backend of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionInfo<'a> {
    pub(crate) backend: &'a str,
    /// The bytes by which the backend connects.
    pub(crate) data: &'a [u8],
}

/// Memory of an agent that one backend can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryKey<'a> {
    pub(crate) location: KeyLocation<&'a str>,
    /// The backend's own data for it.
    pub(crate) key: &'a [u8],
}

/// The location of memory for which a backend has a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct KeyLocation<B> {
    pub(crate) backend: B,
    pub(crate) memory: MemoryType,
    pub(crate) device: u64,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

/// Metadata that is not in NIXL's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent's metadata is not in the form of NIXL 1.5: no {expected} at byte {offset}; use NIXL \
     1.5 at the peer, and send its metadata unchanged"
)]
pub struct MalformedMetadata {
    /// The offset of the first error, in bytes.
    pub offset: usize,
    /// The expected item.
    pub expected: &'static str,
}

impl<'a> Metadata<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, MalformedMetadata> {
        let mut input = Input { rest: bytes, offset: 0 };
        input.skip(MAGIC, "`nixlSerDes|`")?;
        let agent = input.text(b"Agent", "name of an agent")?;
        let too_many = input.malformed("number of connections up to 64");
        let count = input.count(b"Conns", "number of connections")?;
        if count > to_u64(MAX_CONNECTIONS) {
            return Err(too_many);
        }
        let mut connections: Vec<ConnectionInfo<'_>> = Vec::new();
        for _ in 0..count {
            let repeated_backend = input.malformed("backend without an earlier connection");
            let backend = input.text(b"t", "backend of a connection")?;
            if connections.iter().any(|known| known.backend == backend) {
                return Err(repeated_backend);
            }
            let data = input.non_empty(b"c", "data of a connection")?;
            connections.push(ConnectionInfo { backend, data });
        }
        input.exactly(b"", b"MemSection", "`MemSection`")?;
        let sections = input.count(b"nixlSecElms", "number of sections")?;
        let mut memory = Vec::new();
        for _ in 0..sections {
            let backend = input.text(b"bknd", "backend of a section")?;
            input.exactly(b"nixlDList", b"nixlSDList", "list of keys")?;
            let memory_type = input.memory_type()?;
            let no_keys = input.malformed("key");
            let keys = input.count(b"n", "number of keys")?;
            if keys == 0 {
                // NIXL would refuse all of the metadata.
                return Err(no_keys);
            }
            for _ in 0..keys {
                let (device, address, length, key) = input.key()?;
                let location =
                    KeyLocation { backend, memory: memory_type, device, address, length };
                memory.push(MemoryKey { location, key });
            }
        }
        if !input.rest.is_empty() {
            return Err(input.malformed("end"));
        }
        Ok(Self { agent, connections, memory })
    }
}

impl<B> KeyLocation<B> {
    /// Whether the key covers these bytes of this type and device.
    pub(crate) fn covers(
        &self,
        memory: MemoryType,
        device: u64,
        address: u64,
        length: ByteCount,
    ) -> bool {
        // If the sums are `Some`, they do not wrap.
        let ends = (self.address.checked_add(self.length), address.checked_add(length.get()));
        self.memory == memory
            && self.device == device
            && self.address <= address
            && matches!(ends, (Some(ours), Some(theirs)) if theirs <= ours)
    }
}

struct Input<'a> {
    rest: &'a [u8],
    offset: usize,
}

impl<'a> Input<'a> {
    fn malformed(&self, expected: &'static str) -> MalformedMetadata {
        MalformedMetadata { offset: self.offset, expected }
    }

    fn take(
        &mut self,
        bytes: usize,
        expected: &'static str,
    ) -> Result<&'a [u8], MalformedMetadata> {
        let (taken, rest) =
            self.rest.split_at_checked(bytes).ok_or_else(|| self.malformed(expected))?;
        self.rest = rest;
        self.offset += bytes;
        Ok(taken)
    }

    fn skip(&mut self, literal: &[u8], expected: &'static str) -> Result<(), MalformedMetadata> {
        if !self.rest.starts_with(literal) {
            return Err(self.malformed(expected));
        }
        self.take(literal.len(), expected).map(drop)
    }

    /// A tag, a length, that many bytes, and `|`.
    fn item(&mut self, tag: &[u8], expected: &'static str) -> Result<&'a [u8], MalformedMetadata> {
        self.skip(tag, expected)?;
        let length = self.number(expected)?;
        // The address space has 64 bits; `take` refuses more than the remaining input.
        let value = self.take(ByteCount::new(length).to_usize(), expected)?;
        self.skip(b"|", expected)?;
        Ok(value)
    }

    /// In the machine's byte order: metadata is not exchanged between machines of different byte
    /// order.
    fn number(&mut self, expected: &'static str) -> Result<u64, MalformedMetadata> {
        match self.take(8, expected)?.first_chunk() {
            Some(&bytes) => Ok(u64::from_ne_bytes(bytes)),
            None => Err(self.malformed(expected)),
        }
    }

    /// The value of an item, as `read` understands it.
    fn parsed<T>(
        &mut self,
        tag: &[u8],
        expected: &'static str,
        read: impl FnOnce(&'a [u8]) -> Option<T>,
    ) -> Result<T, MalformedMetadata> {
        let malformed = self.malformed(expected);
        read(self.item(tag, expected)?).ok_or(malformed)
    }

    fn non_empty(
        &mut self,
        tag: &[u8],
        expected: &'static str,
    ) -> Result<&'a [u8], MalformedMetadata> {
        self.parsed(tag, expected, |value| (!value.is_empty()).then_some(value))
    }

    /// Printable text without NUL bytes; not empty.
    fn text(&mut self, tag: &[u8], expected: &'static str) -> Result<&'a str, MalformedMetadata> {
        let is_printable = |text: &&str| !text.is_empty() && !text.chars().any(char::is_control);
        self.parsed(tag, expected, |value| str::from_utf8(value).ok().filter(is_printable))
    }

    fn exactly(
        &mut self,
        tag: &[u8],
        value: &[u8],
        expected: &'static str,
    ) -> Result<(), MalformedMetadata> {
        self.parsed(tag, expected, |found| (found == value).then_some(()))
    }

    /// The number of items that follow. Each item has at least one byte, so a number that is too
    /// large reaches the end of the input.
    fn count(&mut self, tag: &[u8], expected: &'static str) -> Result<u64, MalformedMetadata> {
        self.parsed(tag, expected, |value| Some(u64::from_ne_bytes(value.try_into().ok()?)))
    }

    fn memory_type(&mut self) -> Result<MemoryType, MalformedMetadata> {
        self.parsed(b"t", "type of memory", |value| {
            let tag = u32::from_ne_bytes(value.try_into().ok()?);
            MEMORY_TYPES.iter().find(|(known, _)| *known == tag).map(|(_, memory)| *memory)
        })
    }

    /// Device, address, length, and the remaining data.
    fn key(&mut self) -> Result<(u64, u64, u64, &'a [u8]), MalformedMetadata> {
        self.parsed(b"", "key of memory", |value| {
            let (address, rest) = value.split_first_chunk()?;
            let (length, rest) = rest.split_first_chunk()?;
            // The device has 8 bytes; the upper half was padding in earlier releases.
            let (device, key) = rest.split_first_chunk()?;
            let [device, address, length] =
                [device, address, length].map(|bytes| u64::from_ne_bytes(*bytes));
            address.checked_add(length).map(|_| (device, address, length, key))
        })
    }
}

#[cfg(test)]
mod tests;
