//! A column: values of one type, in memory of any kind and owner.

use std::sync::Arc;

use arrow_schema::DataType;
use terrane_core::{ByteCount, Location, Region, StorageKind};

use super::shape::{self, ChildRows, Extent};
use super::{ColumnBuffer, ColumnError, types};

/// The owner of a column's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// Terrane's: exported memory is recognised when it is imported again.
    Owned,
    /// A tensor of another library, imported with DLPack.
    DlPack,
    /// An array of another library, imported with Arrow's C interfaces.
    Arrow,
}

/// The parts of a column, with the names and the order of Arrow's columnar format.
#[derive(Clone, Debug)]
pub struct ColumnParts {
    /// The type of the values.
    pub data_type: DataType,
    /// The number of rows.
    pub length: u64,
    /// The number of rows in the buffers before the first one.
    pub offset: u64,
    /// The number of null rows, if it is known.
    pub null_count: Option<u64>,
    /// The buffers, the validity bitmap first if the type has one; `None` if a buffer is omitted.
    /// The last buffer of views has the lengths of the data. It may be omitted, or be in host
    /// memory, because the export computes it from the data.
    pub buffers: Vec<Option<ColumnBuffer>>,
    /// The children: a struct's columns, a list's values.
    pub children: Vec<Column>,
    /// The values that a dictionary's keys refer to.
    pub dictionary: Option<Column>,
}

/// Values of one type, on the host or on a device.
///
/// A clone shares the memory and costs a reference count. The constructors check that the buffers
/// exist, are long enough and aligned, and are in one memory. They do not check the contents.
///
/// ```
/// use arrow_schema::DataType;
/// use terrane_core::{Allocate, ByteCount, Region, RegionRequest};
/// use terrane_arrow::columns::{Column, Origin};
/// use terrane_storage::{SystemAllocator, SystemOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = SystemAllocator::new(SystemOptions::default());
/// let memory = memory.allocate(&RegionRequest::new(ByteCount::new(4 * 1000)))?;
/// let scores = Column::new(DataType::Float32, 1000, Region::new(memory))?;
/// assert_eq!((scores.len(), scores.origin()), (1000, Origin::Owned));
/// assert_eq!(scores.slice(10, 5)?.offset(), 10);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Column {
    parts: Arc<ColumnParts>,
    origin: Origin,
    size: Size,
}

/// The nesting of a column. Columns are shared, so a few columns can occur at many places.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// The levels below this one.
    levels: u64,
    /// The columns, including this one, counted at each place where they occur.
    columns: u64,
}

impl Size {
    fn of(parts: &ColumnParts) -> Self {
        let below = parts.children.iter().chain(&parts.dictionary).map(|column| column.size);
        let alone = Self { levels: 0, columns: 1 };
        below.fold(alone, |all, size| Self {
            levels: all.levels.max(size.levels + 1),
            // Each column is checked before it becomes a part of another one, so this does not
            // overflow.
            columns: all.columns + size.columns,
        })
    }
}

impl Column {
    /// A column of Terrane's memory without nulls, whose values are adjacent in `values`. Its type
    /// has a fixed width, or is boolean with eight values in a byte.
    ///
    /// # Errors
    ///
    /// [`ColumnError`] if the region is too short or misaligned, or the type has other buffers.
    pub fn new(data_type: DataType, length: u64, values: Region) -> Result<Self, ColumnError> {
        let parts = ColumnParts {
            data_type,
            length,
            offset: 0,
            null_count: Some(0),
            buffers: vec![None, Some(values.into())],
            children: vec![],
            dictionary: None,
        };
        Self::from_parts(parts)
    }

    /// A column of any type. Its buffers and children determine its origin.
    ///
    /// # Errors
    ///
    /// [`ColumnError`] if the parts do not form a column.
    pub fn from_parts(parts: ColumnParts) -> Result<Self, ColumnError> {
        check(&parts)?;
        Ok(Self::of_checked(parts, Origin::Owned))
    }

    /// The type of the values.
    #[must_use]
    pub fn data_type(&self) -> &DataType {
        &self.parts.data_type
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.parts.length
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.length == 0
    }

    /// The number of rows in the buffers before the first one.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.parts.offset
    }

    /// The number of null rows, if it is known.
    #[must_use]
    pub fn null_count(&self) -> Option<u64> {
        self.parts.null_count
    }

    /// The buffers, the validity bitmap first if the type has one.
    #[must_use]
    pub fn buffers(&self) -> &[Option<ColumnBuffer>] {
        &self.parts.buffers
    }

    /// The children: a struct's columns, a list's values.
    #[must_use]
    pub fn children(&self) -> &[Self] {
        &self.parts.children
    }

    /// The values that a dictionary's keys refer to.
    #[must_use]
    pub fn dictionary(&self) -> Option<&Self> {
        self.parts.dictionary.as_ref()
    }

    /// The owner of the memory: Terrane if it owns all of it, otherwise the owner of the first
    /// foreign part.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The kind of memory, which is the same for all buffers and children; `None` for a column
    /// without any.
    #[must_use]
    pub fn kind(&self) -> Option<StorageKind> {
        kind_of(&self.parts)
    }

    /// The location of the values, that is, the last buffer of a type of fixed width. `None` for
    /// other types.
    #[must_use]
    pub fn values(&self) -> Option<Location> {
        shape::width(self.data_type())?;
        Some(self.parts.buffers.get(1)?.as_ref()?.location())
    }

    /// Whether both are the same rows of the same buffers, not only equal values. Writability is
    /// not compared.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let (one, two) = (&*self.parts, &*other.parts);
        Arc::ptr_eq(&self.parts, &other.parts)
            || (one.length, one.offset) == (two.length, two.offset)
                && one.data_type == two.data_type
                && all(&one.buffers, &two.buffers, |one, two| match (one, two) {
                    (Some(one), Some(two)) => one.same_memory(two) && one.span() == two.span(),
                    (one, two) => one.is_none() && two.is_none(),
                })
                && all(&one.children, &two.children, Self::is_same)
                && match (&one.dictionary, &two.dictionary) {
                    (Some(one), Some(two)) => one.is_same(two),
                    (one, two) => one.is_none() && two.is_none(),
                }
    }

    /// The same column with writable buffers, for Terrane's memory that was exported and imported
    /// again.
    ///
    /// # Safety
    ///
    /// As for [`ColumnBuffer::into_writable`], for every buffer.
    #[must_use]
    pub unsafe fn into_writable(self) -> Self {
        // SAFETY: the caller's promise.
        self.with_buffers(&|buffer| unsafe { buffer.clone().into_writable() })
    }

    /// The `length` rows from `offset` on, in the same memory.
    ///
    /// # Errors
    ///
    /// [`ColumnError::OutOfBounds`] if there are fewer rows.
    pub fn slice(&self, offset: u64, length: u64) -> Result<Self, ColumnError> {
        let rows = self.len();
        let out = ColumnError::OutOfBounds { offset, length, rows };
        match offset.checked_add(length) {
            Some(end) if end <= rows => {}
            _ => return Err(out),
        }
        let Some(offset) = self.offset().checked_add(offset) else { return Err(out) };
        // The number of nulls in the part is unknown without reading the bits.
        let null_count = self.null_count().filter(|nulls| *nulls == 0 || length == rows);
        let parts = ColumnParts { offset, length, null_count, ..(*self.parts).clone() };
        Ok(Self { parts: Arc::new(parts), ..*self })
    }

    /// A column of checked parts. If no part has an owner, its origin is `empty`.
    pub(crate) fn of_checked(parts: ColumnParts, empty: Origin) -> Self {
        let buffers = parts.buffers.iter().flatten().filter(|buffer| !buffer.length().is_zero());
        let below = parts.children.iter().chain(&parts.dictionary).map(Self::origin);
        let mut origins = buffers.map(ColumnBuffer::origin).chain(below).peekable();
        let otherwise = if origins.peek().is_some() { Origin::Owned } else { empty };
        let origin = origins.find(|origin| *origin != Origin::Owned).unwrap_or(otherwise);
        Self { size: Size::of(&parts), parts: Arc::new(parts), origin }
    }

    /// The same column with other buffers, including those of its children.
    pub(crate) fn with_buffers(&self, change: &dyn Fn(&ColumnBuffer) -> ColumnBuffer) -> Self {
        let below = |column: &Self| column.with_buffers(change);
        let parts = ColumnParts {
            buffers: self.buffers().iter().map(|buffer| buffer.as_ref().map(change)).collect(),
            children: self.children().iter().map(below).collect(),
            dictionary: self.dictionary().map(below),
            ..(*self.parts).clone()
        };
        Self { parts: Arc::new(parts), ..*self }
    }

    /// Whether some buffer meets the condition, including those of its children.
    pub(crate) fn has_buffer(&self, is_so: &dyn Fn(&ColumnBuffer) -> bool) -> bool {
        let mut below = self.children().iter().chain(self.dictionary());
        self.buffers().iter().flatten().any(is_so) || below.any(|column| column.has_buffer(is_so))
    }
}

/// Whether both have the same length, and each pair meets the condition.
fn all<T>(one: &[T], two: &[T], fits: impl Fn(&T, &T) -> bool) -> bool {
    one.len() == two.len() && one.iter().zip(two).all(|(one, two)| fits(one, two))
}

/// The kind of memory of the first buffer found.
fn kind_of(parts: &ColumnParts) -> Option<StorageKind> {
    let placed = shape::placed(&parts.data_type, &parts.buffers);
    let own = placed.iter().flatten().map(ColumnBuffer::kind).next();
    let below = || parts.children.iter().chain(&parts.dictionary).find_map(Column::kind);
    own.or_else(below)
}

fn check(parts: &ColumnParts) -> Result<(), ColumnError> {
    let ColumnParts { data_type, length, offset, .. } = parts;
    types::check_level(data_type).map_err(|fault| fault.of(data_type))?;
    let Size { levels, columns } = Size::of(parts);
    types::check_size(levels, columns)?;
    let rows = ByteCount::new(*length).checked_add(ByteCount::new(*offset))?.get();
    types::check_rows(rows)?;
    if let Some(null_count) = parts.null_count.filter(|null_count| null_count > length) {
        return Err(ColumnError::NullCount { null_count, rows: *length });
    }
    check_buffers(parts, rows)?;
    check_children(parts, rows)?;
    let placed = shape::placed(data_type, &parts.buffers).iter().flatten();
    let kinds = placed.map(ColumnBuffer::kind);
    let below = parts.children.iter().chain(&parts.dictionary).filter_map(Column::kind);
    let mut kinds = kinds.chain(below);
    if let Some(first) = kinds.next()
        && let Some(second) = kinds.find(|kind| *kind != first)
    {
        return Err(ColumnError::MixedMemory { first, second });
    }
    Ok(())
}

fn check_buffers(parts: &ColumnParts, rows: u64) -> Result<(), ColumnError> {
    let data_type = &parts.data_type;
    let found = parts.buffers.len();
    let (expected, is_variadic) = shape::fewest_buffers(data_type);
    if found < expected || (found > expected && !is_variadic) {
        return Err(ColumnError::BufferCount { data_type: data_type.clone(), expected, found });
    }
    for (buffer, shape) in parts.buffers.iter().zip(shape::buffers(data_type, rows, found)?) {
        let needed = match shape.extent {
            Extent::Exact(bytes) | Extent::Sizes(bytes) => bytes,
            Extent::ByOffsets | Extent::Listed => ByteCount::ZERO,
        };
        let Some(buffer) = buffer else {
            let has_nulls = parts.null_count.is_some_and(|nulls| nulls > 0);
            let is_optional = matches!(shape.extent, Extent::Sizes(_));
            if needed.is_zero() || is_optional || (shape.optional && !has_nulls) {
                continue;
            }
            let data_type = data_type.clone();
            return Err(ColumnError::MissingBuffer { data_type, buffer: shape.name });
        };
        if buffer.length() < needed {
            return Err(ColumnError::ShortBuffer {
                data_type: data_type.clone(),
                buffer: shape.name,
                rows,
                needed,
                found: buffer.length(),
            });
        }
        let location = buffer.location();
        if !buffer.length().is_zero() && location.alignment() < shape.alignment {
            let required = shape.alignment;
            return Err(ColumnError::Misaligned { buffer: shape.name, location, required });
        }
    }
    Ok(())
}

fn check_children(parts: &ColumnParts, rows: u64) -> Result<(), ColumnError> {
    let data_type = &parts.data_type;
    let expected = shape::children(data_type, rows)?;
    if expected.len() != parts.children.len() {
        let (expected, found) = (expected.len(), parts.children.len());
        return Err(ColumnError::ChildCount { data_type: data_type.clone(), expected, found });
    }
    for ((field, needed), child) in expected.into_iter().zip(&parts.children) {
        let name = field.name();
        of_type(name, field.data_type(), child)?;
        if let ChildRows::AtLeast(needed) = needed
            && child.len() < needed
        {
            let found = child.len();
            return Err(ColumnError::ShortChild {
                name: name.as_str().into(),
                rows,
                needed,
                found,
            });
        }
    }
    match (data_type, &parts.dictionary) {
        (DataType::Dictionary(_, values), Some(dictionary)) => {
            of_type("(dictionary)", values, dictionary)
        }
        (DataType::Dictionary(..), None) => {
            let data_type = data_type.clone();
            Err(ColumnError::MissingBuffer { data_type, buffer: "dictionary values" })
        }
        (_, Some(_)) => {
            let data_type = data_type.clone();
            Err(ColumnError::ChildCount { data_type, expected: 0, found: 1 })
        }
        (_, None) => Ok(()),
    }
}

fn of_type(name: &str, expected: &DataType, child: &Column) -> Result<(), ColumnError> {
    if child.data_type() == expected {
        return Ok(());
    }
    let (expected, found) = (expected.clone(), child.data_type().clone());
    Err(ColumnError::WrongType { name: name.into(), expected, found })
}
