//! Converts an array and its descendants to a column, and checks every field.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use arrow_schema::DataType;
use terrane_core::convert::to_u64;
use terrane_core::{
    ByteCount, DeviceAddress, DeviceId, ForeignMemory, HostAddress, Location, Region, Span,
    StorageKind,
};

use super::abi::{ArrowArray, DeviceType, Owned};
use super::error::{ImportError, Trail, aligned};
use super::offsets::OffsetReader;
use crate::columns::exported_memory;
use crate::columns::shape::{self, BufferShape, ChildRows, Extent};
use crate::columns::types::MOST_ROWS;
use crate::columns::{Column, ColumnBuffer, ColumnParts, Origin};

/// The most buffers of one array. Only views have more than three.
const MOST_BUFFERS: u64 = 1 << 20;
/// The most bytes of one buffer. No processor gives a process more address space.
const MOST_BYTES: u64 = 1 << 56;

/// The memory to which an array's addresses belong.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) kind: StorageKind,
}

impl Place {
    pub(super) const SYSTEM: Self = Self { kind: StorageKind::System };

    pub(super) fn new(device_type: DeviceType, device_id: i64) -> Result<Self, ImportError> {
        let unknown = ImportError::Device { device_type, device_id };
        let kind = match device_type {
            DeviceType::CPU => StorageKind::System,
            DeviceType::CUDA_HOST => StorageKind::Pinned,
            DeviceType::CUDA => match u32::try_from(device_id) {
                Ok(device) => StorageKind::Device(DeviceId::new(device)),
                Err(_) => return Err(unknown),
            },
            _ => return Err(unknown),
        };
        Ok(Self { kind })
    }

    /// A pointer as a location of that memory.
    fn location(self, pointer: NonNull<u8>) -> Location {
        match self.kind {
            StorageKind::Device(device) => {
                let address = to_u64(pointer.addr().get());
                Location::Device { device, address: DeviceAddress::new(address) }
            }
            _ => Location::Host(HostAddress::new(pointer)),
        }
    }
}

/// The import of an array.
pub(super) struct Import<'a> {
    pub(super) owner: Arc<Owned<ArrowArray>>,
    pub(super) place: Place,
    pub(super) reader: &'a dyn OffsetReader,
}

impl Import<'_> {
    /// The column of the imported array, or of a descendant.
    ///
    /// # Safety
    ///
    /// The array's pointers are valid for the stated sizes. No code writes the buffers that are
    /// read here.
    pub(super) unsafe fn column(
        &self,
        data_type: &DataType,
        array: &ArrowArray,
        trail: Trail<'_>,
    ) -> Result<Column, ImportError> {
        if array.release.is_none() {
            return Err(ImportError::Released { what: "ArrowArray", at: trail.path() });
        }
        let rows = Rows::of(array, trail)?;
        // SAFETY: the caller's promise.
        let (buffers, last_offset) = unsafe { self.buffers(data_type, array, &rows, trail) }?;
        let has_nulls = buffers.first().is_some_and(Option::is_some);
        let can_be_null =
            shape::fewest_buffers(data_type).0 > 0 && !matches!(data_type, DataType::Union(..));
        let null_count = match (rows.null_count, can_be_null, has_nulls) {
            // Without a bitmap there are no nulls. For unions and runs, the values determine them.
            (None, true, false) | (_, false, _) => Some(0),
            (Some(nulls), true, false) if nulls > 0 => {
                return Err(ImportError::Null { what: "the validity bitmap", at: trail.path() });
            }
            (nulls, ..) => nulls,
        };
        let null_count = if *data_type == DataType::Null { Some(rows.length) } else { null_count };
        // SAFETY: the caller's promise.
        let children = unsafe { self.children(data_type, array, &rows, last_offset, trail) }?;
        // SAFETY: the caller's promise.
        let dictionary = unsafe { self.dictionary(data_type, array, trail) }?;
        let Rows { length, offset, .. } = rows;
        let data_type = data_type.clone();
        let parts =
            ColumnParts { data_type, length, offset, null_count, buffers, children, dictionary };
        Ok(Column::of_checked(parts, Origin::Arrow))
    }

    /// The buffers, and the last offset, if it has been read.
    ///
    /// # Safety
    ///
    /// As for [`column`](Self::column).
    unsafe fn buffers(
        &self,
        data_type: &DataType,
        array: &ArrowArray,
        rows: &Rows,
        trail: Trail<'_>,
    ) -> Result<(Vec<Option<ColumnBuffer>>, Option<u64>), ImportError> {
        let count = count_buffers(data_type, array, trail)?;
        let overflow = |source| ImportError::Overflow { at: trail.path(), source };
        let shapes = shape::buffers(data_type, rows.end, count).map_err(overflow)?;
        // SAFETY: the array has as many pointers as it counts, as the caller promised, and that
        // count was compared with the type.
        let pointers = unsafe { pointers(array.buffers, count, "buffers", trail) }?;
        let listed = self.listed(&shapes, &pointers, trail)?;
        let mut last_offset = None;
        let mut buffers: Vec<Option<ColumnBuffer>> = Vec::with_capacity(count);
        for (index, (shape, pointer)) in shapes.iter().zip(&pointers).enumerate() {
            let bytes = match shape.extent {
                Extent::Exact(bytes) => bytes,
                Extent::ByOffsets => ByteCount::new(last_offset.unwrap_or(0)),
                Extent::Listed => match &listed {
                    // The data buffers follow the validity and the views.
                    Some(sizes) => sizes.get(index.wrapping_sub(2)).copied().unwrap_or_default(),
                    None => ByteCount::ZERO,
                },
                // Read above, and created again when the column is exported.
                Extent::Sizes(_) => {
                    buffers.push(None);
                    continue;
                }
            };
            let buffer = self.buffer(shape, *pointer, bytes, trail)?;
            if let (Some(width), "offsets", Some(offsets)) =
                (shape::offset_width(data_type), shape.name, &buffer)
            {
                last_offset = self.last_offset(width, offsets, rows, trail)?;
            }
            buffers.push(buffer);
        }
        Ok((buffers, last_offset))
    }

    /// The lengths of the data of views, from the last buffer. Arrow C++ always stores them on the
    /// host. For other producers, the driver reports their location.
    fn listed(
        &self,
        shapes: &[BufferShape],
        pointers: &[*const c_void],
        trail: Trail<'_>,
    ) -> Result<Option<Vec<ByteCount>>, ImportError> {
        if !shapes.iter().any(|shape| shape.extent == Extent::Listed) {
            return Ok(None);
        }
        let (Some(shape), Some(pointer)) = (shapes.last(), pointers.last()) else {
            return Ok(None);
        };
        let Extent::Sizes(bytes) = shape.extent else { return Ok(None) };
        let Some(pointer) = NonNull::new(pointer.cast_mut().cast::<u8>()) else {
            return Err(ImportError::Null { what: shape.name, at: trail.path() });
        };
        let address = to_u64(pointer.addr().get());
        let (buffer, required) = (shape.name, shape.alignment);
        if !address.is_multiple_of(required.get()) {
            return Err(ImportError::Misaligned { buffer, address, required, at: trail.path() });
        }
        let mut read = vec![0; bytes.to_usize()];
        // The producer wrote them for the consumer, as the caller of the import promised.
        if !self.reader.sizes(pointer, &mut read)? {
            return Ok(None);
        }
        let negative = |value| ImportError::Negative {
            what: "a size of variadic data",
            value,
            at: trail.path(),
        };
        let sizes = read.as_chunks::<8>().0.iter().map(|bytes| {
            let value = i64::from_ne_bytes(*bytes);
            u64::try_from(value).map(ByteCount::new).map_err(|_| negative(value))
        });
        sizes.collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// One buffer; `None` if it is omitted.
    fn buffer(
        &self,
        shape: &BufferShape,
        pointer: *const c_void,
        bytes: ByteCount,
        trail: Trail<'_>,
    ) -> Result<Option<ColumnBuffer>, ImportError> {
        let Some(pointer) = NonNull::new(pointer.cast_mut().cast::<u8>()) else {
            if bytes.is_zero() || shape.optional {
                return Ok(None);
            }
            return Err(ImportError::Null { what: shape.name, at: trail.path() });
        };
        let location = self.place.location(pointer);
        let address = to_u64(pointer.addr().get());
        let (buffer, length) = (shape.name, bytes);
        if location.checked_add(length).is_none() || length.get() > MOST_BYTES {
            return Err(ImportError::AddressOverflow { buffer, address, length, at: trail.path() });
        }
        if location.alignment() < shape.alignment && !length.is_zero() {
            let required = shape.alignment;
            return Err(ImportError::Misaligned { buffer, address, required, at: trail.path() });
        }
        let span = Span { kind: self.place.kind, location, length };
        if let Some(ours) = exported_memory::find(span) {
            return Ok(Some(ours));
        }
        self.reader.admit(span)?;
        // SAFETY: the importer of the array promises that the bytes exist, do not change, and are
        // in this memory until the array is released. The last owner releases it when it drops. No
        // code writes the bytes, because the buffer is read-only.
        let memory = unsafe { ForeignMemory::new(span, Arc::clone(&self.owner)) };
        Ok(Some(ColumnBuffer::foreign(Region::new(memory), Origin::Arrow).as_read_only()))
    }

    /// The last offset of the rows, if it can be read now.
    fn last_offset(
        &self,
        width: u64,
        offsets: &ColumnBuffer,
        rows: &Rows,
        trail: Trail<'_>,
    ) -> Result<Option<u64>, ImportError> {
        if rows.end == 0 {
            return Ok(Some(0));
        }
        let read = |index: u64| -> Result<Option<i64>, ImportError> {
            let overflow = |source| ImportError::Overflow { at: trail.path(), source };
            let skipped = ByteCount::product(&[("offset", index), ("bytes each", width)]);
            let skipped = skipped.map_err(overflow)?;
            let mut bytes = [0; 8];
            let (short, _) = bytes.split_at_mut(ByteCount::new(width).to_usize().min(8));
            let Some(at) = offsets.location().checked_add(skipped) else { return Ok(None) };
            if !self.reader.read(at, short)? {
                return Ok(None);
            }
            let [a, b, c, d, ..] = bytes;
            Ok(Some(match width {
                4 => i64::from(i32::from_ne_bytes([a, b, c, d])),
                _ => i64::from_ne_bytes(bytes),
            }))
        };
        let (Some(first), Some(last)) = (read(rows.offset)?, read(rows.end)?) else {
            return Ok(None);
        };
        let refused = || ImportError::Offsets { first, last, at: trail.path() };
        if first < 0 || last < first {
            return Err(refused());
        }
        u64::try_from(last).map(Some).map_err(|_| refused())
    }

    /// # Safety
    ///
    /// As for [`column`](Self::column).
    unsafe fn children(
        &self,
        data_type: &DataType,
        array: &ArrowArray,
        rows: &Rows,
        last_offset: Option<u64>,
        trail: Trail<'_>,
    ) -> Result<Vec<Column>, ImportError> {
        let overflow = |source| ImportError::Overflow { at: trail.path(), source };
        let expected = shape::children(data_type, rows.end).map_err(overflow)?;
        let count = to_u64(expected.len());
        if u64::try_from(array.n_children) != Ok(count) {
            return Err(wrong_count("n_children", count, array.n_children, data_type, trail));
        }
        // SAFETY: as many pointers as the array counts, by the caller's promise.
        let pointers = unsafe { pointers(array.children, expected.len(), "children", trail) }?;
        let mut children = Vec::with_capacity(expected.len());
        for (index, ((field, needed), child)) in expected.into_iter().zip(pointers).enumerate() {
            let trail = trail.field(field.name(), index);
            aligned(child, "a child's ArrowArray", trail)?;
            // SAFETY: null, or a structure that lives as long as its parent.
            let Some(child) = (unsafe { child.as_ref() }) else {
                return Err(ImportError::Null { what: "a child's ArrowArray", at: trail.path() });
            };
            // SAFETY: the caller's promise.
            let child = unsafe { self.column(field.data_type(), child, trail) }?;
            let needed = match needed {
                ChildRows::AtLeast(needed) => needed,
                ChildRows::ByOffsets => last_offset.unwrap_or(0),
                ChildRows::Unknown => 0,
            };
            let found = child.len();
            if found < needed {
                return Err(ImportError::ShortChild { needed, found, at: trail.path() });
            }
            children.push(child);
        }
        Ok(children)
    }

    /// # Safety
    ///
    /// As for [`column`](Self::column).
    unsafe fn dictionary(
        &self,
        data_type: &DataType,
        array: &ArrowArray,
        trail: Trail<'_>,
    ) -> Result<Option<Column>, ImportError> {
        aligned(array.dictionary, "dictionary", trail)?;
        // SAFETY: null, or a structure that lives as long as its parent.
        let dictionary = unsafe { array.dictionary.as_ref() };
        match (data_type, dictionary) {
            (DataType::Dictionary(_, values), Some(dictionary)) => {
                // SAFETY: the caller's promise.
                unsafe { self.column(values, dictionary, trail.dictionary()) }.map(Some)
            }
            (DataType::Dictionary(..), None) => {
                Err(ImportError::Null { what: "dictionary", at: trail.path() })
            }
            (_, Some(_)) => Err(wrong_count("dictionaries", 0, 1, data_type, trail)),
            (_, None) => Ok(None),
        }
    }
}

/// The rows of an array.
struct Rows {
    length: u64,
    offset: u64,
    /// The offset plus the length.
    end: u64,
    null_count: Option<u64>,
}

impl Rows {
    fn of(array: &ArrowArray, trail: Trail<'_>) -> Result<Self, ImportError> {
        let number = |what, value: i64| {
            let negative = |_| ImportError::Negative { what, value, at: trail.path() };
            u64::try_from(value).map_err(negative)
        };
        let length = number("length", array.length)?;
        let offset = number("offset", array.offset)?;
        let null_count = match array.null_count {
            -1 => None,
            known => Some(number("null_count", known)?),
        };
        if null_count.is_some_and(|nulls| nulls > length) {
            let null_count = array.null_count;
            return Err(ImportError::NullCount { null_count, length, at: trail.path() });
        }
        let overflow = |source| ImportError::Overflow { at: trail.path(), source };
        let end =
            ByteCount::new(offset).checked_add(ByteCount::new(length)).map_err(overflow)?.get();
        if end > MOST_ROWS {
            let limit = MOST_ROWS;
            return Err(ImportError::TooMany { what: "rows", limit, at: trail.path() });
        }
        Ok(Self { length, offset, end, null_count })
    }
}

fn count_buffers(
    data_type: &DataType,
    array: &ArrowArray,
    trail: Trail<'_>,
) -> Result<usize, ImportError> {
    let (fewest, is_variadic) = shape::fewest_buffers(data_type);
    let expected = to_u64(fewest);
    let found = array.n_buffers;
    match u64::try_from(found) {
        Ok(count) if count == expected => Ok(fewest),
        Ok(count) if is_variadic && count > MOST_BUFFERS => {
            Err(ImportError::TooMany { what: "n_buffers", limit: MOST_BUFFERS, at: trail.path() })
        }
        Ok(count) if is_variadic && count > expected => Ok(ByteCount::new(count).to_usize()),
        _ => Err(wrong_count("n_buffers", expected, found, data_type, trail)),
    }
}

fn wrong_count(
    what: &'static str,
    expected: u64,
    found: i64,
    data_type: &DataType,
    trail: Trail<'_>,
) -> ImportError {
    let data_type = data_type.to_string().into();
    ImportError::WrongCount { what, expected, found, data_type, at: trail.path() }
}

/// The pointers of a C array.
///
/// # Safety
///
/// The array is null, or has this number of pointers.
unsafe fn pointers<P: Copy>(
    array: *mut P,
    count: usize,
    what: &'static str,
    trail: Trail<'_>,
) -> Result<Vec<P>, ImportError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if array.is_null() {
        return Err(ImportError::Null { what, at: trail.path() });
    }
    aligned(array, what, trail)?;
    // SAFETY: the array has this number of pointers, as the caller promised, and is aligned. No
    // code writes them during the copy.
    Ok(unsafe { std::slice::from_raw_parts(array, count) }.to_vec())
}
