//! The one error type of this crate.

use std::fmt;

use terrane_core::{BoxedCause, ByteCount, RemoteSpace, StorageKind};
use terrane_layout::{DecodeError, LayoutFingerprint};

use crate::frame::Content;
use crate::{GeometryMismatch, Limited};

/// Why something could not be encoded, or bytes were refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// There is more of something than the receiver takes.
    #[error(
        "{what} is {actual}, and the limit is {limit}; raise it (WireLimits), if that is meant"
    )]
    OverLimit {
        /// What there is too much of.
        what: Limited,
        /// How much.
        actual: u64,
        /// The most that is taken.
        limit: u64,
    },
    /// The bytes end before the frame does.
    #[error(
        "the description of a {content} takes {expected}, and {actual} are here; send all of it"
    )]
    Truncated {
        /// What was expected.
        content: Content,
        /// The bytes of the whole frame; of the shortest that there is, if its length is missing.
        expected: ByteCount,
        /// The bytes that are here.
        actual: ByteCount,
    },
    /// The bytes do not begin as they should.
    #[error(
        "this is no description of a {content}: it begins with \"{}\" and not with \"{}\"",
        .found.escape_ascii(), .expected.escape_ascii()
    )]
    WrongMagic {
        /// What was expected.
        content: Content,
        /// How it begins.
        expected: [u8; 8],
        /// How the bytes begin.
        found: [u8; 8],
    },
    /// Something follows the end.
    #[error("{extra} follow the end, which is at byte {offset}; pass one description, and no more")]
    TrailingBytes {
        /// Where the end is.
        offset: usize,
        /// What follows.
        extra: ByteCount,
    },
    /// The bytes were damaged on their way.
    #[error(
        "the description of a {content} is damaged: its CRC-64 is {computed:#018x}, \
         and it states {stated:#018x}; send it again"
    )]
    Checksum {
        /// What was expected.
        content: Content,
        /// The checksum that it came with.
        stated: u64,
        /// The checksum that it has.
        computed: u64,
    },
    /// The sender is of another time.
    #[error(
        "the description of a {content} is of version {version}, and this library reads version \
         {known}; run the same release on both sides"
    )]
    UnknownVersion {
        /// What was expected.
        content: Content,
        /// Its version.
        version: u32,
        /// The version that can be read.
        known: u32,
    },
    /// A layout is described in version 1, which has a config and a kind in place of strides.
    #[error(
        "the description of a layout is of version 1, which states no strides, and this library reads \
         version 2; update the sender and export the layout again"
    )]
    Version1,
    /// Some part cannot be read at all.
    #[error("{part}, from byte {offset} on, cannot be read")]
    Malformed {
        /// The part.
        part: Part,
        /// Where it begins.
        offset: usize,
        /// Why.
        #[source]
        source: BoxedCause,
    },
    /// A number stands for none of the things that there are.
    #[error("{field} is {value}; there are {}", list(.known))]
    UnknownTag {
        /// What the number is to say.
        field: &'static str,
        /// The number.
        value: u64,
        /// The numbers that mean something.
        known: &'static [u32],
    },
    /// A number stands where none has a meaning.
    #[error("{field} is {value}, and nothing uses it here; it has to be 0")]
    Unused {
        /// What the number would say.
        field: &'static str,
        /// The number.
        value: u64,
    },
    /// A device's number is larger than any.
    #[error("the device is {device}; devices are numbers of 32 bits")]
    NoSuchDevice {
        /// The number.
        device: u64,
    },
    /// A space is newer than the format.
    #[error("a region in {space} space has no form in this version")]
    UnknownSpace {
        /// The space.
        space: RemoteSpace,
    },
    /// A region names a set of backends that is not there.
    #[error("region {region} names set {set} of backends, and there are {sets}, counted from 0")]
    UnknownSet {
        /// The region.
        region: u32,
        /// The set.
        set: u32,
        /// How many there are.
        sets: u32,
    },
    /// The same thing is to be written in one way only, and this is another.
    #[error(
        "byte {offset} is not as this description is written; \
         a sender writes numbers in their shortest form, and names sorted and once"
    )]
    NotCanonical {
        /// The first byte that differs.
        offset: usize,
    },
    /// A name is no name.
    #[error("{of} is \"{}\"; a name has a letter at least, and no control characters", .name.escape_debug())]
    Name {
        /// Whose.
        of: Part,
        /// The name.
        name: String,
    },
    /// The bytes of the geometry are no layout.
    #[error(transparent)]
    Geometry(#[from] DecodeError),
    /// The fingerprint is another geometry's.
    #[error(
        "the fingerprint is {stated}, and that of the strides is {computed}; one of the two was \
         changed on the way, so send the layout again"
    )]
    Fingerprint {
        /// The one that was sent.
        stated: LayoutFingerprint,
        /// The one of the strides that were sent.
        computed: LayoutFingerprint,
    },
    /// There are fewer or more regions than the geometry has.
    #[error("the layout has {expected} regions, and {actual} are described")]
    RegionCount {
        /// The regions of the geometry.
        expected: u64,
        /// The regions that are described.
        actual: u64,
    },
    /// A region is not as long as the geometry says.
    #[error("region {region} has {} bytes, and the geometry says {}", .actual.get(), .expected.get())]
    RegionLength {
        /// The region.
        region: u32,
        /// What the geometry says.
        expected: ByteCount,
        /// What is described.
        actual: ByteCount,
    },
    /// A region ends beyond the last address that there is.
    #[error("region {region} leaves its address space: {} bytes from {address:#x} on", .length.get())]
    AddressOverflow {
        /// The region.
        region: u32,
        /// Where it begins.
        address: u64,
        /// How long it is.
        length: ByteCount,
    },
    /// A region does not begin where its blocks would be aligned.
    #[error(
        "region {region} begins at {address:#x}, no multiple of the block alignment, {alignment}"
    )]
    RegionMisaligned {
        /// The region.
        region: u32,
        /// Where it begins.
        address: u64,
        /// The block alignment, in bytes.
        alignment: u64,
    },
    /// A region is not where the layout's kind of storage is.
    #[error("region {region} is in {space} space, and the layout in {storage} memory")]
    WrongSpace {
        /// The region.
        region: u32,
        /// Where it is.
        space: RemoteSpace,
        /// What the layout is in.
        storage: StorageKind,
    },
    /// Two regions share bytes.
    #[error("regions {first} and {second} overlap")]
    RegionsOverlap {
        /// One of them.
        first: u32,
        /// The other.
        second: u32,
    },
    /// What is to be described has no description.
    #[error(
        "{storage} memory cannot be described to others: it is theirs, or newer than this release"
    )]
    NotOurs {
        /// The kind.
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
