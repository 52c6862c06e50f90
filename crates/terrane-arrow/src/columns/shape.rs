//! The required buffers and children of each type, as in Arrow's columnar format.

use arrow_data::{BufferSpec, layout};
use arrow_schema::{DataType, Field, UnionMode};
use terrane_core::convert::to_u64;
use terrane_core::{Alignment, ByteCount, SizeOverflow};

/// The requirements of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferShape {
    /// Its contents, for error texts.
    pub name: &'static str,
    pub extent: Extent,
    /// Its required alignment.
    pub alignment: Alignment,
    /// Whether it may be missing even if there are rows.
    pub optional: bool,
}

/// The length of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// This number of bytes.
    Exact(ByteCount),
    /// The last offset in the previous buffer.
    ByOffsets,
    /// The corresponding number in the last buffer.
    Listed,
    /// This many bytes, with the lengths of the data buffers. It is read on the host, even if the
    /// other buffers are elsewhere. A column may omit it, because the data buffers have lengths.
    Sizes(ByteCount),
}

/// The number of values that a child needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChildRows {
    /// At least this number.
    AtLeast(u64),
    /// At least the last offset.
    ByOffsets,
    /// Unknown, because the values are not read.
    Unknown,
}

/// The buffers of `rows` values of a type, in the order of the C interface. `buffers` is their
/// number, for types with any number of buffers.
pub(crate) fn buffers(
    data_type: &DataType,
    rows: u64,
    buffers: usize,
) -> Result<Vec<BufferShape>, SizeOverflow> {
    use DataType as T;
    let offsets = |width| fixed("offsets", offset_rows(rows)?, width, width);
    Ok(match data_type {
        T::Null | T::RunEndEncoded(..) => vec![],
        T::Boolean => vec![validity(rows), bits("values", rows)],
        T::Utf8 | T::Binary => vec![validity(rows), offsets(4)?, data()],
        T::LargeUtf8 | T::LargeBinary => vec![validity(rows), offsets(8)?, data()],
        T::List(_) | T::Map(..) => vec![validity(rows), offsets(4)?],
        T::LargeList(_) => vec![validity(rows), offsets(8)?],
        T::ListView(_) => views_of_lists(rows, 4)?,
        T::LargeListView(_) => views_of_lists(rows, 8)?,
        T::FixedSizeList(..) | T::Struct(_) => vec![validity(rows)],
        T::Union(_, UnionMode::Sparse) => vec![fixed("type ids", rows, 1, 1)?],
        T::Union(_, UnionMode::Dense) => {
            vec![fixed("type ids", rows, 1, 1)?, fixed("offsets", rows, 4, 4)?]
        }
        T::Utf8View | T::BinaryView => views(rows, buffers)?,
        T::Dictionary(key, _) => return self::buffers(key, rows, buffers),
        other => match width(other) {
            Some((width, alignment)) => {
                vec![validity(rows), fixed("values", rows, width, alignment)?]
            }
            None => vec![],
        },
    })
}

/// The number of buffers of a type; the smallest for types with any number.
pub(crate) fn fewest_buffers(data_type: &DataType) -> (usize, bool) {
    use DataType as T;
    match data_type {
        T::Null | T::RunEndEncoded(..) => (0, false),
        T::FixedSizeList(..) | T::Struct(_) | T::Union(_, UnionMode::Sparse) => (1, false),
        T::Utf8 | T::Binary | T::LargeUtf8 | T::LargeBinary => (3, false),
        T::ListView(_) | T::LargeListView(_) => (3, false),
        T::Utf8View | T::BinaryView => (3, true),
        T::Dictionary(key, _) => fewest_buffers(key),
        _ => (2, false),
    }
}

/// A type's children, and the number of values that each needs for `rows` rows.
pub(crate) fn children(
    data_type: &DataType,
    rows: u64,
) -> Result<Vec<(&Field, ChildRows)>, SizeOverflow> {
    use DataType as T;
    Ok(match data_type {
        T::Struct(fields) => {
            fields.iter().map(|field| (&**field, ChildRows::AtLeast(rows))).collect()
        }
        T::FixedSizeList(field, size) => {
            let size = u64::try_from(*size).unwrap_or(0);
            let needed = ByteCount::product(&[("rows", rows), ("values in each", size)])?;
            vec![(field, ChildRows::AtLeast(needed.get()))]
        }
        T::List(field) | T::LargeList(field) | T::Map(field, _) => {
            vec![(field, ChildRows::ByOffsets)]
        }
        T::ListView(field) | T::LargeListView(field) => vec![(field, ChildRows::Unknown)],
        T::Union(fields, mode) => {
            let needed = match mode {
                UnionMode::Sparse => ChildRows::AtLeast(rows),
                UnionMode::Dense => ChildRows::Unknown,
            };
            fields.iter().map(|(_, field)| (&**field, needed)).collect()
        }
        T::RunEndEncoded(ends, values) => {
            vec![(ends, ChildRows::Unknown), (values, ChildRows::Unknown)]
        }
        _ => vec![],
    })
}

/// The width of a type's offsets, if they determine a length.
pub(crate) fn offset_width(data_type: &DataType) -> Option<u64> {
    use DataType as T;
    match data_type {
        T::Utf8 | T::Binary | T::List(_) | T::Map(..) => Some(4),
        T::LargeUtf8 | T::LargeBinary | T::LargeList(_) => Some(8),
        _ => None,
    }
}

/// The width of each value and the alignment of all, in bytes, for types with adjacent values. The
/// alignment is at most 8 bytes, as Arrow requires no more.
pub(crate) fn width(data_type: &DataType) -> Option<(u64, u64)> {
    if let DataType::FixedSizeBinary(width) = data_type {
        return Some((u64::try_from(*width).ok()?, 1));
    }
    data_type.primitive_width()?;
    match layout(data_type).buffers.first()? {
        BufferSpec::FixedWidth { byte_width, alignment } => {
            let bytes = |count| to_u64(count);
            Some((bytes(*byte_width), bytes(*alignment).min(8)))
        }
        _ => None,
    }
}

/// The bytes of a bitmap of `rows` bits.
pub(crate) const fn bitmap(rows: u64) -> ByteCount {
    ByteCount::new(rows.div_ceil(8))
}

/// The number of offsets of `rows` values: one more, or none if there are no values.
fn offset_rows(rows: u64) -> Result<u64, SizeOverflow> {
    if rows == 0 {
        return Ok(0);
    }
    Ok(ByteCount::new(rows).checked_add(ByteCount::new(1))?.get())
}

fn views_of_lists(rows: u64, width: u64) -> Result<Vec<BufferShape>, SizeOverflow> {
    Ok(vec![
        validity(rows),
        fixed("offsets", rows, width, width)?,
        fixed("sizes", rows, width, width)?,
    ])
}

fn views(rows: u64, count: usize) -> Result<Vec<BufferShape>, SizeOverflow> {
    let listed = count.saturating_sub(3);
    let data = BufferShape { name: "data", extent: Extent::Listed, ..data() };
    let mut shapes = vec![validity(rows), fixed("views", rows, 16, 8)?];
    shapes.extend(std::iter::repeat_n(data, listed));
    let sizes = fixed("sizes of data", to_u64(listed), 8, 8)?;
    let Extent::Exact(bytes) = sizes.extent else { return Ok(shapes) };
    shapes.push(BufferShape { extent: Extent::Sizes(bytes), ..sizes });
    Ok(shapes)
}

/// Whether the values are views of any number of data buffers.
pub(crate) const fn is_view(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Utf8View | DataType::BinaryView)
}

/// The buffers of a type that are in the column's memory.
pub(crate) fn placed<'a, T>(data_type: &DataType, buffers: &'a [T]) -> &'a [T] {
    match buffers {
        [placed @ .., _sizes] if is_view(data_type) => placed,
        all => all,
    }
}

const fn validity(rows: u64) -> BufferShape {
    BufferShape { optional: true, ..bits("validity", rows) }
}

const fn bits(name: &'static str, rows: u64) -> BufferShape {
    let extent = Extent::Exact(bitmap(rows));
    BufferShape { name, extent, alignment: Alignment::BYTE, optional: false }
}

const fn data() -> BufferShape {
    let alignment = Alignment::BYTE;
    BufferShape { name: "data", extent: Extent::ByOffsets, alignment, optional: false }
}

fn fixed(
    name: &'static str,
    rows: u64,
    width: u64,
    alignment: u64,
) -> Result<BufferShape, SizeOverflow> {
    let bytes = ByteCount::product(&[(name, rows), ("bytes each", width)])?;
    let extent = Extent::Exact(bytes);
    Ok(BufferShape { name, extent, alignment: Alignment::of(alignment), optional: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(data_type: &DataType, rows: u64) -> Vec<Option<u64>> {
        let shapes = buffers(data_type, rows, 3).unwrap();
        let exact = |shape: &BufferShape| match shape.extent {
            Extent::Exact(bytes) | Extent::Sizes(bytes) => Some(bytes.get()),
            _ => None,
        };
        shapes.iter().map(exact).collect()
    }

    #[test]
    fn sizes_are_those_of_the_columnar_format() {
        assert_eq!(sizes(&DataType::Int32, 9), [Some(2), Some(36)]);
        assert_eq!(sizes(&DataType::Boolean, 9), [Some(2), Some(2)]);
        assert_eq!(sizes(&DataType::Utf8, 9), [Some(2), Some(40), None]);
        assert_eq!(sizes(&DataType::Utf8, 0), [Some(0), Some(0), None]);
        assert_eq!(sizes(&DataType::Decimal256(40, 2), 2), [Some(1), Some(64)]);
        assert_eq!(sizes(&DataType::FixedSizeBinary(3), 3), [Some(1), Some(9)]);
        assert_eq!(sizes(&DataType::Utf8View, 3), [Some(1), Some(48), Some(0)]);
        assert_eq!(sizes(&DataType::Null, 3), []);
    }

    #[test]
    fn the_fewest_buffers_are_as_many_as_there_are_shapes() {
        let field = |data_type| Field::new("item", data_type, true).into();
        let types = [
            DataType::Null,
            DataType::Boolean,
            DataType::Float16,
            DataType::LargeUtf8,
            DataType::BinaryView,
            DataType::new_list(DataType::Int8, true),
            DataType::ListView(field(DataType::Int8)),
            DataType::FixedSizeList(field(DataType::Int8), 3),
            DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8)),
            DataType::Struct(vec![Field::new("a", DataType::Int8, true)].into()),
        ];
        for data_type in types {
            let (fewest, _) = fewest_buffers(&data_type);
            assert_eq!(buffers(&data_type, 7, fewest).unwrap().len(), fewest, "{data_type}");
        }
    }

    #[test]
    fn sizes_that_overflow_are_named() {
        let error = buffers(&DataType::Int64, u64::MAX / 4, 2).unwrap_err();
        assert!(error.to_string().contains("values"), "{error}");
        let list = DataType::new_fixed_size_list(DataType::Int8, i32::MAX, true);
        assert!(children(&list, u64::MAX / 2).is_err());
    }
}
