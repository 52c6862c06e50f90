//! The exceptions, which mirror the store's typed errors.

use std::error::Error;

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use terrane_store::disk::CatalogError;
use terrane_store::{QueueError, StoreError as NativeError};

create_exception!(
    terrane_kv,
    StoreError,
    PyException,
    "A call was refused, or the store failed. The text states the request, the limit and the remedy."
);
create_exception!(terrane_kv, ClosedError, StoreError, "The store is closed.");
create_exception!(
    terrane_kv,
    ForkedError,
    StoreError,
    "The object belongs to the parent of this forked process. Open a store after the fork."
);
create_exception!(
    terrane_kv,
    QueueFullError,
    StoreError,
    "A completion queue has as many jobs and outcomes as its capacity. Drain it."
);
create_exception!(
    terrane_kv,
    InUseError,
    StoreError,
    "Another store owns the directory. The text names its host, process and start time."
);
create_exception!(
    terrane_kv,
    NamespaceError,
    StoreError,
    "The namespace is invalid, or the directory has blocks of another namespace."
);

/// An error and its sources as one text.
pub(crate) fn text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// The exception of an error of the store.
pub(crate) fn exception(error: &NativeError) -> PyErr {
    let text = text(error);
    match error {
        NativeError::Closed => ClosedError::new_err(text),
        NativeError::Forked(_) => ForkedError::new_err(text),
        NativeError::Queue(QueueError::Full { .. }) => QueueFullError::new_err(text),
        NativeError::Catalog(error) => catalog(error, text),
        _ => StoreError::new_err(text),
    }
}

/// The exception of an error of the catalog, with its whole text.
pub(crate) fn catalog(error: &CatalogError, text: String) -> PyErr {
    match error {
        CatalogError::Owned { .. } => InUseError::new_err(text),
        CatalogError::NamespaceDiffers { .. }
        | CatalogError::NamespaceName { .. }
        | CatalogError::NamespaceField { .. }
        | CatalogError::NamespaceTooLong { .. } => NamespaceError::new_err(text),
        _ => StoreError::new_err(text),
    }
}

/// The exception of an error of a queue.
pub(crate) fn queue(error: &QueueError) -> PyErr {
    let text = error.to_string();
    match error {
        QueueError::Full { .. } => QueueFullError::new_err(text),
        _ => StoreError::new_err(text),
    }
}
