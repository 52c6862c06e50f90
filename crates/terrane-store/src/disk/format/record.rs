//! Records of 128 bytes: the unit of journals and checkpoints.
//!
//! A record never straddles a sector, so that a torn write leaves whole records. Each carries its own
//! checksum and its own sequence number.

use crate::disk::format::bytes::{crc, put, u16_at, u32_at, u64_at, u128_at};
use crate::key::KeyHash;

/// The bytes of a record.
pub(crate) const RECORD: usize = 128;

/// The first bytes of a key, which its `Put` holds.
pub(crate) const KEY_HEAD: usize = 48;

/// The bytes of a key in each record after its `Put`.
pub(crate) const KEY_PART: usize = 88;

/// Sequence numbers stay below this, so that sums of one and a file's records do not overflow.
pub(crate) const SEQUENCES: u64 = 1 << 62;

const FORMAT: u8 = 1;
const PUT: u8 = 1;
const REMOVE: u8 = 2;
const MARK: u8 = 3;
const KEY: u8 = 4;

/// The flag of a mark that opens the first journal of a session.
const STARTS_SESSION: u16 = 1;

/// The bytes of one record.
pub(crate) type RecordBytes = [u8; RECORD];

/// One block to record: its key, its slot, and the checksum of its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutRecord<'a> {
    /// The keyed hash of the key.
    pub key_hash: KeyHash,
    /// The group, by its index among the groups of the catalog.
    pub group: u16,
    /// The slot within the group.
    pub slot: u32,
    /// The bytes of the payload.
    pub length: u64,
    /// The checksum of the payload. It decides at each read whether the record is true.
    pub checksum: u64,
    /// The key, or no bytes if only its hash is known.
    pub key: &'a [u8],
}

impl PutRecord<'_> {
    /// The number of records that follow for the rest of the key.
    pub(crate) const fn key_parts(&self) -> usize {
        key_parts(self.key.len())
    }
}

/// The number of records after the `Put` of a key of so many bytes.
pub(crate) const fn key_parts(key_length: usize) -> usize {
    key_length.saturating_sub(KEY_HEAD).div_ceil(KEY_PART)
}

/// The fields that every record has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// The number of the record.
    pub sequence: u64,
    /// The epoch. `clear` begins a new one.
    pub epoch: u64,
}

/// The statement that all records up to one are durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The highest durable sequence number.
    pub durable: u64,
    /// The tombstones of this epoch up to that sequence number.
    pub tombstones: u64,
    /// Whether the mark opens the first journal of a session.
    pub starts_session: bool,
}

/// The part of a `Put` that is not its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PutFields {
    pub key_hash: KeyHash,
    pub group: u16,
    pub slot: u32,
    pub length: u64,
    pub checksum: u64,
    /// The bytes of the key; 0 if only its hash is known.
    pub key_length: u16,
    /// 0 in a journal, the checkpoint's number in a checkpoint.
    pub checkpoint: u64,
}

/// The content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// A block was stored.
    Put(PutFields),
    /// A key was removed.
    Remove(KeyHash),
    /// All records up to one are durable.
    Mark(Mark),
    /// A further part of the key of the `Put` before it, by its index.
    KeyPart(u16),
}

/// The checksum of any bytes that end with their own checksum: a property of this CRC.
const RESIDUE: u64 = 0x0cef_cfc4_d490_91bd;

/// The number of records whose checksums [`are_whole`] verifies together.
pub(crate) const BATCH: usize = 32;

/// The checksum of any [`BATCH`] records, each of which ends with its own checksum.
const BATCH_RESIDUE: u64 = 0x3790_bb31_6d73_0ab2;

/// Whether the checksums of all records are right. One checksum of 4 KiB takes a tenth of the time of
/// 32 checksums.
///
/// A record that its own checksum finds damaged never passes alone. Several do not pass either if all
/// differ from the right bytes by the same bits, or if all are zeros. The sum of their errors is then
/// one error times q(x)^1024, where q has a degree below 32. The CRC's polynomial of degree 64 is
/// irreducible and does not divide it. Several with other damage pass with probability 2⁻⁶⁴, like one
/// with random bytes.
pub(crate) fn are_whole(records: &[RecordBytes; BATCH]) -> bool {
    crc(records.as_flattened()) == BATCH_RESIDUE
}

/// Decodes a record. `None` if its checksum, its format or a field is wrong.
pub(crate) fn decode(bytes: &RecordBytes) -> Option<(Stamp, Content)> {
    // Twice as fast as the checksum of the other 120 bytes.
    if crc(bytes) != RESIDUE {
        return None;
    }
    decode_whole(bytes)
}

/// Decodes a record whose checksum is right. `None` if its format or a field is wrong.
pub(crate) fn decode_whole(bytes: &RecordBytes) -> Option<(Stamp, Content)> {
    if bytes[1] != FORMAT {
        return None;
    }
    let stamp = Stamp { sequence: u64_at(bytes, 8), epoch: u64_at(bytes, 16) };
    let content = match bytes[0] {
        PUT => Content::Put(PutFields {
            key_hash: KeyHash::new(u128_at(bytes, 24)),
            group: u16_at(bytes, 4),
            slot: u32_at(bytes, 40),
            length: u64_at(bytes, 48),
            checksum: u64_at(bytes, 56),
            key_length: u16_at(bytes, 2),
            checkpoint: u64_at(bytes, 112),
        }),
        REMOVE => Content::Remove(KeyHash::new(u128_at(bytes, 24))),
        MARK => Content::Mark(Mark {
            durable: u64_at(bytes, 48),
            tombstones: u64_at(bytes, 112),
            starts_session: u16_at(bytes, 6) == STARTS_SESSION,
        }),
        KEY => Content::KeyPart(u16_at(bytes, 6)),
        _ => return None,
    };
    let is_possible = match content {
        Content::Mark(mark) => mark.durable < stamp.sequence && mark.tombstones <= mark.durable,
        _ => true,
    };
    (stamp.sequence < SEQUENCES && is_possible).then_some((stamp, content))
}

/// The first bytes of a key, from its `Put`.
pub(crate) fn key_head(bytes: &RecordBytes, key_length: u16) -> &[u8] {
    &bytes[64..64 + usize::from(key_length).min(KEY_HEAD)]
}

/// The bytes of a key in the record of part `part`, of a key of `key_length` bytes.
pub(crate) fn key_part(bytes: &RecordBytes, part: usize, key_length: u16) -> &[u8] {
    let left = usize::from(key_length).saturating_sub(KEY_HEAD + part * KEY_PART);
    &bytes[24..24 + left.min(KEY_PART)]
}

/// Adds the records of a block, numbered from `stamp` on by `step`, to `into`.
///
/// In a journal `step` is 1. A checkpoint gives all its records one number, and its own in
/// `checkpoint`.
pub(crate) fn encode_put(
    record: &PutRecord<'_>,
    stamp: Stamp,
    step: u64,
    checkpoint: u64,
    into: &mut Vec<u8>,
) {
    let mut bytes = head(PUT, stamp);
    // The catalog has checked the length; a longer key would be known by its hash alone.
    let (key_length, key) = match u16::try_from(record.key.len()) {
        Ok(length) => (length, record.key),
        Err(_) => (0, &[][..]),
    };
    put(&mut bytes, 2, &key_length.to_le_bytes());
    put(&mut bytes, 4, &record.group.to_le_bytes());
    put(&mut bytes, 24, &record.key_hash.get().to_le_bytes());
    put(&mut bytes, 40, &record.slot.to_le_bytes());
    put(&mut bytes, 48, &record.length.to_le_bytes());
    put(&mut bytes, 56, &record.checksum.to_le_bytes());
    let (first, rest) = key.split_at(key.len().min(KEY_HEAD));
    put(&mut bytes, 64, first);
    put(&mut bytes, 112, &checkpoint.to_le_bytes());
    finish(bytes, into);
    for (part, piece) in (0_u16..).zip(rest.chunks(KEY_PART)) {
        let sequence = stamp.sequence + step * (u64::from(part) + 1);
        let mut bytes = head(KEY, Stamp { sequence, ..stamp });
        put(&mut bytes, 6, &part.to_le_bytes());
        put(&mut bytes, 24, piece);
        put(&mut bytes, 112, &checkpoint.to_le_bytes());
        finish(bytes, into);
    }
}

/// Adds a tombstone to `into`.
pub(crate) fn encode_remove(key_hash: KeyHash, stamp: Stamp, into: &mut Vec<u8>) {
    let mut bytes = head(REMOVE, stamp);
    put(&mut bytes, 24, &key_hash.get().to_le_bytes());
    finish(bytes, into);
}

/// Adds a mark to `into`.
pub(crate) fn encode_mark(mark: Mark, stamp: Stamp, into: &mut Vec<u8>) {
    let mut bytes = head(MARK, stamp);
    if mark.starts_session {
        put(&mut bytes, 6, &STARTS_SESSION.to_le_bytes());
    }
    put(&mut bytes, 48, &mark.durable.to_le_bytes());
    put(&mut bytes, 112, &mark.tombstones.to_le_bytes());
    finish(bytes, into);
}

fn head(operation: u8, stamp: Stamp) -> RecordBytes {
    let mut bytes = [0; RECORD];
    bytes[0] = operation;
    bytes[1] = FORMAT;
    put(&mut bytes, 8, &stamp.sequence.to_le_bytes());
    put(&mut bytes, 16, &stamp.epoch.to_le_bytes());
    bytes
}

fn finish(mut bytes: RecordBytes, into: &mut Vec<u8>) {
    let sum = crc(&bytes[..120]);
    put(&mut bytes, 120, &sum.to_le_bytes());
    into.extend_from_slice(&bytes);
}

#[cfg(test)]
mod tests {
    use terrane_core::convert::to_u64;

    use super::*;

    const STAMP: Stamp = Stamp { sequence: 7, epoch: 3 };

    fn put_of(key: &[u8]) -> PutRecord<'_> {
        PutRecord {
            key_hash: KeyHash::new(1 << 100),
            group: 2,
            slot: 9,
            length: 4096,
            checksum: 77,
            key,
        }
    }

    fn records(bytes: &[u8]) -> Vec<&RecordBytes> {
        bytes.as_chunks::<RECORD>().0.iter().collect()
    }

    #[test]
    fn a_key_of_any_length_comes_back() {
        for length in [0, 1, 47, 48, 49, 136, 137, 1000, usize::from(u16::MAX)] {
            let key: Vec<u8> = (0..=250).cycle().take(length).collect();
            let record = put_of(&key);
            let mut bytes = Vec::new();
            encode_put(&record, STAMP, 1, 0, &mut bytes);
            let found = records(&bytes);
            assert_eq!(found.len(), 1 + record.key_parts());
            let Some((STAMP, Content::Put(fields))) = decode(found[0]) else { panic!("a put") };
            assert_eq!(
                (fields.key_hash, fields.group, fields.slot),
                (KeyHash::new(1 << 100), 2, 9)
            );
            assert_eq!((fields.length, fields.checksum), (4096, 77));
            let mut back = key_head(found[0], fields.key_length).to_vec();
            for (part, bytes) in found[1..].iter().enumerate() {
                let (stamp, content) = decode(bytes).unwrap();
                assert_eq!(stamp.sequence, 8 + part as u64);
                assert_eq!(content, Content::KeyPart(part.try_into().unwrap()));
                back.extend_from_slice(key_part(bytes, part, fields.key_length));
            }
            assert_eq!(back, key);
        }
    }

    #[test]
    fn marks_and_tombstones_come_back() {
        let mark = Mark { durable: 6, tombstones: 2, starts_session: true };
        let mut bytes = Vec::new();
        encode_mark(mark, STAMP, &mut bytes);
        encode_remove(KeyHash::new(5), STAMP, &mut bytes);
        let found: Vec<_> = records(&bytes).into_iter().map(decode).collect();
        assert_eq!(found[0], Some((STAMP, Content::Mark(mark))));
        assert_eq!(found[1], Some((STAMP, Content::Remove(KeyHash::new(5)))));
    }

    #[test]
    fn bytes_that_end_with_their_checksum_have_the_residue() {
        for bytes in [&[][..], &[0; 120], b"a record", &[0xff; 120]] {
            let sum = crc(bytes);
            let whole = |sum: u64| crc(&[bytes, &sum.to_le_bytes()].concat());
            assert_eq!(whole(sum), RESIDUE);
            assert!((0..u64::BITS).all(|bit| whole(sum ^ 1 << bit) != RESIDUE));
        }
    }

    #[test]
    fn whole_batches_have_one_checksum_and_damaged_ones_have_not() {
        let batch_of = |first: u64| {
            let mut bytes = Vec::new();
            for sequence in first..first + to_u64(BATCH) {
                encode_remove(
                    KeyHash::new(sequence.into()),
                    Stamp { sequence, epoch: 3 },
                    &mut bytes,
                );
            }
            *bytes.as_chunks::<RECORD>().0.first_chunk::<BATCH>().unwrap()
        };
        for first in [1, 99, 1 << 40] {
            let whole = batch_of(first);
            assert_eq!(crc(whole.as_flattened()), BATCH_RESIDUE);
            for at in 0..BATCH {
                for bit in (0..RECORD * 8).step_by(37) {
                    let mut damaged = whole;
                    damaged[at][bit / 8] ^= 1 << (bit % 8);
                    assert!(!are_whole(&damaged), "record {at}, bit {bit}");
                }
                // The rest of a torn write.
                let mut damaged = whole;
                damaged[at..].fill([0; RECORD]);
                assert!(!are_whole(&damaged), "zeros from record {at} on");
            }
        }
        assert!(!are_whole(&[[0; RECORD]; BATCH]));
        assert!(!are_whole(&[[0xff; RECORD]; BATCH]));
    }

    #[test]
    fn each_changed_bit_is_found() {
        let mut bytes = Vec::new();
        encode_put(&put_of(b"key"), STAMP, 1, 0, &mut bytes);
        let whole: RecordBytes = bytes.try_into().unwrap();
        for bit in 0..RECORD * 8 {
            let mut damaged = whole;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&damaged), None, "bit {bit}");
        }
        assert_eq!(decode(&[0; RECORD]), None);
    }

    #[test]
    fn a_mark_of_what_comes_later_is_refused() {
        for mark in [
            Mark { durable: 7, ..Mark::default() },
            Mark { durable: 3, tombstones: 4, starts_session: false },
        ] {
            let mut bytes = Vec::new();
            encode_mark(mark, STAMP, &mut bytes);
            assert_eq!(decode(records(&bytes)[0]), None, "{mark:?}");
        }
    }
}
