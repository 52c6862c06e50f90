//! Why a foreign structure is refused, or a column cannot be exported.

use std::fmt;

use arrow_schema::{ArrowError, DataType};
use terrane_core::convert::to_u64;
use terrane_core::{Alignment, ByteCount, DeviceId, SizeOverflow, StorageKind};
use terrane_cuda::CudaError;

use super::DeviceType;
use crate::columns::ColumnError;

/// The position of a field in a nested type: the names of its ancestors and its own name. A field
/// without a name has its number.
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

/// A path during a walk. The text is built only when it is printed.
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

/// Refuses a pointer that is misaligned for `T`. Null is aligned.
pub(crate) fn aligned<T>(
    pointer: *const T,
    what: &'static str,
    trail: Trail<'_>,
) -> Result<(), ImportError> {
    if pointer.is_aligned() {
        return Ok(());
    }
    let address = to_u64(pointer.addr());
    Err(ImportError::MisalignedPointer { what, address, at: trail.path() })
}

/// Why a foreign structure was refused. It has been released by then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// A required pointer is null.
    #[error("at {at}: {what} is null; the producer must set it")]
    Null {
        /// The pointer.
        what: &'static str,
        /// The field.
        at: FieldPath,
    },
    /// A pointer is misaligned for its structure.
    #[error(
        "at {at}: {what} at {address:#x} is misaligned for its structure; request an \
         aligned one"
    )]
    MisalignedPointer {
        /// The pointer.
        what: &'static str,
        /// Its address.
        address: u64,
        /// The field.
        at: FieldPath,
    },
    /// The structure has been moved away or released.
    #[error("at {at}: the {what} has been released or moved; pass one that has not")]
    Released {
        /// Which structure.
        what: &'static str,
        /// The field.
        at: FieldPath,
    },
    /// A number is negative, but must not be.
    #[error("at {at}: {what} is {value}; it must be at least 0")]
    Negative {
        /// The number.
        what: &'static str,
        /// Its value.
        value: i64,
        /// The field.
        at: FieldPath,
    },
    /// The number of buffers or children does not match the type.
    #[error("at {at}: {what} is {found}; {data_type} has {expected}")]
    WrongCount {
        /// `n_buffers` or `n_children`.
        what: &'static str,
        /// The number for the type. For types with any number, the smallest.
        expected: u64,
        /// The actual number.
        found: i64,
        /// The type.
        data_type: Box<str>,
        /// The field.
        at: FieldPath,
    },
    /// A number or a size exceeds the limit of this crate.
    #[error("at {at}: {what} exceeds the limit of {limit}; ask its producer for a smaller array")]
    TooMany {
        /// The number or size.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// The field.
        at: FieldPath,
    },
    /// More rows are null than exist.
    #[error(
        "at {at}: {null_count} nulls among {length} values; there can be no more nulls than values"
    )]
    NullCount {
        /// `null_count`; −1 if it is unknown.
        null_count: i64,
        /// `length`.
        length: u64,
        /// The field.
        at: FieldPath,
    },
    /// A size does not fit in 64 bits.
    #[error(
        "at {at}: the array is larger than any memory; request a smaller one from its producer"
    )]
    Overflow {
        /// The field.
        at: FieldPath,
        /// The size.
        #[source]
        source: SizeOverflow,
    },
    /// A buffer extends past the end of the address space, or is larger than any buffer.
    #[error(
        "at {at}: {length} of {buffer} from {address:#x} on extend past the end of the address \
         space; ask its producer for a valid array"
    )]
    AddressOverflow {
        /// The buffer.
        buffer: &'static str,
        /// Its start.
        address: u64,
        /// The length that it would have.
        length: ByteCount,
        /// The field.
        at: FieldPath,
    },
    /// A buffer is misaligned for its values.
    #[error("at {at}: {buffer} at {address:#x} need an alignment of {required}; copy them")]
    Misaligned {
        /// The buffer.
        buffer: &'static str,
        /// Its start.
        address: u64,
        /// The required alignment.
        required: Alignment,
        /// The field.
        at: FieldPath,
    },
    /// A child is shorter than its parent needs.
    #[error("at {at}: the child has {found} values; the array above it needs {needed}")]
    ShortChild {
        /// The number that the parent needs.
        needed: u64,
        /// The number that exists.
        found: u64,
        /// The field.
        at: FieldPath,
    },
    /// Offsets begin below zero, or end before they begin.
    #[error(
        "at {at}: the offsets run from {first} to {last}; they must begin at 0 or more and not \
         decrease"
    )]
    Offsets {
        /// The first offset.
        first: i64,
        /// The last offset.
        last: i64,
        /// The field.
        at: FieldPath,
    },
    /// A text has no end within the limit, or is not UTF-8.
    #[error(
        "at {at}: the {what} of the schema is not a text of at most {limit} bytes in UTF-8; ask \
         its producer for a valid schema"
    )]
    Text {
        /// `format` or `name`.
        what: &'static str,
        /// The longest accepted text.
        limit: u64,
        /// The field.
        at: FieldPath,
    },
    /// The metadata of a schema is inconsistent.
    #[error(
        "at {at}: in the metadata of the schema, {what} {value}, which is impossible; ask its \
         producer for a valid schema"
    )]
    Metadata {
        /// The value's name.
        what: &'static str,
        /// Its value.
        value: i64,
        /// The field.
        at: FieldPath,
    },
    /// The type is not one of Arrow's, or this version of arrow-rs does not know it.
    #[error(
        "at {at}: the schema's format `{format}` is not a known type; update terrane-arrow, or ask \
         its producer for another type"
    )]
    Format {
        /// The format string.
        format: Box<str>,
        /// The field.
        at: FieldPath,
        /// The error of arrow-rs.
        #[source]
        source: Option<ArrowError>,
    },
    /// The array does not have the requested type.
    #[error(
        "the array has the type {found}, and {expected} was requested; request {found}, or cast \
         the array"
    )]
    WrongType {
        /// The requested type.
        expected: DataType,
        /// The array's type.
        found: DataType,
    },
    /// An array that this crate exported was changed before it was imported again.
    #[error(
        "an array of this library came back with changed contents ({what}); export it again \
         instead"
    )]
    Changed {
        /// The changed part.
        what: &'static str,
    },
    /// Memory of a device that is not supported.
    #[error(
        "memory of device type {device_type}, device {device_id}, is not supported; copy it to the \
         host or a CUDA device"
    )]
    Device {
        /// The kind of device.
        device_type: DeviceType,
        /// Its number.
        device_id: i64,
    },
    /// A synchronisation event was passed for memory whose device has none.
    #[error(
        "a synchronisation event was passed for memory of device type {device_type}, which has no \
         events; pass null"
    )]
    UnexpectedEvent {
        /// The kind of device.
        device_type: DeviceType,
    },
    /// The array is not ready on the host.
    #[error("the array is not in host memory, or not ready; wait for it with `wait_on` or `wait`")]
    NotReady,
    /// The stream or context belongs to another device than the array.
    #[error(
        "the array is on device {array}, and the wait is on device {waited}; use a stream or \
         context of the array's device"
    )]
    WrongDevice {
        /// The array's device.
        array: DeviceId,
        /// The device of the stream or context.
        waited: DeviceId,
    },
    /// The driver refused.
    #[error("the CUDA driver refused the array; see the cause")]
    Cuda {
        /// The driver's error.
        #[from]
        source: CudaError,
    },
    /// arrow-rs refused.
    #[error("arrow-rs refused the array; see the cause")]
    Arrow {
        /// The error of arrow-rs.
        #[source]
        source: ArrowError,
    },
}

/// Why a column cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The processor cannot access the bytes.
    #[error("{kind} memory is not host memory; export it with its device")]
    NotHost {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// Arrow's device interface has no type for such memory.
    #[error("Arrow's device interface has no type for {kind} memory; copy it to the host")]
    NoDevice {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// Buffers of one array are in different kinds of memory.
    #[error("the array has buffers in {first} and in {second} memory; copy them into one kind")]
    Mixed {
        /// The kind of one buffer.
        first: StorageKind,
        /// The kind of another buffer.
        second: StorageKind,
    },
    /// A number exceeds 63 bits, Arrow's limit.
    #[error("{what} is {value}; Arrow's limit is 2^63 − 1")]
    TooLarge {
        /// The number's name.
        what: &'static str,
        /// The number.
        value: u64,
    },
    /// The event that consumers must wait for is not valid.
    #[error(
        "the array cannot be exported, because the last record of its event failed; see the cause, \
         and record the event again"
    )]
    Event {
        /// The driver's error.
        #[source]
        source: CudaError,
    },
    /// The event belongs to another device than the memory.
    #[error(
        "the column is on CUDA device {device}, and the event is of device {found}; use an event \
         of the column's device"
    )]
    EventOfOther {
        /// The memory's device.
        device: DeviceId,
        /// The event's.
        found: DeviceId,
    },
    /// An event was passed for memory that has no events.
    #[error("an event was passed for {kind} memory, which has no events; use `Ready::Now`")]
    UnexpectedEvent {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The column is invalid.
    #[error("the column cannot be exported; see the cause")]
    Column {
        /// The error of the column.
        #[from]
        source: ColumnError,
    },
    /// arrow-rs refused the schema or the array.
    #[error("arrow-rs refused the schema or the array; see the cause")]
    Arrow {
        /// The error of arrow-rs.
        #[from]
        source: ArrowError,
    },
}
