//! What is wrong with a foreign structure, or keeps a column from leaving.

use std::fmt;

use arrow_schema::{ArrowError, DataType};
use terrane_core::{Alignment, ByteCount, DeviceId, SizeOverflow, StorageKind};
use terrane_cuda::CudaError;

use super::DeviceType;
use crate::columns::ColumnError;

/// Where in a nested type something is: the names of the fields that lead there, or their numbers
/// where they have no name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldPath(Box<str>);

impl FieldPath {
    /// The path as text; empty at the top.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("the top") } else { write!(f, "`{}`", self.0) }
    }
}

/// A path while it is walked, which costs nothing until it is wanted.
#[derive(Clone, Copy)]
pub(crate) struct Trail<'a> {
    parent: Option<&'a Trail<'a>>,
    step: Step<'a>,
}

#[derive(Clone, Copy)]
enum Step<'a> {
    Top,
    Field(&'a str, usize),
    Dictionary,
}

impl<'a> Trail<'a> {
    pub(crate) const TOP: Self = Self { parent: None, step: Step::Top };

    pub(crate) fn field(&'a self, name: &'a str, index: usize) -> Self {
        Self { parent: Some(self), step: Step::Field(name, index) }
    }

    pub(crate) fn dictionary(&'a self) -> Self {
        Self { parent: Some(self), step: Step::Dictionary }
    }

    pub(crate) fn depth(&self) -> usize {
        self.parent.map_or(0, |parent| parent.depth() + 1)
    }

    pub(crate) fn path(&self) -> FieldPath {
        let mut steps = Vec::new();
        let mut here = Some(self);
        while let Some(trail) = here {
            match trail.step {
                Step::Top => {}
                Step::Field("", index) => steps.push(index.to_string()),
                Step::Field(name, _) => steps.push(name.to_owned()),
                Step::Dictionary => steps.push(String::from("(dictionary)")),
            }
            here = trail.parent;
        }
        steps.reverse();
        FieldPath(steps.join(".").into())
    }
}

/// Refuses a pointer that leads to where no `T` can be. Null is aligned.
pub(crate) fn aligned<T>(
    pointer: *const T,
    what: &'static str,
    trail: Trail<'_>,
) -> Result<(), ImportError> {
    if pointer.is_aligned() {
        return Ok(());
    }
    let address = ByteCount::from_usize(pointer.addr()).get();
    Err(ImportError::MisalignedPointer { what, address, at: trail.path() })
}

/// Why a foreign structure was refused. It has been released when this is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// A pointer that has to lead somewhere does not.
    #[error("at {at}: {what} is null; the producer has to set it")]
    Null {
        /// The pointer.
        what: &'static str,
        /// Of which field.
        at: FieldPath,
    },
    /// A pointer leads to where no such structure can be.
    #[error("at {at}: {what} at {address:#x} is not aligned as its structure has to be")]
    MisalignedPointer {
        /// The pointer.
        what: &'static str,
        /// Where it leads.
        address: u64,
        /// Of which field.
        at: FieldPath,
    },
    /// The structure has been moved away or released.
    #[error("at {at}: the {what} has been released or moved; hand over one that has not")]
    Released {
        /// Which structure.
        what: &'static str,
        /// Of which field.
        at: FieldPath,
    },
    /// A number that may not be negative is.
    #[error("at {at}: {what} is {value}, below zero")]
    Negative {
        /// The number.
        what: &'static str,
        /// Its value.
        value: i64,
        /// Of which field.
        at: FieldPath,
    },
    /// There are more or fewer buffers or children than the type has.
    #[error("at {at}: {what} is {found}, where {data_type} has {expected}")]
    WrongCount {
        /// `n_buffers` or `n_children`.
        what: &'static str,
        /// How many the type has; of types with any number, the fewest.
        expected: u64,
        /// How many there are.
        found: i64,
        /// The type.
        data_type: Box<str>,
        /// Of which field.
        at: FieldPath,
    },
    /// There is more of something than is ever of use.
    #[error("at {at}: {what} exceeds {limit}, the most that is taken")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// Of which field.
        at: FieldPath,
    },
    /// More rows are null than there are.
    #[error("at {at}: {null_count} nulls among {length} values")]
    NullCount {
        /// `null_count`, which is −1 where it is not known.
        null_count: i64,
        /// `length`.
        length: u64,
        /// Of which field.
        at: FieldPath,
    },
    /// A size does not fit in 64 bits.
    #[error("at {at}: the array is larger than any memory")]
    Overflow {
        /// Of which field.
        at: FieldPath,
        /// The size.
        #[source]
        source: SizeOverflow,
    },
    /// A buffer would reach past the end of the address space, or is larger than any.
    #[error("at {at}: {length} of {buffer} from {address:#x} on leave the address space")]
    AddressOverflow {
        /// The buffer.
        buffer: &'static str,
        /// Where it begins.
        address: u64,
        /// How long it would be.
        length: ByteCount,
        /// Of which field.
        at: FieldPath,
    },
    /// A buffer begins where its values cannot.
    #[error("at {at}: {buffer} at {address:#x} are not aligned to {required}; copy them")]
    Misaligned {
        /// The buffer.
        buffer: &'static str,
        /// Where it begins.
        address: u64,
        /// What that has to be a multiple of.
        required: Alignment,
        /// Of which field.
        at: FieldPath,
    },
    /// A child is shorter than its parent needs.
    #[error("at {at}: {found} values, where the array above needs {needed}")]
    ShortChild {
        /// How many are needed.
        needed: u64,
        /// How many there are.
        found: u64,
        /// Of which field.
        at: FieldPath,
    },
    /// Offsets begin below zero, or end before they begin.
    #[error("at {at}: offsets run from {first} to {last}")]
    Offsets {
        /// The first offset.
        first: i64,
        /// The last offset.
        last: i64,
        /// Of which field.
        at: FieldPath,
    },
    /// A text has no end within reach, or is not UTF-8.
    #[error("at {at}: the {what} of the schema is no text of at most {limit} bytes in UTF-8")]
    Text {
        /// `format` or `name`.
        what: &'static str,
        /// The longest text that is taken.
        limit: u64,
        /// Of which field.
        at: FieldPath,
    },
    /// The metadata of a schema does not add up.
    #[error("at {at}: the metadata of the schema says {what} {value}")]
    Metadata {
        /// What is out of bounds.
        what: &'static str,
        /// Its value.
        value: i64,
        /// Of which field.
        at: FieldPath,
    },
    /// The type is none that Arrow has, or one that this version of arrow-rs does not know.
    #[error("at {at}: the schema's format `{format}` is no type that is known")]
    Format {
        /// The format string.
        format: Box<str>,
        /// Of which field.
        at: FieldPath,
        /// What arrow-rs says.
        #[source]
        source: Option<ArrowError>,
    },
    /// The array is not of the type that was said.
    #[error("the array is of {found}, and was said to be of {expected}")]
    WrongType {
        /// What was said.
        expected: DataType,
        /// What it is.
        found: DataType,
    },
    /// An array that came from here was changed before it came back.
    #[error("an array of this library came back with its {what} changed; export it again instead")]
    Changed {
        /// What was changed.
        what: &'static str,
    },
    /// Memory of a device that is not supported.
    #[error("memory of device type {device_type}, device {device_id}, is not supported; copy it")]
    Device {
        /// The sort of device.
        device_type: DeviceType,
        /// Its number.
        device_id: i64,
    },
    /// A synchronisation event came with memory whose device has none.
    #[error("a synchronisation event came with memory of device type {device_type}")]
    UnexpectedEvent {
        /// The sort of device.
        device_type: DeviceType,
    },
    /// The array is not ready on the host.
    #[error("the array is not the host's, or not ready; wait for it on a stream, or by a context")]
    NotReady,
    /// The stream or context is of another device than the array.
    #[error("the array is on device {array}, and was waited for on device {waited}")]
    WrongDevice {
        /// The array's device.
        array: DeviceId,
        /// The stream's or context's.
        waited: DeviceId,
    },
    /// The driver refused.
    #[error("the CUDA driver refused the array")]
    Cuda {
        /// What it said.
        #[source]
        source: CudaError,
    },
    /// arrow-rs refused.
    #[error("arrow-rs refused the array")]
    Arrow {
        /// What it said.
        #[source]
        source: ArrowError,
    },
}

impl From<CudaError> for ImportError {
    fn from(source: CudaError) -> Self {
        Self::Cuda { source }
    }
}

/// Why a column cannot be handed out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The processor cannot reach the bytes.
    #[error("{kind} memory is not the host's; export it with its device")]
    NotHost {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// Arrow has no name for such memory.
    #[error("{kind} memory is none that Arrow's device interface knows; copy it to the host")]
    NoDevice {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// Buffers of one array are in different memories.
    #[error("buffers of one array are in {first} and in {second} memory; bring them together")]
    Mixed {
        /// The kind of one.
        first: StorageKind,
        /// The kind of another.
        second: StorageKind,
    },
    /// A number is larger than the 63 bits that Arrow has.
    #[error("{what} is {value}, more than Arrow's 63 bits hold")]
    TooLarge {
        /// The number's name.
        what: &'static str,
        /// The number.
        value: u64,
    },
    /// The event that consumers are to wait for proves nothing.
    #[error("the event after which the array is ready cannot be handed out")]
    Event {
        /// What the driver says of it.
        #[source]
        source: CudaError,
    },
    /// An event of another device than the memory's, where consumers look for one of the same.
    #[error("the column is on CUDA device {device}, and the event is of device {found}")]
    EventOfOther {
        /// The memory's device.
        device: DeviceId,
        /// The event's.
        found: DeviceId,
    },
    /// An event was given for memory that has none.
    #[error("an event was given for {kind} memory, which is ready once it is written")]
    UnexpectedEvent {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The column as such.
    #[error("the column cannot be exported")]
    Column {
        /// Why not.
        #[source]
        source: ColumnError,
    },
    /// arrow-rs refused the schema or the array.
    #[error("arrow-rs refused")]
    Arrow {
        /// What it said.
        #[source]
        source: ArrowError,
    },
}

impl From<ArrowError> for ExportError {
    fn from(source: ArrowError) -> Self {
        Self::Arrow { source }
    }
}

impl From<ColumnError> for ExportError {
    fn from(source: ColumnError) -> Self {
        Self::Column { source }
    }
}
