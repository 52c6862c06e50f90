//! Reads the fields of a configuration one by one, so that every error names its field and value.

use serde_json::{Map, Value};
use terrane_core::convert::to_usize;

use super::error::{Expected, ModelError};
use super::families::Family;
use super::table;

/// The object that describes the language model, and the objects around it.
pub(super) struct Fields<'a> {
    /// Innermost first, each with the path to its fields.
    objects: Vec<(String, &'a Map<String, Value>)>,
    pub family: &'static Family,
}

/// The longest value that an error shows, in characters.
const SHOWN: usize = 60;

/// The inner objects in which multimodal models have the language model's fields, outermost first.
const INNER: [&[&str]; 2] =
    [&["thinker_config"], &["text_config", "llm_config", "language_config"]];

impl<'a> Fields<'a> {
    /// The language model's fields: those of `text_config` or a similar object, if there is one.
    pub fn new(root: &'a Map<String, Value>) -> Result<Self, ModelError> {
        let mut objects = vec![(String::new(), root)];
        let (mut prefix, mut innermost) = (String::new(), root);
        for names in INNER {
            let Some((name, value)) = names.iter().find_map(|name| {
                let value = innermost.get(*name).filter(|value| !value.is_null());
                value.map(|value| (*name, value))
            }) else {
                continue;
            };
            let Value::Object(inner) = value else {
                let (field, value) = (format!("{prefix}{name}"), shown(value));
                return Err(ModelError::Value { field, value, expected: Expected::Object });
            };
            prefix = format!("{prefix}{name}.");
            objects.insert(0, (prefix.clone(), inner));
            innermost = inner;
        }
        // The model type of the language model, or of the outer object if the language model states
        // none.
        let (path, stated) = objects
            .iter()
            .find_map(|(path, object)| Some((path.as_str(), object.get("model_type")?)))
            .unwrap_or(("", &Value::Null));
        let field = format!("{path}model_type");
        let supported = table::supported_model_types();
        let Value::String(model_type) = stated else {
            let (value, expected) = (shown(stated), Expected::OneOf(supported));
            return Err(ModelError::Value { field, value, expected });
        };
        let Some(family) = table::find(model_type) else {
            let model_type = cut(model_type);
            return Err(ModelError::UnsupportedModel { field, model_type, supported });
        };
        Ok(Self { objects, family })
    }

    /// A required integer.
    pub fn integer(&self, name: &'static str, least: u32, largest: u32) -> Result<u32, ModelError> {
        self.any_integer(&[name], least, largest)?.ok_or_else(|| self.missing(name))
    }

    /// An integer that may be absent or null.
    pub fn optional_integer(
        &self,
        name: &'static str,
        least: u32,
        largest: u32,
    ) -> Result<Option<u32>, ModelError> {
        self.any_integer(&[name], least, largest)
    }

    /// An integer that one of these names must state.
    pub fn one_integer(
        &self,
        names: &[&'static str],
        least: u32,
        largest: u32,
    ) -> Result<u32, ModelError> {
        let stated = self.any_integer(names, least, largest)?;
        stated.ok_or_else(|| self.missing(first(names)))
    }

    /// An integer that any of these names may state. If several state it, their values must be
    /// equal.
    pub fn any_integer(
        &self,
        names: &[&'static str],
        least: u32,
        largest: u32,
    ) -> Result<Option<u32>, ModelError> {
        let mut found: Option<(&'static str, u32)> = None;
        for name in names {
            let Some(value) = self.own(name) else { continue };
            let within = |number: &u32| (least..=largest).contains(number);
            let Some(number) = number_of(value).filter(within) else {
                return Err(self.unexpected(name, value, Expected::Integer { least, largest }));
            };
            match found {
                Some((other, before)) if before != number => {
                    return Err(self.contradiction(
                        (other, before.to_string()),
                        (name, number.to_string()),
                        "both name one field, so state one of them",
                    ));
                }
                _ => found = Some((name, number)),
            }
        }
        Ok(found.map(|(_, number)| number))
    }

    /// A Boolean; `None` if absent or null.
    pub fn optional_flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        self.typed(name, Expected::Boolean, Value::as_bool)
    }

    /// A Boolean; `false` if absent or null.
    pub fn flag(&self, name: &str) -> Result<bool, ModelError> {
        Ok(self.optional_flag(name)?.unwrap_or(false))
    }

    /// A text that may be absent or null, with its path. If the language model does not state the
    /// field, the value of the outer object is used, because a dtype applies to both.
    pub fn inherited_text(
        &self,
        name: &'static str,
    ) -> Result<Option<(String, &'a str)>, ModelError> {
        let stated = self.objects.iter().find_map(|(path, object)| {
            object.get(name).filter(|value| !value.is_null()).map(|value| (path, value))
        });
        match stated {
            None => Ok(None),
            Some((path, Value::String(text))) => Ok(Some((format!("{path}{name}"), text))),
            Some((path, other)) => Err(ModelError::Value {
                field: format!("{path}{name}"),
                value: shown(other),
                expected: Expected::Text,
            }),
        }
    }

    /// A text of the language model's own object, which may be absent or null.
    pub fn text(&self, name: &'static str) -> Result<Option<&'a str>, ModelError> {
        self.typed(name, Expected::Text, Value::as_str)
    }

    /// A list with one entry per layer, each from `of`; `None` if absent.
    pub fn layers(
        &self,
        name: &'static str,
        layers: u32,
        of: &'static [&'static str],
    ) -> Result<Option<Vec<&'static str>>, ModelError> {
        let unexpected = |value| self.unexpected(name, value, Expected::Layers { layers, of });
        let Some(value) = self.own(name) else {
            return Ok(None);
        };
        // Some lists continue with the layers of speculative decoding.
        let drafts = self.optional_integer("num_nextn_predict_layers", 0, u32::MAX)?.unwrap_or(0);
        let lengths = [Some(layers), layers.checked_add(drafts)];
        let entries = value
            .as_array()
            .filter(|entries| lengths.contains(&u32::try_from(entries.len()).ok()))
            .ok_or_else(|| unexpected(value))?;
        entries
            .iter()
            .take(to_usize(layers.into()))
            .map(|entry| {
                let known = of.iter().find(|known| entry.as_str() == Some(known));
                known.copied().ok_or_else(|| unexpected(entry))
            })
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// A list of integers, of at most `most` entries; `None` if absent.
    pub fn integers(
        &self,
        name: &'static str,
        most: u32,
        largest: u32,
    ) -> Result<Option<Vec<u32>>, ModelError> {
        let expected = Expected::Integers { most, largest };
        let entries = self.typed(name, expected, |value| {
            value.as_array().filter(|entries| entries.len() <= to_usize(most.into()))
        })?;
        let integer = |entry: &Value| {
            let number = number_of(entry).filter(|number| *number <= largest);
            number.ok_or_else(|| self.unexpected(name, entry, expected))
        };
        entries.map(|entries| entries.iter().map(integer).collect()).transpose()
    }

    /// The letters of a text with one letter per layer, each from `of`.
    pub fn letters(
        &self,
        name: &'static str,
        text: &str,
        layers: u32,
        of: &'static [&'static str],
    ) -> Result<Vec<&'static str>, ModelError> {
        let known = |letter: char| of.iter().find(|known| known.starts_with(letter)).copied();
        let letters: Option<Vec<&'static str>> = text.chars().map(known).collect();
        let letters = letters.filter(|letters| u32::try_from(letters.len()) == Ok(layers));
        let expected = Expected::Layers { layers, of };
        letters.ok_or_else(|| self.unexpected(name, &Value::from(text), expected))
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: Expected,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let typed = |value| as_type(value).ok_or_else(|| self.unexpected(name, value, expected));
        self.own(name).map(typed).transpose()
    }

    /// A list; `None` if absent.
    pub fn list(&self, name: &'static str) -> Result<Option<&'a [Value]>, ModelError> {
        self.typed(name, Expected::List, |value| value.as_array().map(Vec::as_slice))
    }

    /// The names and values of the language model's own object.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let own = self.objects.first().map(|(_, object)| *object);
        own.into_iter().flatten().map(|(name, value)| (name.as_str(), value))
    }

    /// The values at a path of names, in the language model's own object and in those around it,
    /// each with its full path. Null values are left out.
    pub fn inherited(&self, names: &[&str]) -> impl Iterator<Item = (String, &'a Value)> {
        self.objects.iter().filter_map(move |(path, object)| {
            let (first, inner) = names.split_first()?;
            let value =
                inner.iter().try_fold(object.get(*first)?, |value, name| value.get(name))?;
            (!value.is_null()).then(|| (format!("{path}{}", names.join(".")), value))
        })
    }

    pub fn missing(&self, name: &str) -> ModelError {
        ModelError::Missing { field: self.path(name), model_type: self.family.model_type }
    }

    /// The refusal of a field, stated with its full path.
    pub fn uncounted(&self, field: String, value: &Value) -> ModelError {
        ModelError::Uncounted { field, value: shown(value), model_type: self.family.model_type }
    }

    pub fn indivisible(&self, name: &str, value: u64, tensor_parallel: u32) -> ModelError {
        ModelError::Indivisible { field: self.path(name), value, tensor_parallel }
    }

    pub fn contradiction(
        &self,
        (first, first_value): (&str, String),
        (second, second_value): (&str, String),
        rule: &'static str,
    ) -> ModelError {
        let (first, second) = (self.path(first), self.path(second));
        ModelError::Contradiction { first, first_value, second, second_value, rule }
    }

    pub fn unexpected(&self, name: &str, value: &Value, expected: Expected) -> ModelError {
        ModelError::Value { field: self.path(name), value: shown(value), expected }
    }

    /// A field of the language model's own object, or of an object within it. `None` if absent or
    /// null.
    pub fn own(&self, name: &str) -> Option<&'a Value> {
        // Some families have no field for a value.
        let (_, object) = self.objects.first().filter(|_| !name.is_empty())?;
        let value = match name.split_once('.') {
            None => object.get(name)?,
            Some((outer, inner)) => object.get(outer)?.as_object()?.get(inner)?,
        };
        (!value.is_null()).then_some(value)
    }

    pub fn path(&self, name: &str) -> String {
        let path = self.objects.first().map_or("", |(path, _)| path.as_str());
        format!("{path}{name}")
    }
}

/// The name that errors use, among the names of one field.
pub(super) fn first(names: &[&'static str]) -> &'static str {
    names.first().copied().unwrap_or_default()
}

fn number_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "missing".to_owned(),
        other => cut(&other.to_string()),
    }
}

/// A configuration may be untrusted, so an error shows only a short part of it.
pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
