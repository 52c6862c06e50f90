//! One error for all parts of this crate.

use crate::dlpack::{ElementTypeError, ExportError, ImportError, ShapeError, StreamError};
use crate::tensors::{InvalidAxisOrder, KvError, StridedError};

/// The error of this crate. Each function returns the specific error of its part. All of these
/// convert into this error, so that `?` works in code that uses several parts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InteropError {
    /// A foreign tensor could not be imported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// Memory could not be exported as a tensor.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A consumer's stream was refused.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// An element type that DLPack does not have.
    #[error(transparent)]
    ElementType(#[from] ElementTypeError),
    /// Sizes or strides that no tensor can have.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A layout and the tensors of an engine do not match.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// Tensors were not adopted with their strides.
    #[error(transparent)]
    Strided(#[from] StridedError),
    /// Axes that no KV tensor has.
    #[error(transparent)]
    AxisOrder(#[from] InvalidAxisOrder),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dlpack::{ElementType, TensorShape};
    use crate::tensors::KvAxisOrder;

    fn shape(sizes: &[u64]) -> Result<TensorShape, InteropError> {
        let element = ElementType::new(crate::dlpack::TypeCode::Float, 16, 1)?;
        Ok(TensorShape::compact(element, sizes)?)
    }

    #[test]
    fn errors_of_parts_convert_and_keep_their_message() {
        assert!(shape(&[2, 3]).is_ok());
        let refused = shape(&[u64::MAX, 2]).unwrap_err();
        let InteropError::Shape(source) = &refused else { panic!("{refused:?}") };
        assert_eq!(refused.to_string(), source.to_string());
        let axis_order = || -> Result<KvAxisOrder, InteropError> { Ok(KvAxisOrder::new(&[])?) };
        assert!(matches!(axis_order(), Err(InteropError::AxisOrder(_))));
    }
}
