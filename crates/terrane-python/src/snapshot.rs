//! The numbers of a store as a dictionary.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use terrane_store::{StoreSnapshot, TierSnapshot};

/// The numbers of a snapshot, by name.
pub(crate) fn dictionary<'py>(
    py: Python<'py>,
    snapshot: &StoreSnapshot,
) -> PyResult<Bound<'py, PyDict>> {
    let numbers = PyDict::new(py);
    numbers.set_item("running_jobs", snapshot.running_jobs)?;
    numbers.set_item("ended_jobs", snapshot.ended_jobs)?;
    numbers.set_item("refused_jobs", snapshot.refused_jobs)?;
    numbers.set_item("already_stored", snapshot.already_stored)?;
    numbers.set_item("timed_out", snapshot.timed_out)?;
    numbers.set_item("cancelled", snapshot.cancelled)?;
    numbers.set_item("failed", snapshot.failed)?;
    numbers.set_item("absent", snapshot.misses.absent)?;
    numbers.set_item("evicted", snapshot.misses.evicted)?;
    numbers.set_item("corrupt", snapshot.misses.corrupt)?;
    numbers.set_item("wrong_length", snapshot.misses.wrong_length)?;
    let disk = snapshot.tiers.iter().find(|tier| tier.is_disk);
    numbers.set_item("disk_read_only", disk.and_then(|tier| tier.read_only.as_deref()))?;
    let tiers: PyResult<Vec<_>> = snapshot.tiers.iter().map(|each| tier(py, each)).collect();
    numbers.set_item("tiers", PyList::new(py, tiers?)?)?;
    Ok(numbers)
}

fn tier<'py>(py: Python<'py>, tier: &TierSnapshot) -> PyResult<Bound<'py, PyDict>> {
    let numbers = PyDict::new(py);
    let sum = |count: fn(&terrane_store::GroupSnapshot) -> usize| -> usize {
        tier.groups.iter().map(count).sum()
    };
    numbers.set_item("name", &tier.name)?;
    numbers.set_item("capacity", tier.capacity.get())?;
    numbers.set_item("slots", sum(|group| group.slots))?;
    let slots: Vec<usize> = tier.groups.iter().map(|group| group.slots).collect();
    numbers.set_item("group_slots", slots)?;
    numbers.set_item("blocks", sum(|group| group.blocks))?;
    numbers.set_item("pinned", sum(|group| group.pinned))?;
    numbers.set_item("hits", tier.hits)?;
    numbers.set_item("stored", tier.stored)?;
    numbers.set_item("evictions", tier.evictions)?;
    numbers.set_item("read_bytes", tier.read_bytes)?;
    numbers.set_item("written_bytes", tier.written_bytes)?;
    Ok(numbers)
}
