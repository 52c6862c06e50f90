//! Refusals of keys.

use crate::MAX_KEY_BYTES;

/// Why a key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key has no bytes.
    #[error(
        "a key has no bytes; state 1 to {MAX_KEY_BYTES} bytes, such as a hash of the block's tokens"
    )]
    Empty,
    /// The key is longer than its length field can state.
    #[error("a key has {bytes} bytes; the maximum is {MAX_KEY_BYTES}: use a hash of it as the key")]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
}
