//! Imports and exports of schemas.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use arrow_schema::{DataType, Field, Schema};
use proptest::prelude::*;
use terrane_arrow::arrays::abi::{ArrowSchema, Released};
use terrane_arrow::arrays::{
    ImportError, export_field, export_schema, import_field, import_schema,
};

use super::foreign::types;

#[test]
fn exported_fields_are_imported_unchanged() {
    for data_type in types() {
        let metadata: HashMap<_, _> = [(String::from("unit"), String::from("tokens"))].into();
        let field = Field::new("values", data_type, true).with_metadata(metadata);
        let mut schema = export_field(&field).unwrap().into_inner();
        // SAFETY: arrow-rs created it.
        let back = unsafe { import_field(&raw mut schema) }.unwrap();
        assert_eq!(back, field);
        assert!(schema.is_released(), "moved away");
        // SAFETY: a released structure is valid.
        let error = unsafe { import_field(&raw mut schema) }.unwrap_err();
        assert!(matches!(error, ImportError::Released { .. }), "{error}");
    }
    let fields: Vec<_> = types().into_iter().map(|t| Field::new("a", t, false)).collect();
    let schema = Schema::new(fields);
    let mut exported = export_schema(&schema).unwrap().into_inner();
    // SAFETY: arrow-rs created it.
    assert_eq!(unsafe { import_schema(&raw mut exported) }.unwrap(), schema);
    let mut exported = export_field(&Field::new("a", DataType::Int8, false)).unwrap().into_inner();
    // SAFETY: arrow-rs created it.
    let error = unsafe { import_schema(&raw mut exported) }.unwrap_err();
    assert!(matches!(error, ImportError::WrongType { .. }), "{error}");
}

/// A schema of a test: its texts, and the number of its releases.
struct Made {
    schema: ArrowSchema,
    _texts: [CString; 2],
    metadata: Vec<u8>,
    children: Vec<*mut ArrowSchema>,
    releases: Box<AtomicU32>,
}

fn made(format: &[u8]) -> Box<Made> {
    /// # Safety
    ///
    /// The structure was created here, or moved from such a structure.
    unsafe extern "C" fn release(schema: *mut ArrowSchema) {
        // SAFETY: the caller owns the structure during its release.
        let schema = unsafe { &mut *schema };
        assert!(schema.release.take().is_some(), "released once");
        // SAFETY: the test keeps the counter.
        let releases = unsafe { &*schema.private_data.cast::<AtomicU32>() };
        releases.fetch_add(1, Ordering::SeqCst);
    }
    let texts = [CString::new(format).unwrap(), CString::new("name").unwrap()];
    let releases = Box::new(AtomicU32::new(0));
    let schema = ArrowSchema {
        format: texts[0].as_ptr(),
        name: texts[1].as_ptr(),
        release: Some(release),
        private_data: ptr::from_ref(&*releases).cast_mut().cast(),
        ..ArrowSchema::EMPTY
    };
    Box::new(Made { schema, _texts: texts, metadata: vec![], children: vec![], releases })
}

impl Made {
    fn with_children(mut self: Box<Self>, children: &mut [Box<Made>]) -> Box<Self> {
        self.children = children.iter_mut().map(|child| &raw mut child.schema).collect();
        self.schema.n_children = i64::try_from(self.children.len()).unwrap();
        self.schema.children = self.children.as_mut_ptr();
        self
    }

    fn with_metadata(mut self: Box<Self>, numbers: &[i32]) -> Box<Self> {
        self.metadata = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.schema.metadata = self.metadata.as_ptr().cast::<c_char>();
        self
    }

    /// Imports it, and checks that it was released once.
    #[track_caller]
    #[expect(clippy::boxed_local, reason = "pointers lead into the box")]
    fn import(mut self: Box<Self>) -> Result<Field, ImportError> {
        // SAFETY: its pointers are null or valid.
        let result = unsafe { import_field(&raw mut self.schema) };
        assert_eq!(self.releases.load(Ordering::SeqCst), 1, "{result:?}");
        result
    }
}

#[test]
fn schemas_that_make_no_sense_are_refused() {
    assert!(made(b"l").import().is_ok());
    // SAFETY: null is permitted.
    let error = unsafe { import_field(ptr::null_mut()) }.unwrap_err();
    assert!(matches!(error, ImportError::Null { .. }), "{error}");
    let without = |spoil: fn(&mut ArrowSchema)| {
        let mut made = made(b"l");
        spoil(&mut made.schema);
        made.import().unwrap_err()
    };
    let error = without(|schema| schema.format = ptr::null());
    assert!(matches!(error, ImportError::Null { what: "format", .. }), "{error}");
    let error = without(|schema| schema.n_children = -1);
    assert!(matches!(error, ImportError::Negative { .. }), "{error}");
    let error = without(|schema| schema.n_children = i64::MAX);
    assert!(matches!(error, ImportError::TooMany { .. }), "{error}");
    let error = without(|schema| schema.n_children = 1);
    assert!(matches!(error, ImportError::WrongCount { expected: 0, found: 1, .. }), "{error}");
    for format in [&b"q"[..], b"", b"w:-3", b"w:x", b"+w:-1", b"tss", b"d:1", b"+ud:0,0", b"\xff"] {
        assert!(made(format).import().is_err(), "{format:?}");
    }
    for digits in [&b"d:0,0"[..], b"d:39,0", b"d:10,11", b"d:10,0,32", b"d:77,0,256", b"d:255,-128"]
    {
        let error = made(digits).import().unwrap_err();
        assert!(matches!(error, ImportError::Format { .. }), "{digits:?}: {error}");
    }
    assert!(made(b"d:38,38").import().is_ok() && made(b"d:76,-3,256").import().is_ok());
    let long = made("x".repeat(5000).as_bytes()).import().unwrap_err();
    assert!(matches!(long, ImportError::Text { what: "format", limit: 4096, .. }), "{long}");
    let error = made(b"+l").import().unwrap_err();
    assert!(matches!(error, ImportError::WrongCount { expected: 1, found: 0, .. }), "{error}");
    let mut missing = made(b"+l");
    missing.children = vec![ptr::null_mut()];
    missing.schema.n_children = 1;
    missing.schema.children = missing.children.as_mut_ptr();
    let error = missing.import().unwrap_err();
    assert!(error.to_string().contains("`0`"), "{error}");
    let error = made(b"+m").with_children(&mut [made(b"l")]).import().unwrap_err();
    assert!(matches!(error, ImportError::Format { .. }), "a map has entries: {error}");
    let error = made(b"+r").with_children(&mut [made(b"f"), made(b"l")]).import().unwrap_err();
    assert!(matches!(error, ImportError::Format { .. }), "a run ends at a number: {error}");
    let mut values = made(b"u");
    let mut keys = made(b"f");
    keys.schema.dictionary = &raw mut values.schema;
    let error = keys.import().unwrap_err();
    assert!(matches!(error, ImportError::Format { .. }), "keys are integers: {error}");
}

#[test]
fn schemas_that_never_end_are_refused() {
    // A list of itself, and a struct with itself as both children.
    for (format, times) in [(&b"+l"[..], 1), (b"+s", 2)] {
        let mut made = made(format);
        let own = &raw mut made.schema;
        made.children = vec![own; times];
        made.schema.n_children = i64::try_from(times).unwrap();
        made.schema.children = made.children.as_mut_ptr();
        // The structure is its own child, so it must stay at its address. It is checked as the
        // child of another structure.
        let mut top = self::made(b"+l");
        top.children = vec![own];
        top.schema.n_children = 1;
        top.schema.children = top.children.as_mut_ptr();
        let error = top.import().unwrap_err();
        assert!(matches!(error, ImportError::TooMany { .. }), "{error}");
    }
}

/// A few structures, each of which is a child of another one many times. The text that is read
/// grows with the number of paths, not of structures.
#[test]
fn text_that_is_read_again_and_again_has_a_limit() {
    let with_children = |times: usize| {
        let mut leaf = made(b"l");
        let numbers: Vec<i32> = [1, 0, 1 << 20].into_iter().chain(vec![0; 1 << 18]).collect();
        leaf = leaf.with_metadata(&numbers);
        let mut top = made(b"+s");
        top.children = vec![&raw mut leaf.schema; times];
        top.schema.n_children = i64::try_from(times).unwrap();
        top.schema.children = top.children.as_mut_ptr();
        top.import()
    };
    assert_eq!(with_children(3).unwrap().data_type().to_string().matches("Int64").count(), 3);
    let error = with_children(64).unwrap_err();
    let limit = 1 << 26;
    assert!(
        matches!(error, ImportError::TooMany { what: "the bytes of names and metadata", limit: l, .. } if l == limit),
        "{error}"
    );
}

#[test]
fn metadata_have_lengths_that_can_be() {
    assert!(made(b"l").with_metadata(&[0]).import().is_ok());
    assert!(made(b"l").with_metadata(&[1, 0, 0]).import().is_ok());
    for numbers in [&[-1][..], &[i32::MAX], &[1, -1], &[1, 0, -5], &[1, i32::MAX]] {
        let error = made(b"l").with_metadata(numbers).import().unwrap_err();
        assert!(matches!(error, ImportError::Metadata { .. }), "{numbers:?}: {error}");
    }
}

proptest! {
    #[test]
    fn any_format_is_a_type_or_refused(
        format in "(n|b|w|d|t|\\+|u|v|[a-zA-Z]){1,4}(:[0-9,-]{0,6})?",
        children in 0_usize..3,
        flags in any::<i64>(),
    ) {
        let mut below: Vec<_> = (0..children).map(|_| made(b"i")).collect();
        let mut made = made(format.as_bytes()).with_children(&mut below);
        made.schema.flags = flags;
        let _ = made.import();
    }

    #[test]
    fn any_bytes_are_a_format_or_refused(bytes in proptest::collection::vec(1_u8.., 0..32)) {
        let _ = made(&bytes).import();
    }
}
