//! One error for all parts of this crate.

use terrane_cuda::CudaError;

use crate::arrays::{ExportError, ImportError};
use crate::columns::ColumnError;

/// The error of this crate. Each function returns the specific error of its part. All of these
/// convert into this error, so that `?` works in code that uses several parts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// A foreign array or schema was refused.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// A column or schema was not exported.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A column or a columnar buffer was refused.
    #[error(transparent)]
    Column(#[from] ColumnError),
    /// The CUDA driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrays::abi::{ArrowSchema, Released};
    use crate::arrays::import_field;
    use arrow_schema::Field;

    #[test]
    fn errors_of_parts_convert_and_keep_their_message() {
        let mut released = ArrowSchema::EMPTY;
        let mut import = || -> Result<Field, ExchangeError> {
            // SAFETY: a released schema may be passed, and is refused.
            Ok(unsafe { import_field(&raw mut released) }?)
        };
        let refused = import().unwrap_err();
        let ExchangeError::Import(source) = &refused else { panic!("{refused:?}") };
        assert_eq!(refused.to_string(), source.to_string());
        let column = ColumnError::TooMany { what: "rows", limit: 1 };
        assert!(matches!(ExchangeError::from(column), ExchangeError::Column(_)));
    }
}
