//! Keys from Python: `bytes`, `str` (as UTF-8), or any buffer of bytes.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

/// Several keys, copied, so that they can be used without the GIL.
pub(crate) struct Keys {
    bytes: Vec<u8>,
    /// The end of each key in `bytes`.
    ends: Vec<usize>,
}

impl Keys {
    /// The keys of an iterable.
    pub(crate) fn of(keys: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut taken = Self { bytes: Vec::new(), ends: Vec::new() };
        for key in keys.try_iter()? {
            taken.add(&key?)?;
        }
        Ok(taken)
    }

    /// One key.
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
            self.bytes.extend_from_slice(&key.extract::<Vec<u8>>()?);
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
