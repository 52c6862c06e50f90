//! Why parts do not form a column, or a columnar buffer refuses a request.

use arrow_schema::DataType;
use terrane_core::{
    Alignment, AllocateError, ByteCount, DeviceId, Location, SizeOverflow, StorageKind,
    ViewOutOfBounds,
};
use terrane_cuda::CudaError;

/// Why a column or a columnar buffer was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ColumnError {
    /// A type whose values have a negative width.
    #[error("{data_type} has a negative width; use a width of at least 0")]
    NegativeWidth {
        /// The type.
        data_type: DataType,
    },
    /// A type that no values can have.
    #[error("{data_type} {reason}; no column can have this type")]
    InvalidType {
        /// The type.
        data_type: DataType,
        /// The fault, as the rest of a sentence about the type.
        reason: &'static str,
    },
    /// A column exceeds a limit of rows, levels or fields.
    #[error("the column has more than {limit} {what}, the maximum; split it")]
    TooMany {
        /// The counted things.
        what: &'static str,
        /// The maximum.
        limit: u64,
    },
    /// The number of buffers does not match the type.
    #[error("{found} buffers were passed; {data_type} has {expected}")]
    BufferCount {
        /// The type.
        data_type: DataType,
        /// The number for the type. For types with any number, the smallest.
        expected: usize,
        /// The actual number.
        found: usize,
    },
    /// The number of children does not match the type.
    #[error("{found} children were passed; {data_type} has {expected}")]
    ChildCount {
        /// The type.
        data_type: DataType,
        /// The number for the type.
        expected: usize,
        /// The actual number.
        found: usize,
    },
    /// A child or the dictionary does not have the type that its parent states.
    #[error("`{name}` has the type {found}; its parent requires {expected}")]
    WrongType {
        /// The child's name.
        name: Box<str>,
        /// The required type.
        expected: DataType,
        /// The actual type.
        found: DataType,
    },
    /// A required buffer is missing.
    #[error("{data_type} requires a buffer of {buffer}, and none was passed; pass one")]
    MissingBuffer {
        /// The type.
        data_type: DataType,
        /// The contents of the buffer.
        buffer: &'static str,
    },
    /// A buffer is too short.
    #[error("the buffer of {buffer} has {found}; {rows} rows of {data_type} need {needed}")]
    ShortBuffer {
        /// The type.
        data_type: DataType,
        /// The contents of the buffer.
        buffer: &'static str,
        /// The number of rows.
        rows: u64,
        /// The required length.
        needed: ByteCount,
        /// The actual length.
        found: ByteCount,
    },
    /// A child is too short.
    #[error("`{name}` has {found} values; {rows} rows above it need {needed}")]
    ShortChild {
        /// The child's name.
        name: Box<str>,
        /// The number of rows of the parent.
        rows: u64,
        /// The number of values that these rows need.
        needed: u64,
        /// The actual number of values.
        found: u64,
    },
    /// A buffer is misaligned for its values.
    #[error("{buffer} at {location} need an alignment of {required}; copy them")]
    Misaligned {
        /// The contents of the buffer.
        buffer: &'static str,
        /// Its start.
        location: Location,
        /// The required alignment.
        required: Alignment,
    },
    /// The requested elements have another width than the values of the column, or the values are
    /// not adjacent.
    #[error(
        "values of {data_type} cannot be accessed as elements of {element}; use elements of the \
         same size, and adjacent values"
    )]
    WrongElement {
        /// The type of the values.
        data_type: DataType,
        /// The size of a requested element.
        element: ByteCount,
    },
    /// Parts of one column or buffer are in different kinds of memory.
    #[error("parts are in {first} memory and in {second} memory; copy them into one kind")]
    MixedMemory {
        /// The kind of one part.
        first: StorageKind,
        /// The kind of another part.
        second: StorageKind,
    },
    /// There are more nulls than rows.
    #[error("{null_count} nulls were stated for {rows} rows; pass at most {rows}")]
    NullCount {
        /// The nulls.
        null_count: u64,
        /// The rows.
        rows: u64,
    },
    /// A size does not fit in 64 bits.
    #[error("the column is larger than any memory; use fewer rows")]
    Overflow(#[from] SizeOverflow),
    /// The requested rows exceed the column.
    #[error(
        "rows {offset}..{} were requested from a column of {rows}; request rows within it",
        .offset.saturating_add(*.length)
    )]
    OutOfBounds {
        /// The first requested row.
        offset: u64,
        /// The number of requested rows.
        length: u64,
        /// The number of rows of the column.
        rows: u64,
    },
    /// The buffer came from another library, and is read-only.
    #[error("the buffer at {location} came from another library and is read-only; copy it")]
    ReadOnly {
        /// Its start.
        location: Location,
    },
    /// The processor cannot access the bytes.
    #[error("{kind} memory is not host memory; copy it to the host first")]
    NotHost {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// arrow-rs refused the values.
    #[error("arrow-rs refused the values; see the cause")]
    Arrow(#[from] arrow_schema::ArrowError),
    /// A column of this type cannot be planned from the number of rows.
    #[error(
        "`{name}` has the type {data_type}, for which a columnar buffer cannot reserve rows; adopt \
         a column instead"
    )]
    Unsupported {
        /// The column.
        name: Box<str>,
        /// Its type.
        data_type: DataType,
    },
    /// The number of columns does not match the schema.
    #[error("{found} columns were passed; the schema has {expected}")]
    ColumnCount {
        /// The number in the schema.
        expected: usize,
        /// The actual number.
        found: usize,
    },
    /// A column has nulls, or a bitmap for them, but the schema declares it as not nullable.
    #[error(
        "`{name}` has nulls, and the schema declares it as not nullable; declare it as nullable, \
         or remove the nulls"
    )]
    UnexpectedNulls {
        /// The column.
        name: Box<str>,
    },
    /// A column has fewer rows than the capacity of the buffer.
    #[error("`{name}` has space for {found} rows; the capacity is {capacity}")]
    ShortColumn {
        /// The column.
        name: Box<str>,
        /// The capacity of the buffer.
        capacity: u64,
        /// The number of rows of the column.
        found: u64,
    },
    /// More rows were requested than fit.
    #[error("{rows} rows do not fit into a buffer with a capacity of {capacity}; grow it first")]
    OverCapacity {
        /// The requested rows.
        rows: u64,
        /// The capacity.
        capacity: u64,
    },
    /// The device may have changed the row count since it was last read.
    #[error(
        "the device may have changed the row count since it was last read; call `refresh` first"
    )]
    StaleRowCount,
    /// The growth policy forbids a larger capacity.
    #[error(
        "{needed} rows are needed, and the capacity is fixed at {capacity}; use another growth \
         policy"
    )]
    FixedCapacity {
        /// The capacity.
        capacity: u64,
        /// The needed rows.
        needed: u64,
    },
    /// The memory is too small for the buffer's plan.
    #[error("the memory has {found}; the plan needs {needed}")]
    ShortMemory {
        /// The size that the plan needs.
        needed: ByteCount,
        /// The size of the memory.
        found: ByteCount,
    },
    /// Memory was refused.
    #[error("the memory for the columns could not be allocated; see the cause")]
    Allocate(#[from] AllocateError),
    /// The device's driver refused.
    #[error("the CUDA driver refused the columns; see the cause")]
    Cuda(#[from] CudaError),
    /// A stream accepted a copy, and the driver then refused to wait for it. The copy may still run.
    #[error(
        "a copy was submitted to the stream, and the driver refused to wait for it; its memory is \
         kept until the process ends; use other memory, and see the cause"
    )]
    EndUnknown(#[source] CudaError),
    /// The bytes cannot be accessed in this order.
    #[error("{location} cannot be accessed in this order; use a stream of its device")]
    Unreachable {
        /// The location of the bytes.
        location: Location,
    },
    /// The stream belongs to another device than the memory.
    #[error(
        "the columns are on device {columns}, and the stream is of device {stream}; use a stream \
         of the columns' device"
    )]
    WrongDevice {
        /// The columns' device.
        columns: DeviceId,
        /// The stream's.
        stream: DeviceId,
    },
    /// A tensor cannot be a column.
    #[error("a tensor of {element:?} cannot become a column: it {reason}")]
    Tensor {
        /// Its elements.
        element: terrane_interop::dlpack::ElementType,
        /// The obstacle, as the rest of a sentence about the tensor.
        reason: &'static str,
    },
    /// A column cannot be a tensor.
    #[error("a column of {data_type} cannot become a tensor; only numbers without nulls can")]
    NoTensor {
        /// The column's type.
        data_type: DataType,
    },
    /// A tensor's row has more values than a list of fixed size.
    #[error(
        "a row has {values} values, more than a list of fixed size can have; use rows of fewer \
         values"
    )]
    WideRow {
        /// The number of values.
        values: u64,
    },
    /// The tensor was refused.
    #[error("the column could not be exported as a tensor; see the cause")]
    Export(#[from] terrane_interop::dlpack::ExportError),
    /// A view exceeds its region: the plan and the memory disagree.
    #[error("a column exceeds its memory; pass the memory that its plan states")]
    View(#[from] ViewOutOfBounds),
}
