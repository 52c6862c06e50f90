//! The options of a store, as Python states them.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use terrane_store::WritePolicy;

use crate::cache::KvCache;

/// The blocks of a group.
pub(crate) enum BlockShape<'py> {
    Bytes(u32),
    Cache(Bound<'py, KvCache>),
}

/// The groups: pairs of a name and the blocks.
pub(crate) fn groups<'py>(value: &Bound<'py, PyAny>) -> PyResult<Vec<(String, BlockShape<'py>)>> {
    value.try_iter()?.map(|group| pair(&group?)).collect()
}

fn pair<'py>(group: &Bound<'py, PyAny>) -> PyResult<(String, BlockShape<'py>)> {
    let Ok((name, blocks)) = group.extract::<(String, Bound<'py, PyAny>)>() else {
        return Err(PyTypeError::new_err(format!(
            "the group {group:?}; state a name and the bytes of its largest block, such as (\"kv\", 1 << 20)"
        )));
    };
    if let Ok(cache) = blocks.cast::<KvCache>() {
        return Ok((name, BlockShape::Cache(cache.clone())));
    }
    let bytes = blocks.extract::<u32>().map_err(|_| {
        PyValueError::new_err(format!(
            "blocks of {blocks:?} in the group {name:?}; state the bytes of the largest one, less than 2^32, or a KvCache"
        ))
    })?;
    Ok((name, BlockShape::Bytes(bytes)))
}

/// A number of bytes.
pub(crate) fn bytes(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|_| {
        PyValueError::new_err(format!(
            "{value:?} is no number of bytes; state an integer of 0 or more, such as 64 << 30"
        ))
    })
}

/// When blocks go to slower tiers.
#[derive(FromPyObject)]
pub(crate) enum Write {
    AfterUses(u8),
    Named(String),
}

impl Write {
    pub(crate) fn policy(&self) -> PyResult<WritePolicy> {
        match self {
            Self::AfterUses(uses) => Ok(WritePolicy::AfterUses(*uses)),
            Self::Named(name) if name == "through" => Ok(WritePolicy::Through),
            Self::Named(name) if name == "back" => Ok(WritePolicy::Back),
            Self::Named(name) => Err(PyValueError::new_err(format!(
                "write={name:?}; state \"through\", \"back\", or a number of uses"
            ))),
        }
    }
}
