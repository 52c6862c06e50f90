//! Sizes and numbers of arguments.

use terrane_core::ByteCount;
use terrane_plan::{parse_bytes, parse_count};

pub(crate) fn size(text: &str) -> Result<ByteCount, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

pub(crate) fn count(text: &str) -> Result<u64, String> {
    parse_count(text).map_err(|error| error.to_string())
}
