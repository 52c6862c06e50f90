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

/// A group: its name, its blocks and its weight.
pub(crate) struct Group<'py> {
    pub(crate) name: String,
    pub(crate) blocks: BlockShape<'py>,
    pub(crate) weight: u32,
}

/// Parses the groups.
pub(crate) fn groups<'py>(value: &Bound<'py, PyAny>) -> PyResult<Vec<Group<'py>>> {
    value.try_iter()?.map(|group| parse(&group?)).collect()
}

fn parse<'py>(group: &Bound<'py, PyAny>) -> PyResult<Group<'py>> {
    let with_weight = group.extract::<(String, Bound<'py, PyAny>, u32)>();
    let without = || group.extract::<(String, Bound<'py, PyAny>)>();
    let Ok((name, blocks, weight)) =
        with_weight.or_else(|_| without().map(|(name, blocks)| (name, blocks, 1)))
    else {
        return Err(PyTypeError::new_err(format!(
            "the group {group:?} is not valid; pass a name, the bytes of its largest block, and optionally a weight, \
             such as (\"kv\", 1 << 20)"
        )));
    };
    let blocks = shape(&name, &blocks)?;
    Ok(Group { name, blocks, weight })
}

fn shape<'py>(name: &str, blocks: &Bound<'py, PyAny>) -> PyResult<BlockShape<'py>> {
    if let Ok(cache) = blocks.cast::<KvCache>() {
        return Ok(BlockShape::Cache(cache.clone()));
    }
    let bytes = blocks.extract::<u32>().map_err(|_| {
        PyValueError::new_err(format!(
            "blocks of {blocks:?} in the group {name:?} are not valid; pass the bytes of the largest block, less than 2^32, or a KvCache"
        ))
    })?;
    Ok(BlockShape::Bytes(bytes))
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
