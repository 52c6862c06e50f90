//! Fields of a configuration, read one by one so that every error names its field and value.

use serde_json::{Map, Value};

use super::error::{Expected, ModelError};
use super::families::{self, Family, SUPPORTED_MODEL_TYPES};

/// The object that describes the language model, and those around it.
pub(crate) struct Fields<'a> {
    /// Innermost first; each with the path to its fields.
    objects: Vec<(&'static str, &'a Map<String, Value>)>,
    pub family: &'static Family,
}

/// The longest value that an error shows, in characters.
const SHOWN: usize = 60;

impl<'a> Fields<'a> {
    /// The language model's fields: those of `text_config`, where there is one.
    pub fn new(root: &'a Map<String, Value>) -> Result<Self, ModelError> {
        let mut objects = vec![("", root)];
        match root.get("text_config") {
            None | Some(Value::Null) => {}
            Some(Value::Object(text)) => objects.insert(0, ("text_config.", text)),
            Some(other) => {
                return Err(ModelError::Value {
                    field: "text_config".to_owned(),
                    value: shown(other),
                    expected: Expected::Object,
                });
            }
        }
        // The type of the language model, or of the whole if that is all that is stated.
        let (path, stated) = objects
            .iter()
            .find_map(|(path, object)| Some((*path, object.get("model_type")?)))
            .unwrap_or(("", &Value::Null));
        let field = format!("{path}model_type");
        let Value::String(model_type) = stated else {
            let (value, expected) = (shown(stated), Expected::OneOf(SUPPORTED_MODEL_TYPES));
            return Err(ModelError::Value { field, value, expected });
        };
        let Some(family) = families::family(model_type) else {
            return Err(ModelError::UnsupportedModel {
                field,
                model_type: cut(model_type),
                supported: SUPPORTED_MODEL_TYPES,
            });
        };
        Ok(Self { objects, family })
    }

    /// An integer that has to be stated.
    pub fn integer(&self, name: &'static str, least: u32, largest: u32) -> Result<u32, ModelError> {
        let stated = self.optional_integer(name, least, largest)?;
        stated.ok_or_else(|| self.missing(name))
    }

    /// An integer that may be absent or null.
    pub fn optional_integer(
        &self,
        name: &'static str,
        least: u32,
        largest: u32,
    ) -> Result<Option<u32>, ModelError> {
        let Some(value) = self.own(name) else {
            return Ok(None);
        };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        match number.filter(|number| (least..=largest).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.unexpected(name, value, Expected::Integer { least, largest })),
        }
    }

    /// A truth value; absent or null is `false`.
    pub fn flag(&self, name: &'static str) -> Result<bool, ModelError> {
        match self.own(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.unexpected(name, other, Expected::Boolean)),
        }
    }

    /// A text that may be absent or null, with its path; from the outer object if the language
    /// model's does not state it, as a dtype holds for both.
    pub fn inherited_text(
        &self,
        name: &'static str,
    ) -> Result<Option<(String, &'a str)>, ModelError> {
        let stated = self.objects.iter().find_map(|(path, object)| {
            object.get(name).filter(|value| !value.is_null()).map(|value| (*path, value))
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

    /// A list with an entry a layer, each the position of its text in `of`; `None` if absent.
    pub fn layers(
        &self,
        name: &'static str,
        layers: u32,
        of: &'static [&'static str],
    ) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(value) = self.own(name) else {
            return Ok(None);
        };
        let unexpected = |value| self.unexpected(name, value, Expected::Layers { layers, of });
        let entries = value
            .as_array()
            .filter(|entries| u32::try_from(entries.len()) == Ok(layers))
            .ok_or_else(|| unexpected(value))?;
        entries
            .iter()
            .map(|entry| {
                let text = entry.as_str();
                of.iter().position(|known| Some(*known) == text).ok_or_else(|| unexpected(entry))
            })
            .collect::<Result<_, _>>()
            .map(Some)
    }

    pub fn missing(&self, name: &str) -> ModelError {
        ModelError::Missing { field: self.path(name), model_type: self.family.model_type }
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

    /// A field of the language model's own object, unless absent or null.
    fn own(&self, name: &str) -> Option<&'a Value> {
        let (_, object) = self.objects.first()?;
        object.get(name).filter(|value| !value.is_null())
    }

    fn path(&self, name: &str) -> String {
        let path = self.objects.first().map_or("", |(path, _)| *path);
        format!("{path}{name}")
    }

    fn unexpected(&self, name: &str, value: &Value, expected: Expected) -> ModelError {
        ModelError::Value { field: self.path(name), value: shown(value), expected }
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "missing".to_owned(),
        other => cut(&other.to_string()),
    }
}

/// A configuration may come from anywhere, and an error is no place for megabytes.
pub(crate) fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
