//! Why something is no column, or a column buffer cannot do what it was asked.

use arrow_schema::DataType;
use terrane_core::{
    Alignment, AllocateError, ByteCount, DeviceId, Location, SizeOverflow, StorageKind,
    ViewOutOfBounds,
};
use terrane_cuda::CudaError;

/// What is wrong with a column or a columnar buffer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ColumnError {
    /// A type whose values are less than nothing long.
    #[error("{data_type} has a width below zero")]
    NegativeWidth {
        /// The type.
        data_type: DataType,
    },
    /// A type that no values can have.
    #[error("{data_type} {reason}; no column can be of it")]
    InvalidType {
        /// The type.
        data_type: DataType,
        /// What is wrong with it, as the rest of a sentence about it.
        reason: &'static str,
    },
    /// There are more rows than Arrow can count, or a type is nested deeper or has more fields than
    /// is taken.
    #[error("more than {limit} {what}, which is the most that a column may have")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// The most that are taken.
        limit: u64,
    },
    /// A column of this type has another number of buffers.
    #[error("{found} buffers, where {data_type} has {expected}")]
    BufferCount {
        /// The type.
        data_type: DataType,
        /// How many it has; of types with any number, the fewest.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// A column of this type has another number of children.
    #[error("{found} children, where {data_type} has {expected}")]
    ChildCount {
        /// The type.
        data_type: DataType,
        /// How many it has.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// A child or the dictionary is of another type than its parent says.
    #[error("`{name}` is of {found}, where {expected} belongs")]
    WrongType {
        /// The child's name.
        name: Box<str>,
        /// What belongs there.
        expected: DataType,
        /// What is there.
        found: DataType,
    },
    /// A buffer that the type needs is missing.
    #[error("{data_type} needs its buffer of {buffer}, and it is missing")]
    MissingBuffer {
        /// The type.
        data_type: DataType,
        /// What the buffer holds.
        buffer: &'static str,
    },
    /// A buffer is too short.
    #[error("{found} of {buffer}, where {rows} rows of {data_type} need {needed}")]
    ShortBuffer {
        /// The type.
        data_type: DataType,
        /// What the buffer holds.
        buffer: &'static str,
        /// How many rows.
        rows: u64,
        /// How long it has to be.
        needed: ByteCount,
        /// How long it is.
        found: ByteCount,
    },
    /// A child is too short.
    #[error("`{name}` has {found} values, where {rows} rows above it need {needed}")]
    ShortChild {
        /// The child's name.
        name: Box<str>,
        /// How many rows the parent has.
        rows: u64,
        /// How many the child needs.
        needed: u64,
        /// How many it has.
        found: u64,
    },
    /// A buffer begins where its values cannot.
    #[error("{buffer} at {location} are not aligned to {required}")]
    Misaligned {
        /// What the buffer holds.
        buffer: &'static str,
        /// Where it begins.
        location: Location,
        /// What that has to be a multiple of.
        required: Alignment,
    },
    /// Elements of another width than the values of a column, or values that are not one after the
    /// other.
    #[error("values of {data_type} are not elements of {element}")]
    WrongElement {
        /// The type of the values.
        data_type: DataType,
        /// The size of an element that was asked for.
        element: ByteCount,
    },
    /// Parts of one column or buffer are in different memories.
    #[error("parts in {first} memory and in {second} memory; bring them together")]
    MixedMemory {
        /// The kind of one.
        first: StorageKind,
        /// The kind of another.
        second: StorageKind,
    },
    /// There are more nulls than rows.
    #[error("{null_count} nulls among {rows} rows")]
    NullCount {
        /// The nulls.
        null_count: u64,
        /// The rows.
        rows: u64,
    },
    /// A size does not fit in 64 bits.
    #[error("the column is larger than any memory")]
    Overflow(#[from] SizeOverflow),
    /// A part of a column that it does not have.
    #[error("rows {offset}..{} of a column of {rows}", .offset.saturating_add(*.length))]
    OutOfBounds {
        /// The first row of the part.
        offset: u64,
        /// How many rows it has.
        length: u64,
        /// How many rows the column has.
        rows: u64,
    },
    /// A tensor or array that came from elsewhere is not to be written.
    #[error("the buffer at {location} came from elsewhere, and is for reading only; copy it")]
    ReadOnly {
        /// Where it begins.
        location: Location,
    },
    /// The processor cannot reach the bytes.
    #[error("{kind} memory is not the host's; copy it there first")]
    NotHost {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// arrow-rs refused the values.
    #[error("arrow-rs refused the values")]
    Arrow(#[from] arrow_schema::ArrowError),
    /// Buffers of this type cannot be laid out by rows alone.
    #[error("`{name}` is of {data_type}, which a columnar buffer cannot reserve rows of")]
    Unsupported {
        /// The column.
        name: Box<str>,
        /// Its type.
        data_type: DataType,
    },
    /// The number of columns is not that of the schema.
    #[error("{found} columns, where the schema has {expected}")]
    ColumnCount {
        /// How many the schema has.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// A column that may not be null has room for nulls, or the reverse.
    #[error("`{name}` has nulls, and the schema says that it has none")]
    UnexpectedNulls {
        /// The column.
        name: Box<str>,
    },
    /// A column has not as many rows as the buffer's capacity.
    #[error("`{name}` has room for {found} rows, where the capacity is {capacity}")]
    ShortColumn {
        /// The column.
        name: Box<str>,
        /// The capacity of the buffer.
        capacity: u64,
        /// How many rows the column has.
        found: u64,
    },
    /// There are more rows than fit.
    #[error("{rows} rows in a buffer with room for {capacity}; grow it before")]
    OverCapacity {
        /// How many rows there are.
        rows: u64,
        /// How many fit.
        capacity: u64,
    },
    /// The count of rows on the device may have changed since it was last read.
    #[error("the row count was last read before the device may have changed it; refresh it first")]
    StaleRowCount,
    /// The buffer may not grow.
    #[error("{needed} rows are needed, and the buffer stays at {capacity} by its policy")]
    FixedCapacity {
        /// How many rows fit.
        capacity: u64,
        /// How many are needed.
        needed: u64,
    },
    /// The memory is too small for the buffer's plan.
    #[error("{found} of memory, where the plan needs {needed}")]
    ShortMemory {
        /// What the plan needs.
        needed: ByteCount,
        /// What there is.
        found: ByteCount,
    },
    /// Memory was refused.
    #[error("memory for the columns was refused")]
    Allocate(#[from] AllocateError),
    /// The device's driver refused.
    #[error("the CUDA driver refused")]
    Cuda(#[from] CudaError),
    /// The bytes cannot be reached from here.
    #[error("{location} cannot be reached in this order; use a stream of its device")]
    Unreachable {
        /// Where the bytes are.
        location: Location,
    },
    /// The stream is of another device than the memory.
    #[error("the columns are on device {columns}, and the stream is of device {stream}")]
    WrongDevice {
        /// The columns' device.
        columns: DeviceId,
        /// The stream's.
        stream: DeviceId,
    },
    /// A tensor cannot be a column.
    #[error("a tensor of {element:?} cannot be a column: it {reason}")]
    Tensor {
        /// Its elements.
        element: terrane_interop::dlpack::ElementType,
        /// What keeps it from being one.
        reason: &'static str,
    },
    /// A column cannot be a tensor.
    #[error("a column of {data_type} is no tensor: only numbers without nulls are")]
    NoTensor {
        /// The column's type.
        data_type: DataType,
    },
    /// A tensor's row has more values than a list of fixed size.
    #[error("{values} values in a row, more than a list of fixed size has")]
    WideRow {
        /// How many.
        values: u64,
    },
    /// The tensor was refused.
    #[error("the column cannot be handed out as a tensor")]
    Export(#[from] terrane_interop::dlpack::ExportError),
    /// A view left its region: the plan and the memory disagree.
    #[error("a column leaves its memory")]
    View(#[from] ViewOutOfBounds),
}
