//! Reads and writes the parts of a frame in [postcard](https://postcard.jamesmunns.com).

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use terrane_core::convert::to_u64;
use terrane_core::{BackendName, ByteCount};

use super::{FramePayload, HEADER_BYTES};
use crate::error::{Part, WireError};
use crate::limits::{Limited, WireLimits};

/// Bytes that are encoded with their length.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// The remaining input.
pub(crate) struct Input<'a> {
    rest: &'a [u8],
    /// The offset of the remaining input in the frame.
    offset: usize,
}

impl<'a> Input<'a> {
    pub(crate) fn new(payload: &FramePayload<'a>) -> Self {
        Self { rest: payload.bytes, offset: payload.offset }
    }

    pub(crate) fn take<T: Deserialize<'a>>(&mut self, part: Part) -> Result<T, WireError> {
        let (value, rest) = postcard::take_from_bytes(self.rest)
            .map_err(|cause| malformed(part, self.offset, cause))?;
        // The remaining input is a suffix of the input before.
        self.offset += self.rest.len() - rest.len();
        self.rest = rest;
        Ok(value)
    }

    pub(crate) fn take_name(
        &mut self,
        part: Part,
        limits: &WireLimits,
    ) -> Result<&'a str, WireError> {
        let name: &str = self.take(part)?;
        let bytes = ByteCount::from_usize(name.len());
        limits.check(Limited::Name, bytes.get(), limits.name.get())?;
        Ok(name)
    }

    pub(crate) fn take_set(
        &mut self,
        part: Part,
        names: u32,
        limits: &WireLimits,
    ) -> Result<Arc<[BackendName]>, WireError> {
        limits.check(Limited::Backends, names.into(), limits.backends.into())?;
        let mut set = Vec::with_capacity(self.at_most(names, 1));
        for _ in 0..names {
            set.push(BackendName::from(self.take_name(part, limits)?));
        }
        if !set.is_sorted_by(|a, b| a < b) {
            return Err(WireError::NotCanonical { offset: self.offset });
        }
        Ok(set.into())
    }

    /// The number of items of at least `least` bytes that fit into the input, at most `claimed`.
    pub(crate) fn at_most(&self, claimed: u32, least: usize) -> usize {
        (self.rest.len() / least.max(1)).min(ByteCount::new(claimed.into()).to_usize())
    }

    pub(crate) fn end(self) -> Result<(), WireError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let extra = ByteCount::from_usize(self.rest.len());
        Err(WireError::TrailingBytes { offset: self.offset, extra })
    }
}

pub(crate) fn put<T: Serialize + ?Sized>(
    part: Part,
    value: &T,
    frame: Vec<u8>,
) -> Result<Vec<u8>, WireError> {
    let offset = frame.len();
    postcard::to_extend(value, frame).map_err(|cause| malformed(part, offset, cause))
}

pub(crate) fn put_names(
    part: Part,
    names: &[BackendName],
    frame: Vec<u8>,
) -> Result<Vec<u8>, WireError> {
    names.iter().try_fold(frame, |frame, name| put(part, name.as_str(), frame))
}

fn malformed(part: Part, offset: usize, cause: postcard::Error) -> WireError {
    WireError::Malformed { part, offset, source: Box::new(cause) }
}

pub(crate) fn count(what: Limited, count: usize) -> Result<u32, WireError> {
    let actual = to_u64(count);
    let over = |_| WireError::OverLimit { what, actual, limit: u32::MAX.into() };
    u32::try_from(actual).map_err(over)
}

pub(crate) fn unknown(field: &'static str, tag: u8, known: &'static [u32]) -> WireError {
    WireError::UnknownTag { field, value: tag.into(), known }
}

pub(crate) fn unused(field: &'static str, value: u64) -> Result<(), WireError> {
    if value == 0 { Ok(()) } else { Err(WireError::Unused { field, value }) }
}

/// Checks the names of a set of backends.
pub(crate) fn check_set(number: u32, set: &[BackendName]) -> Result<(), WireError> {
    let of = Part::Backends(number);
    set.iter().try_for_each(|name| check_name(of, name.as_str()))
}

/// Checks that a name is one line of text that C libraries accept and errors can print.
pub(crate) fn check_name(of: Part, name: &str) -> Result<(), WireError> {
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err(WireError::Name { of, name: name.to_owned() });
    }
    Ok(())
}

/// Checks that `bytes` are the canonical encoding. Postcard also accepts numbers that are longer
/// than necessary.
pub(crate) fn check_canonical(bytes: &[u8], canonical: &[u8]) -> Result<(), WireError> {
    if bytes == canonical {
        return Ok(());
    }
    // The length fields may differ, and their offsets do not help the sender.
    let inside = |frame| <[u8]>::get(frame, HEADER_BYTES..).unwrap_or_default();
    let pairs = inside(bytes).iter().zip(inside(canonical));
    let same = pairs.take_while(|(a, b)| a == b).count();
    Err(WireError::NotCanonical { offset: HEADER_BYTES + same })
}
