//! Imports and exports schemas. arrow-rs reads and writes them. Before that, this module refuses
//! input on which arrow-rs would panic or read without a limit.

use std::ffi::{CStr, c_char};
use std::mem::ManuallyDrop;
use std::ptr;

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};

use terrane_core::convert::to_u64;

use super::abi::{ArrowSchema, Owned};
use super::error::{ExportError, ImportError, Trail, aligned};
use crate::columns::shape;
use crate::columns::types::{self, MOST_FIELDS, MOST_LEVELS};

/// The longest accepted format string. The formats of unions list a number for each field.
const LONGEST_FORMAT: usize = 4096;
/// The longest accepted name of a field.
const LONGEST_NAME: usize = 1 << 16;
/// The most bytes of all formats, names and metadata of a schema. A structure that is a child of
/// several others is read several times, so limits for each field are not enough.
pub const MOST_TEXT: u64 = 1 << 26;
/// The most entries, and bytes, of a field's metadata.
const MOST_METADATA: i64 = 1 << 24;

/// Imports a foreign schema: moves it, reads it as a field, and releases it.
///
/// An array's schema is a field; that of a record batch is a field of a struct type.
///
/// # Errors
///
/// [`ImportError`] if it is not valid. It has been released in that case, too.
///
/// # Safety
///
/// The pointer is null, or meets the conditions of [`Owned::take`]. Every non-null pointer in the
/// structure has the target that the specification requires. Texts end with a zero byte. Metadata
/// is as long as it states. The number of pointers to children is the stated one. The same holds
/// for the children.
pub unsafe fn import_field(source: *mut ArrowSchema) -> Result<Field, ImportError> {
    let null = || ImportError::Null { what: "the ArrowSchema", at: Trail::TOP.path() };
    if source.is_null() {
        return Err(null());
    }
    // SAFETY: the caller's promise.
    let owned = unsafe { Owned::take(source) };
    let released = || ImportError::Released { what: "ArrowSchema", at: Trail::TOP.path() };
    let schema = owned.ok_or_else(released)?;
    let mut read = Read::default();
    // SAFETY: the structure is alive until `schema` drops, and its pointers are valid, as the
    // caller promised.
    unsafe { check(schema.get(), Trail::TOP, &mut read) }?;
    // arrow-rs's structure has the same fields in the same order. It is only read, not dropped,
    // because `schema` releases it.
    let theirs: *const FFI_ArrowSchema = ptr::from_ref(schema.get()).cast();
    // SAFETY: it is alive, as above.
    let field = Field::try_from(unsafe { &*theirs });
    let field = field.map_err(|source| ImportError::Arrow { source })?;
    check_type(field.data_type())?;
    Ok(field)
}

/// Imports the foreign schema of a record batch.
///
/// # Errors
///
/// [`ImportError`] if it is not valid. It has been released in that case, too.
///
/// # Safety
///
/// As for [`import_field`].
pub unsafe fn import_schema(source: *mut ArrowSchema) -> Result<Schema, ImportError> {
    // SAFETY: the caller's promise.
    let field = unsafe { import_field(source) }?;
    match field.data_type() {
        DataType::Struct(fields) => {
            Ok(Schema::new(fields.clone()).with_metadata(field.metadata().clone()))
        }
        other => Err(ImportError::WrongType {
            expected: DataType::Struct(arrow_schema::Fields::empty()),
            found: other.clone(),
        }),
    }
}

/// Converts a field to a C structure.
///
/// # Errors
///
/// [`ExportError::Arrow`] if a name contains a zero byte. [`ExportError::Column`] for a type that
/// no column can have.
pub fn export_field(field: &Field) -> Result<Owned<ArrowSchema>, ExportError> {
    types::check(std::iter::once(field.data_type()))?;
    Ok(owned(FFI_ArrowSchema::try_from(field)?))
}

/// Converts the schema of record batches to a C structure.
///
/// # Errors
///
/// As for [`export_field`].
pub fn export_schema(schema: &Schema) -> Result<Owned<ArrowSchema>, ExportError> {
    types::check(schema.fields().iter().map(|field| field.data_type()))?;
    Ok(owned(FFI_ArrowSchema::try_from(schema)?))
}

fn owned(schema: FFI_ArrowSchema) -> Owned<ArrowSchema> {
    let schema = ManuallyDrop::new(schema);
    let ours: *const ArrowSchema = (&raw const *schema).cast();
    // SAFETY: both types have the same fields in the same order, and the source is not dropped.
    let schema = unsafe { ours.read() };
    // SAFETY: arrow-rs's callback may be called once, after any move and on any thread
    // (`FFI_ArrowSchema` is `Send`). Only this value calls it.
    unsafe { Owned::new(schema) }
}

/// The amounts that were read from a schema so far.
#[derive(Default)]
struct Read {
    fields: u64,
    /// The bytes of formats, names and metadata.
    text: u64,
}

impl Read {
    /// Counts a field, and refuses it if it is nested too deeply.
    fn field(&mut self, trail: Trail<'_>) -> Result<(), ImportError> {
        self.fields += 1;
        let refused = |what, limit| Err(ImportError::TooMany { what, limit, at: trail.path() });
        if self.fields > MOST_FIELDS {
            return refused("the number of fields", MOST_FIELDS);
        }
        if to_u64(trail.depth()) > MOST_LEVELS {
            return refused("the nesting", MOST_LEVELS);
        }
        Ok(())
    }

    fn text(&mut self, bytes: usize, trail: Trail<'_>) -> Result<(), ImportError> {
        // At most 2^24 bytes for each of 2^20 fields.
        self.text += to_u64(bytes);
        let (what, limit) = ("the bytes of names and metadata", MOST_TEXT);
        if self.text <= limit {
            return Ok(());
        }
        Err(ImportError::TooMany { what, limit, at: trail.path() })
    }
}

/// Checks a structure and its descendants for everything that arrow-rs asserts or trusts.
///
/// # Safety
///
/// The pointers in the structure, and in its descendants, have the targets that the specification
/// requires.
unsafe fn check(
    schema: &ArrowSchema,
    trail: Trail<'_>,
    read: &mut Read,
) -> Result<(), ImportError> {
    let at = || trail.path();
    read.field(trail)?;
    if schema.release.is_none() {
        return Err(ImportError::Released { what: "ArrowSchema", at: at() });
    }
    // SAFETY: null, or a text that ends with a zero.
    let format = unsafe { text(schema.format, "format", LONGEST_FORMAT, trail) }?;
    let Some(format) = format else {
        return Err(ImportError::Null { what: "format", at: at() });
    };
    // SAFETY: as for the format.
    let name = unsafe { text(schema.name, "name", LONGEST_NAME, trail) }?;
    // SAFETY: null, or metadata.
    let metadata = unsafe { check_metadata(schema.metadata, trail) }?;
    for bytes in [format.len(), name.map_or(0, str::len), metadata] {
        read.text(bytes, trail)?;
    }
    let children = count(schema.n_children, trail)?;
    check_format(format, schema, children, trail)?;
    if children > 0 && schema.children.is_null() {
        return Err(ImportError::Null { what: "children", at: at() });
    }
    aligned(schema.children, "children", trail)?;
    for index in 0..children {
        // SAFETY: there are as many pointers as the structure counts.
        let child = unsafe { schema.children.add(index) };
        // SAFETY: as above.
        let child = unsafe { *child };
        aligned(child, "a child's ArrowSchema", trail)?;
        // SAFETY: null, or a structure that lives as long as its parent.
        let child = unsafe { child.as_ref() };
        let Some(child) = child else {
            let at = trail.field("", index).path();
            return Err(ImportError::Null { what: "a child's ArrowSchema", at });
        };
        // SAFETY: as for this structure.
        unsafe { check(child, trail.field("", index), read) }?;
    }
    aligned(schema.dictionary, "dictionary", trail)?;
    // SAFETY: null, or a structure that lives as long as its parent.
    if let Some(dictionary) = unsafe { schema.dictionary.as_ref() } {
        if !matches!(format, "c" | "C" | "s" | "S" | "i" | "I" | "l" | "L") {
            let format = format.into();
            return Err(ImportError::Format { format, at: at(), source: None });
        }
        // SAFETY: as for this structure.
        unsafe { check(dictionary, trail.dictionary(), read) }?;
    }
    Ok(())
}

fn count(children: i64, trail: Trail<'_>) -> Result<usize, ImportError> {
    let negative =
        || ImportError::Negative { what: "n_children", value: children, at: trail.path() };
    let count = u64::try_from(children).map_err(|_| negative())?;
    let too_many =
        || ImportError::TooMany { what: "n_children", limit: MOST_FIELDS, at: trail.path() };
    let fits = usize::try_from(count).ok().filter(|_| count <= MOST_FIELDS);
    fits.ok_or_else(too_many)
}

/// Checks that there are as many children as arrow-rs will read.
fn check_format(
    format: &str,
    schema: &ArrowSchema,
    children: usize,
    trail: Trail<'_>,
) -> Result<(), ImportError> {
    let expected = match format {
        "+s" => return Ok(()),
        "+r" => 2,
        "+l" | "+L" | "+vl" | "+vL" | "+m" => 1,
        _ if format.starts_with("+w:") => 1,
        _ => match format.strip_prefix("+ud:").or_else(|| format.strip_prefix("+us:")) {
            Some("") => 0,
            Some(numbers) => numbers.split(',').count(),
            None => 0,
        },
    };
    if children == expected {
        return Ok(());
    }
    Err(ImportError::WrongCount {
        what: "n_children",
        expected: u64::try_from(expected).unwrap_or(u64::MAX),
        found: schema.n_children,
        data_type: format.into(),
        at: trail.path(),
    })
}

/// A text of the producer; `None` for null.
///
/// # Safety
///
/// The pointer is null, or points to a text that ends with a zero. No code writes the text while
/// the result lives.
unsafe fn text<'a>(
    pointer: *const c_char,
    what: &'static str,
    longest: usize,
    trail: Trail<'_>,
) -> Result<Option<&'a str>, ImportError> {
    if pointer.is_null() {
        return Ok(None);
    }
    let refused = || ImportError::Text {
        what,
        limit: u64::try_from(longest).unwrap_or(u64::MAX),
        at: trail.path(),
    };
    let ends = (0..=longest).any(|index| {
        // SAFETY: within the text, because its end has not been reached.
        let character = unsafe { pointer.add(index) };
        // SAFETY: as above.
        let character = unsafe { *character };
        character == 0
    });
    if !ends {
        return Err(refused());
    }
    // SAFETY: it ends with a zero, as checked above.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| refused())
}

/// Checks the lengths in a field's metadata, and returns its number of bytes.
///
/// # Safety
///
/// The pointer is null, or points to metadata as long as it states.
unsafe fn check_metadata(pointer: *const c_char, trail: Trail<'_>) -> Result<usize, ImportError> {
    if pointer.is_null() {
        return Ok(0);
    }
    let refused = |what, value| ImportError::Metadata { what, value, at: trail.path() };
    let number = |position: usize| -> i32 {
        // SAFETY: within the metadata, because the position follows its stated lengths.
        let at = unsafe { pointer.add(position) };
        // SAFETY: as above; the read does not need an alignment.
        unsafe { at.cast::<i32>().read_unaligned() }
    };
    let in_bounds = |what, value: i64| match usize::try_from(value) {
        Ok(length) if value <= MOST_METADATA => Ok(length),
        _ => Err(refused(what, value)),
    };
    let entries = in_bounds("the number of entries is", i64::from(number(0)))?;
    let mut position = 4_usize;
    for _ in 0..entries {
        for what in ["the length of a key is", "the length of a value is"] {
            let length = in_bounds(what, i64::from(number(position)))?;
            // Both are bounded, so this does not overflow.
            position += 4 + length;
            in_bounds("its length is", i64::try_from(position).unwrap_or(i64::MAX))?;
        }
    }
    Ok(position)
}

/// Refuses types that a format string can express but no array can have.
pub(crate) fn check_type(data_type: &DataType) -> Result<(), ImportError> {
    check_below(data_type, Trail::TOP, &mut Read::default())
}

/// The name of a type without its child types. In an unchecked type, those can have 2^40 letters.
fn brief(data_type: &DataType) -> Box<str> {
    use DataType as T;
    match data_type {
        T::FixedSizeList(_, size) => format!("FixedSizeList of {size}").into(),
        T::Dictionary(..) => "Dictionary".into(),
        T::Map(..) => "Map".into(),
        T::RunEndEncoded(..) => "RunEndEncoded".into(),
        T::List(_) | T::LargeList(_) | T::ListView(_) | T::LargeListView(_) => "List".into(),
        T::Struct(_) => "Struct".into(),
        T::Union(..) => "Union".into(),
        other => other.to_string().into(),
    }
}

fn check_below(data_type: &DataType, trail: Trail<'_>, read: &mut Read) -> Result<(), ImportError> {
    read.field(trail)?;
    types::check_level(data_type).map_err(|_| ImportError::Format {
        format: brief(data_type),
        at: trail.path(),
        source: None,
    })?;
    let overflow = |source| ImportError::Overflow { at: trail.path(), source };
    let children = shape::children(data_type, 0).map_err(overflow)?;
    for (index, (field, _)) in children.into_iter().enumerate() {
        check_below(field.data_type(), trail.field(field.name(), index), read)?;
    }
    match data_type {
        DataType::Dictionary(_, values) => check_below(values, trail.dictionary(), read),
        _ => Ok(()),
    }
}
