//! The header of a checkpoint: the live blocks at the beginning of a journal.
//!
//! All records of a checkpoint have one sequence number, the last before its journal's first.

use crate::disk::format::bytes::{crc, put, u32_at, u64_at};
use crate::disk::format::record::{RECORD, RecordBytes, SEQUENCES};
use crate::disk::format::superblock::FORMAT_VERSION;

const MAGIC: [u8; 8] = *b"TRCHECK\n";

/// The first 128 bytes of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The number of the checkpoint and of its journal.
    pub number: u64,
    pub epoch: u64,
    /// The sequence number of the first record of its journal.
    pub first_sequence: u64,
    /// The tombstones of this epoch before that record.
    pub tombstones: u64,
    /// The number of records that follow.
    pub records: u64,
}

impl Header {
    pub(crate) fn encode(&self) -> RecordBytes {
        let mut bytes = [0; RECORD];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &FORMAT_VERSION.to_le_bytes());
        put(&mut bytes, 16, &self.number.to_le_bytes());
        put(&mut bytes, 24, &self.epoch.to_le_bytes());
        put(&mut bytes, 32, &self.first_sequence.to_le_bytes());
        put(&mut bytes, 40, &self.tombstones.to_le_bytes());
        put(&mut bytes, 48, &self.records.to_le_bytes());
        let sum = crc(&bytes[..120]);
        put(&mut bytes, 120, &sum.to_le_bytes());
        bytes
    }

    /// Decodes the header of checkpoint `number`. `None` if it is not valid.
    pub(crate) fn decode(bytes: &RecordBytes, number: u64) -> Option<Self> {
        let header = Self {
            number: u64_at(bytes, 16),
            epoch: u64_at(bytes, 24),
            first_sequence: u64_at(bytes, 32),
            tombstones: u64_at(bytes, 40),
            records: u64_at(bytes, 48),
        };
        let is_valid = bytes.starts_with(&MAGIC)
            && u32_at(bytes, 8) == FORMAT_VERSION
            && u64_at(bytes, 120) == crc(&bytes[..120])
            && header.number == number
            && (1..SEQUENCES).contains(&header.first_sequence)
            && header.tombstones < header.first_sequence;
        is_valid.then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header =
        Header { number: 4, epoch: 2, first_sequence: 90, tombstones: 5, records: 10 };

    #[test]
    fn headers_come_back() {
        assert_eq!(Header::decode(&HEADER.encode(), 4), Some(HEADER));
        assert_eq!(Header::decode(&HEADER.encode(), 5), None);
        assert_eq!(Header::decode(&[0; RECORD], 0), None);
    }

    #[test]
    fn each_changed_bit_is_found() {
        for bit in 0..RECORD * 8 {
            let mut bytes = HEADER.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&bytes, 4), None, "bit {bit}");
        }
    }

    #[test]
    fn impossible_numbers_are_refused() {
        for header in [
            Header { first_sequence: 0, tombstones: 0, ..HEADER },
            Header { first_sequence: SEQUENCES, ..HEADER },
            Header { tombstones: 90, ..HEADER },
        ] {
            assert_eq!(Header::decode(&header.encode(), 4), None, "{header:?}");
        }
    }
}
