//! The native module of the Python package `terrane_kv`.

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use pyo3::prelude::*;
    /// Filled at import.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
