//! Numbers from Python: times, sizes, and ids of blocks as NumPy arrays or lists.

use std::time::{Duration, Instant};

use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// The ids in an array of integers (with the buffer protocol) or in an iterable of integers.
pub(crate) fn ids(values: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let Ok(buffer) = PyUntypedBuffer::get(values) else {
        return values.try_iter()?.map(|value| value?.extract::<usize>()).collect();
    };
    let py = values.py();
    if buffer.dimensions() != 1 {
        let dimensions = buffer.dimensions();
        return Err(PyTypeError::new_err(format!(
            "ids have {dimensions} dimensions; pass 1 dimension"
        )));
    }
    match ElementType::from_format(buffer.format()) {
        ElementType::SignedInteger { bytes: 4 } => all(buffer.into_typed::<i32>()?.to_vec(py)?),
        ElementType::SignedInteger { bytes: 8 } => all(buffer.into_typed::<i64>()?.to_vec(py)?),
        ElementType::UnsignedInteger { bytes: 4 } => all(buffer.into_typed::<u32>()?.to_vec(py)?),
        ElementType::UnsignedInteger { bytes: 8 } => all(buffer.into_typed::<u64>()?.to_vec(py)?),
        _ => Err(PyTypeError::new_err("ids are not integers of 4 or 8 bytes; use numpy.int64")),
    }
}

fn all<T: TryInto<usize> + Copy + std::fmt::Display>(values: Vec<T>) -> PyResult<Vec<usize>> {
    let id = |value: T| {
        value.try_into().map_err(|_| PyValueError::new_err(format!("{value} is not a block id")))
    };
    values.into_iter().map(id).collect()
}

/// The instant this many seconds from now; `None` without a limit.
pub(crate) fn deadline(seconds: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = seconds else { return Ok(None) };
    let wait = Duration::try_from_secs_f64(seconds).map_err(|_| {
        PyValueError::new_err(format!("the timeout is {seconds} seconds; pass 0 or more, or None"))
    })?;
    // A time beyond the clock's range means no limit.
    Ok(Instant::now().checked_add(wait))
}

/// The instant this many seconds from now.
pub(crate) fn moment(seconds: f64) -> PyResult<Instant> {
    let far = Duration::from_secs(365 * 24 * 3600);
    Ok(deadline(Some(seconds))?.unwrap_or_else(|| Instant::now() + far))
}
