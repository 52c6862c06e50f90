//! Built-in models, and models from a file.

use std::fs;
use std::path::Path;

use terrane::layout::model::{ModelGeometry, ModelOptions};

use crate::failure::Failure;

/// Published `config.json` files, reduced to the fields that determine the cache.
pub const BUILT_IN: [(&str, &str); 6] = [
    ("llama-3.1-8b", include_str!("models/llama-3.1-8b.json")),
    ("llama-3.1-70b", include_str!("models/llama-3.1-70b.json")),
    ("qwen3-8b", include_str!("models/qwen3-8b.json")),
    ("qwen3-235b-a22b", include_str!("models/qwen3-235b-a22b.json")),
    ("deepseek-v3", include_str!("models/deepseek-v3.json")),
    ("gpt-oss-20b", include_str!("models/gpt-oss-20b.json")),
];

/// A model, and the cache of one of its ranks.
pub struct Model {
    pub name: String,
    pub tensor_parallel: u32,
    pub geometry: ModelGeometry,
}

/// Loads the built-in model of this name, or the `config.json` at this path.
pub fn load(name: &str, tensor_parallel: u32) -> Result<Model, Failure> {
    let json = match BUILT_IN.iter().find(|(known, _)| *known == name) {
        Some((_, json)) => (*json).to_owned(),
        None => read(name)?,
    };
    let options = ModelOptions::new().tensor_parallel(tensor_parallel);
    let geometry = ModelGeometry::from_json(&json, &options)
        .map_err(|source| Failure::Model { name: name.to_owned(), source })?;
    Ok(Model { name: name.to_owned(), tensor_parallel, geometry })
}

fn read(name: &str) -> Result<String, Failure> {
    let path = Path::new(name);
    if !path.exists() {
        return Err(Failure::UnknownModel {
            name: name.to_owned(),
            known: BUILT_IN.map(|(name, _)| name).join(", "),
        });
    }
    fs::read_to_string(path).map_err(|source| Failure::ModelFile { path: path.to_owned(), source })
}
