//! Keys of blocks, and their hashes.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

use crate::KeyError;

/// The most bytes of a key: its length is stored in 16 bits.
pub const MAX_KEY_BYTES: usize = 65_535;

/// Keys of most engines fit here, after the number of their group.
const SHORT: usize = 72;

/// The 128-bit hash of a key under the secret of a store.
///
/// Two keys of one store have equal hashes with probability 2⁻¹²⁸ a pair. Without the secret, a client
/// cannot choose keys whose hashes are equal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyHash(u128);

impl KeyHash {
    /// The hash with this value, as a journal stores it.
    #[must_use]
    pub const fn new(value: u128) -> Self {
        Self(value)
    }

    /// The value.
    #[must_use]
    pub const fn get(self) -> u128 {
        self.0
    }

    /// The upper half.
    pub(crate) const fn high(self) -> u64 {
        let bytes = self.0.to_le_bytes();
        let [_, _, _, _, _, _, _, _, a, b, c, d, e, f, g, h] = bytes;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// The lower half.
    pub(crate) const fn low(self) -> u64 {
        let bytes = self.0.to_le_bytes();
        let [a, b, c, d, e, f, g, h, ..] = bytes;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// All bits of both halves, well mixed in the upper bits: callers of an index choose hashes, too.
    /// The index takes a key's shard and bucket from there, and a recovery its part.
    pub(crate) const fn mixed(self) -> u64 {
        (self.high() ^ self.low()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// The hash with these halves.
    pub(crate) fn from_halves(high: u64, low: u64) -> Self {
        Self(u128::from(high) << 64 | u128::from(low))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyHash({self})")
    }
}

/// 32 hexadecimal digits.
impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Hashes keys with SipHash-2-4-128 under the secret of a store.
///
/// Every use of SipHash here has 128 bits of output and a secret key of 16 bytes
/// (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012).
#[derive(Clone)]
pub struct KeyHasher {
    keyed: SipHasher24,
}

impl KeyHasher {
    /// A hasher under a secret of 16 random bytes.
    #[must_use]
    pub fn new(secret: &[u8; 16]) -> Self {
        Self { keyed: SipHasher24::new_with_key(secret) }
    }

    /// The hash of a key.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the key is empty or longer than [`MAX_KEY_BYTES`].
    pub fn hash(&self, key: &[u8]) -> Result<KeyHash, KeyError> {
        check(key)?;
        Ok(KeyHash(self.keyed.hash(key).as_u128()))
    }

    /// The hash of the group's number and a key, as the store uses it: one key in two groups names two
    /// blocks.
    pub(crate) fn hash_in_group(&self, group: u16, key: &[u8]) -> Result<KeyHash, KeyError> {
        check(key)?;
        // One piece is hashed faster than two.
        let mut short = [0; SHORT];
        if let Some(whole) = short.get_mut(..size_of::<u16>() + key.len())
            && let Some((first, rest)) = whole.split_first_chunk_mut()
        {
            *first = group.to_le_bytes();
            rest.copy_from_slice(key);
            return Ok(KeyHash(self.keyed.hash(whole).as_u128()));
        }
        let mut hasher = self.keyed;
        hasher.write(&group.to_le_bytes());
        hasher.write(key);
        Ok(KeyHash(hasher.finish128().as_u128()))
    }
}

fn check(key: &[u8]) -> Result<(), KeyError> {
    match key.len() {
        0 => Err(KeyError::Empty),
        1..=MAX_KEY_BYTES => Ok(()),
        bytes => Err(KeyError::TooLong { bytes }),
    }
}

// The secret is not printed.
terrane_core::debug_fields!(KeyHasher {});

#[cfg(test)]
mod tests {
    use super::*;

    /// The secret of the reference implementation's vectors.
    const SECRET: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    /// `vectors_sip128` of the reference implementation: the input is 0, 1, 2, … of the length.
    #[test]
    fn hashes_are_those_of_the_reference_implementation() {
        let hasher = KeyHasher::new(&SECRET);
        let input: Vec<u8> = (0..63).collect();
        let expected: [(usize, [u8; 16]); 2] = [
            (1, 0xda87_c1d8_6b99_af44_3476_5911_9b22_fc45_u128.to_be_bytes()),
            (2, 0x8177_228d_a4a4_5dc7_fca3_8bde_f60a_ffe4_u128.to_be_bytes()),
        ];
        for (length, expected) in expected {
            let hash = hasher.hash(&input[..length]).unwrap();
            assert_eq!(hash.get().to_le_bytes(), expected, "of {length} bytes");
        }
    }

    #[test]
    fn halves_make_the_hash_again() {
        let hash = KeyHasher::new(&SECRET).hash(b"block").unwrap();
        assert_eq!(KeyHash::from_halves(hash.high(), hash.low()), hash);
        assert_ne!(hash.high(), hash.low());
    }

    #[test]
    fn keys_of_no_bytes_and_of_65_536_are_refused() {
        let hasher = KeyHasher::new(&SECRET);
        assert_eq!(hasher.hash(b""), Err(KeyError::Empty));
        assert_eq!(hasher.hash(&[7; 65_536]), Err(KeyError::TooLong { bytes: 65_536 }));
        assert!(hasher.hash(&[7; MAX_KEY_BYTES]).is_ok());
    }

    #[test]
    fn the_hash_in_a_group_is_that_of_its_number_and_the_key_at_any_length() {
        let hasher = KeyHasher::new(&SECRET);
        for length in 1..2 * SHORT {
            let whole: Vec<u8> = (0..=250).cycle().take(length + 2).collect();
            let hash = hasher.hash_in_group(0x0100, &whole[2..]).unwrap();
            assert_eq!(hash, hasher.hash(&whole).unwrap(), "{length} bytes");
        }
    }

    #[test]
    fn another_secret_gives_another_hash() {
        let one = KeyHasher::new(&SECRET).hash(b"block").unwrap();
        let other = KeyHasher::new(&[9; 16]).hash(b"block").unwrap();
        assert_ne!(one, other);
    }
}
