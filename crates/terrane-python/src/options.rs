//! The options of a store, from Python's arguments.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use terrane_store::WritePolicy;

use crate::cache::KvCache;

/// The blocks of a group.
pub(crate) enum BlockShape<'py> {
    Bytes(u32),
    Cache(Bound<'py, KvCache>),
}

/// Parses the groups: pairs of a name and the blocks.
pub(crate) fn groups<'py>(value: &Bound<'py, PyAny>) -> PyResult<Vec<(String, BlockShape<'py>)>> {
    value.try_iter()?.map(|group| pair(&group?)).collect()
}

fn pair<'py>(group: &Bound<'py, PyAny>) -> PyResult<(String, BlockShape<'py>)> {
    let Ok((name, blocks)) = group.extract::<(String, Bound<'py, PyAny>)>() else {
        return Err(PyTypeError::new_err(format!(
            "the group {group:?} is not valid; pass a name and the bytes of its largest block, such as (\"kv\", 1 << 20)"
        )));
    };
    if let Ok(cache) = blocks.cast::<KvCache>() {
        return Ok((name, BlockShape::Cache(cache.clone())));
    }
    let bytes = blocks.extract::<u32>().map_err(|_| {
        PyValueError::new_err(format!(
            "blocks of {blocks:?} in the group {name:?} are not valid; pass the bytes of the largest block, less than 2^32, or a KvCache"
        ))
    })?;
    Ok((name, BlockShape::Bytes(bytes)))
}

/// Parses a number of bytes.
pub(crate) fn bytes(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|_| {
        PyValueError::new_err(format!(
            "{value:?} is not a number of bytes; pass an integer of 0 or more, such as 64 << 30"
        ))
    })
}

/// When blocks are written to slower tiers.
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
                "write={name:?} is not valid; pass \"through\", \"back\", or a number of uses"
            ))),
        }
    }
}
