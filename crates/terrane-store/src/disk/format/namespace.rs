//! The content of a store: the namespace of its keys and the slots of its groups.

use crate::disk::error::CatalogError;

/// The maximum number of groups of a store.
pub(crate) const MOST_GROUPS: usize = 64;

/// The maximum number of bytes of a slot.
pub(crate) const MOST_SLOT_BYTES: u64 = u32::MAX as u64;

/// The maximum length of a namespace's name in bytes.
const LONGEST_FOLDER: usize = 128;

/// The maximum length of a field's name in bytes.
pub(crate) const LONGEST_NAME: usize = 64;

/// The maximum length of a field's value in bytes.
pub(crate) const LONGEST_VALUE: usize = 512;

/// A namespace: the name of its folder, and the facts on which the content of its blocks depends.
///
/// Model, revision, element type, rope scaling, hash algorithm, seed, rank and engine are such facts.
/// A store is only opened under the namespace with which it was created.
///
/// ```
/// use terrane_store::disk::Namespace;
///
/// # fn main() -> Result<(), terrane_store::disk::CatalogError> {
/// let namespace = Namespace::new("llama-3.1-8b", [("model", "llama-3.1-8b"), ("rank", "0")])?;
/// assert_eq!(namespace.name(), "llama-3.1-8b");
/// assert!(Namespace::new("../elsewhere", [("rank", "0")]).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace {
    name: String,
    /// By name, each once.
    fields: Vec<(String, String)>,
}

impl Namespace {
    /// Checks the name and the fields. The order of the fields has no meaning.
    ///
    /// # Errors
    ///
    /// Returns [`CatalogError::NamespaceName`] or [`CatalogError::NamespaceField`] with the rule that
    /// is broken.
    pub fn new<N: Into<String>, V: Into<String>>(
        name: impl Into<String>,
        fields: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Self, CatalogError> {
        let name = name.into();
        if let Some(problem) = name_problem(&name) {
            return Err(CatalogError::NamespaceName { name, problem, longest: LONGEST_FOLDER });
        }
        let mut fields: Vec<(String, String)> =
            fields.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        fields.sort();
        let problems = fields.iter().enumerate().find_map(|(index, field)| {
            let before = index.checked_sub(1).and_then(|before| fields.get(before));
            field_problem(field, before).map(|problem| (field.0.clone(), problem))
        });
        match problems {
            None => Ok(Self { name, fields }),
            Some((name, problem)) => Err(CatalogError::NamespaceField {
                name,
                problem,
                longest_name: LONGEST_NAME,
                longest_value: LONGEST_VALUE,
            }),
        }
    }

    /// The name of the folder.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The fields with their values, by name.
    #[must_use]
    pub fn fields(&self) -> &[(String, String)] {
        &self.fields
    }
}

fn name_problem(name: &str) -> Option<String> {
    let is_allowed =
        |byte: char| byte.is_ascii_alphanumeric() || matches!(byte, '-' | '_' | '.' | '=');
    match name.chars().find(|character| !is_allowed(*character)) {
        _ if name.is_empty() => Some("it is empty".into()),
        _ if name.len() > LONGEST_FOLDER => Some("it is too long".into()),
        Some(character) => Some(format!("it contains {character:?}")),
        None => name.starts_with('.').then(|| "it begins with a dot".into()),
    }
}

fn field_problem(
    (name, value): &(String, String),
    before: Option<&(String, String)>,
) -> Option<&'static str> {
    match () {
        () if name.is_empty() => Some("has no name"),
        () if name.len() > LONGEST_NAME => Some("has a name that is too long"),
        () if value.len() > LONGEST_VALUE => Some("has a value that is too long"),
        () if before.is_some_and(|(other, _)| other == name) => Some("is given twice"),
        () => None,
    }
}

/// The slots of one group of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupSlots {
    /// The bytes of a slot.
    pub slot_bytes: u64,
    /// The number of slots. It may differ each time a store is opened; records of slots that no
    /// longer exist are dropped.
    pub slots: u32,
    /// The fingerprint of the group's blocks.
    pub fingerprint: [u8; 16],
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [(&str, &str); 0] = [];

    fn problem(name: &str) -> String {
        match Namespace::new(name, NONE) {
            Err(CatalogError::NamespaceName { problem, .. }) => problem,
            other => panic!("{name:?}: {other:?}"),
        }
    }

    #[test]
    fn names_that_leave_the_directory_are_refused() {
        assert_eq!(problem(""), "it is empty");
        assert_eq!(problem(&"a".repeat(129)), "it is too long");
        for (name, character) in
            [("a/b", '/'), ("a\\b", '\\'), ("a\0", '\0'), ("ä", 'ä'), ("a b", ' ')]
        {
            assert_eq!(problem(name), format!("it contains {character:?}"));
        }
        assert_eq!(problem("."), "it begins with a dot");
        assert_eq!(problem(".."), "it begins with a dot");
        assert_eq!(problem(".hidden"), "it begins with a dot");
        let longest = "a".repeat(128);
        for name in ["a", "meta-llama_3.1=8B", &longest] {
            assert_eq!(Namespace::new(name, NONE).unwrap().name(), name);
        }
    }

    #[test]
    fn fields_are_in_order_and_each_is_given_once() {
        let namespace = Namespace::new("a", [("rank", "1"), ("model", "m")]).unwrap();
        let fields: Vec<&str> = namespace.fields().iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(fields, ["model", "rank"]);
        let long = "x".repeat(513);
        for (fields, expected) in [
            (vec![("", "1")], "has no name"),
            (vec![(&long[..65], "1")], "has a name that is too long"),
            (vec![("a", long.as_str())], "has a value that is too long"),
            (vec![("a", "1"), ("b", "1"), ("a", "2")], "is given twice"),
        ] {
            let error = Namespace::new("a", fields).unwrap_err();
            let found = match error {
                CatalogError::NamespaceField { problem, .. } => problem,
                other => panic!("{other}"),
            };
            assert_eq!(found, expected);
        }
    }
}
