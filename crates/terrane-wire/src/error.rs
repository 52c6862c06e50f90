//! The error type of this crate.

use std::fmt;

use terrane_core::{BoxedCause, ByteCount, RemoteSpace, StorageKind};
use terrane_layout::{DecodeError, LayoutFingerprint};

use crate::difference::GeometryMismatch;
use crate::frame::Content;
use crate::limits::Limited;

/// The reason why a value could not be encoded, or bytes were refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// A count or length exceeds the receiver's limit.
    #[error(
        "{what} is {actual}, and the limit is {limit}; raise it in `WireLimits` if the sender is right"
    )]
    OverLimit {
        /// The field that exceeds its limit.
        what: Limited,
        /// The received value.
        actual: u64,
        /// The limit.
        limit: u64,
    },
    /// The input ends before the frame does.
    #[error(
        "the description of a {content} needs {expected}, and the input has {actual}; pass all of it"
    )]
    Truncated {
        /// The expected content.
        content: Content,
        /// The length of the whole frame; of the shortest valid frame, if the length field is missing.
        expected: ByteCount,
        /// The length of the input.
        actual: ByteCount,
    },
    /// The input begins with another magic.
    #[error(
        "the input is not the description of a {content}: it begins with \"{}\" instead of \"{}\"; \
         pass bytes that `encode` returned",
        .found.escape_ascii(), .expected.escape_ascii()
    )]
    WrongMagic {
        /// The expected content.
        content: Content,
        /// The magic of that content.
        expected: [u8; 8],
        /// The first bytes of the input.
        found: [u8; 8],
    },
    /// Bytes follow the end of the description.
    #[error(
        "{extra} follow the end of the description at byte {offset}; pass one description only"
    )]
    TrailingBytes {
        /// The offset of the end.
        offset: usize,
        /// The length of the bytes after the end.
        extra: ByteCount,
    },
    /// The bytes were damaged in transit.
    #[error(
        "the description of a {content} is damaged: its CRC-64 is {computed:#018x} instead of \
         {stated:#018x}; send it again"
    )]
    Checksum {
        /// The expected content.
        content: Content,
        /// The checksum in the frame.
        stated: u64,
        /// The checksum of the received bytes.
        computed: u64,
    },
    /// The sender uses another version of the format.
    #[error(
        "the description of a {content} has version {version}, and this library reads version {known}; \
         run the same release on both sides"
    )]
    UnknownVersion {
        /// The expected content.
        content: Content,
        /// Its version.
        version: u32,
        /// The version that this library reads.
        known: u32,
    },
    /// The description of a layout has version 1, which contains a config and a kind instead of
    /// strides.
    #[error(
        "the description of a layout has version 1, which contains no strides, and this library reads \
         version 2; update the sender and export the layout again"
    )]
    Version1,
    /// A part cannot be decoded.
    #[error("{part} at byte {offset} cannot be decoded; send the description again")]
    Malformed {
        /// The part.
        part: Part,
        /// Its offset.
        offset: usize,
        /// The decoder's error.
        #[source]
        source: BoxedCause,
    },
    /// A tag has no meaning.
    #[error("{field} has the unknown tag {value}; the known tags are {}", list(.known))]
    UnknownTag {
        /// The field.
        field: &'static str,
        /// The tag.
        value: u64,
        /// The known tags.
        known: &'static [u32],
    },
    /// An unused field is not 0.
    #[error("{field} is {value}, but it is unused here and must be 0; correct the sender")]
    Unused {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A device number exceeds 32 bits.
    #[error("the device number is {device}; the maximum is 4294967295")]
    NoSuchDevice {
        /// The number.
        device: u64,
    },
    /// This version of the format cannot encode an address space.
    #[error(
        "this version of the format cannot encode a region in {space} space; update terrane-wire"
    )]
    UnknownSpace {
        /// The space.
        space: RemoteSpace,
    },
    /// A region refers to a set of backends that does not exist.
    #[error(
        "region {region} refers to set {set} of backends, and there are {sets}, counted from 0; \
         name one of them"
    )]
    UnknownSet {
        /// The region.
        region: u32,
        /// The set.
        set: u32,
        /// The number of sets.
        sets: u32,
    },
    /// The encoding is not the canonical one.
    #[error(
        "the encoding is not canonical from byte {offset} on; a sender must write numbers in their \
         shortest form, and names sorted and once"
    )]
    NotCanonical {
        /// The first byte that differs.
        offset: usize,
    },
    /// A name is invalid.
    #[error("\"{}\" is not a valid name ({of}); a name must not be empty or contain control characters", .name.escape_debug())]
    Name {
        /// The part with the name.
        of: Part,
        /// The name.
        name: String,
    },
    /// The bytes of the geometry are not a valid geometry.
    #[error(transparent)]
    Geometry(#[from] DecodeError),
    /// The fingerprint does not match the geometry.
    #[error(
        "the fingerprint is {stated}, and the strides have {computed}; one of them was changed in \
         transit, so send the layout again"
    )]
    Fingerprint {
        /// The received fingerprint.
        stated: LayoutFingerprint,
        /// The fingerprint of the received strides.
        computed: LayoutFingerprint,
    },
    /// The number of regions does not match the geometry.
    #[error(
        "the geometry has {expected} regions, and {actual} are described; describe each region once"
    )]
    RegionCount {
        /// The number in the geometry.
        expected: u64,
        /// The number of described regions.
        actual: u64,
    },
    /// The length of a region does not match the geometry.
    #[error(
        "region {region} has {} bytes, and the geometry requires {}; describe the regions of this \
         geometry",
        .actual.get(), .expected.get()
    )]
    RegionLength {
        /// The region.
        region: u32,
        /// The length in the geometry.
        expected: ByteCount,
        /// The described length.
        actual: ByteCount,
    },
    /// A region ends beyond its address space.
    #[error(
        "region {region} exceeds its address space: it has {} bytes from {address:#x} on; correct \
         its address or its length",
        .length.get()
    )]
    AddressOverflow {
        /// The region.
        region: u32,
        /// Its address.
        address: u64,
        /// Its length.
        length: ByteCount,
    },
    /// The address of a region is not a multiple of the block alignment.
    #[error(
        "region {region} begins at {address:#x}, which is not a multiple of the block alignment, \
         {alignment}; align the memory"
    )]
    RegionMisaligned {
        /// The region.
        region: u32,
        /// Its address.
        address: u64,
        /// The block alignment, in bytes.
        alignment: u64,
    },
    /// The address space of a region does not match the layout's storage.
    #[error(
        "region {region} is in {space} space, but the layout is in {storage} memory; describe its \
         regions in that space"
    )]
    WrongSpace {
        /// The region.
        region: u32,
        /// Its address space.
        space: RemoteSpace,
        /// The layout's storage.
        storage: StorageKind,
    },
    /// Two regions share bytes.
    #[error("regions {first} and {second} overlap; describe disjoint regions")]
    RegionsOverlap {
        /// The first.
        first: u32,
        /// The second.
        second: u32,
    },
    /// The format cannot describe this kind of memory.
    #[error(
        "{storage} memory cannot be described: it belongs to a peer, or is newer than this \
         release; describe memory of this process, or update terrane-wire"
    )]
    NotOurs {
        /// Its kind.
        storage: StorageKind,
    },
    /// The geometry is not the expected one.
    #[error(transparent)]
    Mismatch(#[from] GeometryMismatch),
}

/// A part of an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part {
    /// The sections, their strides, and the lengths of the regions.
    Geometry,
    /// Fingerprint, storage kind, and the counts of what follows.
    Header,
    /// The agent's name.
    Agent,
    /// The agent's metadata.
    Metadata,
    /// A set of backends' names, counted from 0.
    Backends(u32),
    /// A region, counted from 0.
    Region(u32),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Geometry => f.pad("the geometry"),
            Self::Header => f.pad("the header"),
            Self::Agent => f.pad("the agent's name"),
            Self::Metadata => f.pad("the agent's metadata"),
            Self::Backends(set) => write!(f, "set {set} of backends"),
            Self::Region(region) => write!(f, "region {region}"),
        }
    }
}

fn list(known: &[u32]) -> String {
    known.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}
