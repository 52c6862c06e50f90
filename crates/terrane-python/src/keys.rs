//! Keys from Python: `bytes`, `str` (as UTF-8), or any sequence of numbers below 256, such as a `bytearray`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

/// Several keys, copied for use without the GIL.
pub(crate) struct Keys {
    bytes: Vec<u8>,
    /// The end of each key in `bytes`.
    ends: Vec<usize>,
}

impl Keys {
    /// Copies the keys of an iterable.
    pub(crate) fn of(keys: &Bound<'_, PyAny>) -> PyResult<Self> {
        if keys.is_instance_of::<PyString>() || keys.is_instance_of::<PyBytes>() {
            return Err(PyTypeError::new_err(format!(
                "the keys are a single key, {keys:?}; pass a list of keys"
            )));
        }
        let mut taken = Self { bytes: Vec::new(), ends: Vec::new() };
        for key in keys.try_iter()? {
            taken.add(&key?)?;
        }
        Ok(taken)
    }

    /// Copies one key.
    pub(crate) fn one(key: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut taken = Self { bytes: Vec::new(), ends: Vec::new() };
        taken.add(key)?;
        Ok(taken)
    }

    fn add(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Ok(key) = key.cast::<PyBytes>() {
            self.bytes.extend_from_slice(key.as_bytes());
        } else if let Ok(key) = key.cast::<PyString>() {
            self.bytes.extend_from_slice(key.to_cow()?.as_bytes());
        } else {
            let bytes = key.extract::<Vec<u8>>().map_err(|_| {
                PyTypeError::new_err(format!("the key {key:?} is neither bytes nor a str"))
            })?;
            self.bytes.extend_from_slice(&bytes);
        }
        self.ends.push(self.bytes.len());
        Ok(())
    }

    /// The keys in their order.
    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        let slices = begins.zip(&self.ends).map(|(begin, &end)| self.bytes.get(begin..end));
        slices.map(Option::unwrap_or_default).collect()
    }
}
