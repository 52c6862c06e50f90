//! The two pieces of metadata that an export carries.

use terrane_core::ByteCount;

/// An agent's metadata that is exported with a layout: the connection data, and the keys of the
/// layout's registrations. NIXL writes and loads each separately.
pub(in crate::peers) struct MetadataParts<'a> {
    pub(in crate::peers) connection: &'a [u8],
    pub(in crate::peers) keys: &'a [u8],
}

impl<'a> MetadataParts<'a> {
    /// The length of the first piece in four bytes, little-endian, followed by both pieces.
    pub(in crate::peers) fn join(&self) -> Option<Vec<u8>> {
        let length = u32::try_from(self.connection.len()).ok()?;
        Some([&length.to_le_bytes(), self.connection, self.keys].concat())
    }

    pub(in crate::peers) fn split(metadata: &'a [u8]) -> Option<Self> {
        let (&length, rest) = metadata.split_first_chunk::<4>()?;
        let length = ByteCount::new(u32::from_le_bytes(length).into());
        let (connection, keys) = rest.split_at_checked(length.to_usize())?;
        Some(Self { connection, keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_and_split() {
        let joined = MetadataParts { connection: b"connection", keys: b"keys" }.join().unwrap();
        let parts = MetadataParts::split(&joined).unwrap();
        assert_eq!((parts.connection, parts.keys), (&b"connection"[..], &b"keys"[..]));
        for bytes in [&b""[..], b"\x01\0\0", b"\x05\0\0\0four", b"\xff\xff\xff\xff"] {
            assert!(MetadataParts::split(bytes).is_none(), "{bytes:?}");
        }
    }
}
