//! Published models, and the caller's.

mod table;

use serde::Deserialize;
use terrane_layout::LayoutError;
use terrane_layout::model::{ModelGeometry, ModelOptions};

use crate::error::{PlanError, nearest};

/// A model: its name, and the text of its `config.json`.
#[derive(Clone, Debug)]
pub struct Model {
    name: String,
    config: Vec<u8>,
    origin: Option<Origin>,
}

/// The origin of a published model's parameters.
#[derive(Clone, Debug, Deserialize)]
struct Origin {
    source: String,
    date: String,
}

/// The names of the published models, ascending. `NAME-defaults` has the default parameters of a
/// model type.
pub fn published_models() -> impl Iterator<Item = &'static str> {
    table::FILES.iter().map(|&(name, _)| name)
}

impl Model {
    /// A published model, by its name or by its name on the model hub (`meta-llama/Llama-3.1-8B`).
    ///
    /// # Errors
    ///
    /// [`PlanError::UnknownModel`] with the nearest name.
    pub fn published(name: &str) -> Result<Self, PlanError> {
        let lowercase = name.to_lowercase();
        let hub = format!("config.json of {lowercase} on ");
        let is_wanted = |file: &str, text: &str| {
            file == lowercase
                || origin(text.as_bytes())
                    .is_some_and(|o| o.source.to_lowercase().starts_with(&hub))
        };
        let entry = table::FILES.iter().find(|(file, text)| is_wanted(file, text));
        let Some((name, text)) = entry else {
            // A hub's name is compared without its owner.
            let short = lowercase.rsplit('/').next().unwrap_or(&lowercase);
            return Err(PlanError::UnknownModel {
                name: name.to_owned(),
                nearest: nearest(short, published_models()),
            });
        };
        Ok(Self::from_config(*name, text.as_bytes()))
    }

    /// A model from the text of its `config.json`. [`Plan::new`](crate::Plan::new) checks it.
    #[must_use]
    pub fn from_config(name: impl Into<String>, config: impl Into<Vec<u8>>) -> Self {
        let config = config.into();
        let origin = origin(&config);
        Self { name: name.into(), config, origin }
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The source of the parameters, and the date on which they were read; `None` for the caller's
    /// model.
    #[must_use]
    pub fn source(&self) -> Option<(&str, &str)> {
        self.origin.as_ref().map(|origin| (origin.source.as_str(), origin.date.as_str()))
    }

    /// The caches of the model on one rank.
    ///
    /// # Errors
    ///
    /// [`PlanError::Model`] as from [`ModelGeometry::from_json`].
    pub fn geometry(&self, options: &ModelOptions) -> Result<ModelGeometry, PlanError> {
        ModelGeometry::from_json(&self.config, options).map_err(|source| self.refused(source))
    }

    pub(crate) fn refused(&self, source: impl Into<LayoutError>) -> PlanError {
        PlanError::Model { model: self.name.clone(), source: source.into() }
    }
}

fn origin(config: &[u8]) -> Option<Origin> {
    serde_json::from_slice(config).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_in_the_table_and_has_a_source() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/data/models");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        files.sort();
        assert_eq!(files, published_models().collect::<Vec<_>>());
        assert!(files.len() >= 30);
        for name in files {
            let model = Model::published(&name).unwrap();
            let (source, date) = model.source().unwrap();
            assert!(!source.is_empty() && date.len() == 10, "{name}");
        }
    }

    #[test]
    fn names_of_the_hub_are_known_and_typos_are_corrected() {
        assert_eq!(Model::published("meta-llama/Llama-3.1-8B").unwrap().name(), "llama-3.1-8b");
        assert_eq!(Model::published("Qwen3-8B").unwrap().name(), "qwen3-8b");
        for (typo, expected) in [
            ("lama-3.1-8b", "llama-3.1-8b"),
            ("deepsek-v3", "deepseek-v3"),
            ("Qwen/qwen3-8", "qwen3-8b"),
        ] {
            let error = Model::published(typo).unwrap_err().to_string();
            assert!(error.contains(&format!("did you mean \"{expected}\"")), "{error}");
        }
        assert!(!Model::published("xyzzy").unwrap_err().to_string().contains("did you mean"));
    }
}
