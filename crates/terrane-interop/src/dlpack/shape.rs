//! The shape of a tensor: its element type, its sizes, and its strides.

use std::fmt;

use smallvec::SmallVec;
use terrane_core::ByteCount;

use super::ElementType;

/// The most axes that a tensor may have. NumPy and PyTorch have the same limit.
pub const MOST_AXES: usize = 64;

/// The inline capacity for the axes of a KV tensor, which avoids an allocation.
type Axes = SmallVec<[i64; 6]>;

/// A strided shape whose elements do not overlap, with every product checked.
///
/// Strides count elements, as in DLPack. A stride is never negative. It is not zero along an axis
/// of more than one element, because a tensor whose elements share bytes is not memory. Along an
/// axis of one element, and in an empty tensor, a stride has no meaning.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TensorShape {
    element: ElementType,
    sizes: Axes,
    strides: Axes,
    /// Whether lanes below eight bits occupy a whole byte each.
    padded: bool,
    elements: u64,
    /// The bytes from the start of the first element to the end of the last.
    bytes: ByteCount,
    dense: bool,
}

impl TensorShape {
    /// Creates the shape of these sizes, the last axis innermost, without gaps.
    ///
    /// # Errors
    ///
    /// [`ShapeError`] for too many axes, and for bytes that overflow.
    pub fn compact(element: ElementType, sizes: &[u64]) -> Result<Self, ShapeError> {
        let sizes = signed(sizes, |axis, size| ShapeError::TooManyElements { axis, size })?;
        Self::checked(element, sizes, None, false)
    }

    /// Creates the shape of these sizes and strides, in elements.
    ///
    /// # Errors
    ///
    /// [`ShapeError`] as from [`compact`](Self::compact), for a wrong number of strides, and for
    /// elements that would overlap.
    pub fn strided(
        element: ElementType,
        sizes: &[u64],
        strides: &[u64],
    ) -> Result<Self, ShapeError> {
        let too_far = |axis, stride| ShapeError::TooFarApart { axis, stride };
        let sizes = signed(sizes, |axis, size| ShapeError::TooManyElements { axis, size })?;
        Self::checked(element, sizes, Some(signed(strides, too_far)?), false)
    }

    /// Checks untrusted values.
    pub(crate) fn checked(
        element: ElementType,
        sizes: Axes,
        strides: Option<Axes>,
        padded: bool,
    ) -> Result<Self, ShapeError> {
        if sizes.len() > MOST_AXES {
            return Err(ShapeError::TooManyAxes { axes: sizes.len() });
        }
        let mut elements = 1_u64;
        let mut counts: SmallVec<[u64; 6]> = SmallVec::new();
        for (axis, &size) in sizes.iter().enumerate() {
            let count = u64::try_from(size).map_err(|_| ShapeError::NegativeSize { axis, size })?;
            counts.push(count);
        }
        // An axis without elements makes the product zero, even if other sizes are large.
        if counts.contains(&0) {
            elements = 0;
        } else {
            for (axis, &size) in counts.iter().enumerate() {
                elements = elements
                    .checked_mul(size)
                    .filter(|&elements| i64::try_from(elements).is_ok())
                    .ok_or(ShapeError::TooManyElements { axis, size })?;
            }
        }
        let strides = match strides {
            Some(strides) if strides.len() == sizes.len() => strides,
            Some(strides) => {
                return Err(ShapeError::StrideCount { axes: sizes.len(), strides: strides.len() });
            }
            None => compact_strides(&sizes),
        };
        let reach = if elements == 0 { 0 } else { reach(&counts, &strides)? };
        let bits = if padded { element.padded_bits() } else { element.packed_bits() };
        let bits = u128::from(reach) * u128::from(bits);
        let (bytes, fills) = (bits.div_ceil(8), bits.is_multiple_of(8));
        let bytes = i64::try_from(bytes).ok().and_then(|bytes| u64::try_from(bytes).ok());
        let bytes =
            ByteCount::new(bytes.ok_or(ShapeError::TooManyBytes { elements: reach, element })?);
        let dense = reach == elements && fills;
        Ok(Self { element, sizes, strides, padded, elements, bytes, dense })
    }

    /// The element type.
    #[must_use]
    pub const fn element(&self) -> ElementType {
        self.element
    }

    /// The number of elements along each axis.
    #[must_use]
    pub fn sizes(&self) -> &[i64] {
        &self.sizes
    }

    /// The stride of each axis, in elements.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        &self.strides
    }

    /// The number of elements.
    #[must_use]
    pub const fn elements(&self) -> u64 {
        self.elements
    }

    /// The bytes from the start of the first element to the end of the last, gaps included.
    #[must_use]
    pub const fn bytes(&self) -> ByteCount {
        self.bytes
    }

    /// Whether the elements fill their bytes. There are no gaps between them, in any order of the
    /// axes, and no unused bits in the last byte.
    #[must_use]
    pub const fn is_dense(&self) -> bool {
        self.dense
    }

    /// Whether elements of fewer than eight bits take a whole byte each.
    #[must_use]
    pub const fn is_padded(&self) -> bool {
        self.padded
    }
}

impl fmt::Debug for TensorShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sizes, strides) = (self.sizes.as_slice(), self.strides.as_slice());
        write!(f, "{sizes:?} of {} at strides {strides:?}", self.element)
    }
}

fn signed(numbers: &[u64], error: impl Fn(usize, u64) -> ShapeError) -> Result<Axes, ShapeError> {
    let numbers = numbers.iter().enumerate();
    numbers.map(|(axis, &number)| i64::try_from(number).map_err(|_| error(axis, number))).collect()
}

/// The strides with the last axis innermost. In an empty tensor, the strides have no meaning and
/// may wrap.
fn compact_strides(sizes: &[i64]) -> Axes {
    let mut stride = 1_i64;
    let mut strides: Axes = sizes
        .iter()
        .rev()
        .map(|&size| {
            let this = stride;
            stride = stride.wrapping_mul(size.max(1));
            this
        })
        .collect();
    strides.reverse();
    strides
}

/// The number of elements from the first to the last, both included; at least 1.
///
/// In ascending order, each stride must be at least the span of all smaller strides. Then no two
/// elements share a byte.
fn reach(counts: &[u64], strides: &[i64]) -> Result<u64, ShapeError> {
    let mut steps: SmallVec<[(u64, u64, usize); 6]> = SmallVec::new();
    for (axis, (&count, &stride)) in counts.iter().zip(strides).enumerate() {
        if count > 1 {
            let step =
                u64::try_from(stride).map_err(|_| ShapeError::NegativeStride { axis, stride })?;
            if step == 0 {
                return Err(ShapeError::Repeated { axis, count });
            }
            steps.push((step, count, axis));
        }
    }
    steps.sort_unstable();
    let mut reach = 1_u64;
    for &(stride, count, axis) in &steps {
        if stride < reach {
            return Err(ShapeError::Overlap { axis, stride, inner: reach });
        }
        reach = (count - 1)
            .checked_mul(stride)
            .and_then(|far| far.checked_add(reach))
            .filter(|&reach| i64::try_from(reach).is_ok())
            .ok_or(ShapeError::TooFarApart { axis, stride })?;
    }
    Ok(reach)
}

/// An invalid shape, or one that does not describe memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// More axes than [`MOST_AXES`].
    #[error("the tensor has {axes} axes; a tensor may have {MOST_AXES} at most")]
    TooManyAxes {
        /// The number of axes.
        axes: usize,
    },
    /// The number of strides differs from the number of axes.
    #[error("there are {strides} strides for {axes} axes; give one for each axis")]
    StrideCount {
        /// The number of axes.
        axes: usize,
        /// The number of strides.
        strides: usize,
    },
    /// A size below zero.
    #[error("axis {axis} has the size {size}; a size is at least 0")]
    NegativeSize {
        /// The axis, counted from 0.
        axis: usize,
        /// Its size.
        size: i64,
    },
    /// A stride below zero.
    #[error(
        "axis {axis} has the stride {stride}; strides must not be negative, so pass a tensor that \
         is not reversed"
    )]
    NegativeStride {
        /// The axis, counted from 0.
        axis: usize,
        /// Its stride.
        stride: i64,
    },
    /// Several elements at one address.
    #[error(
        "the {count} elements of axis {axis} have one address; pass the tensor before it is \
         broadcast"
    )]
    Repeated {
        /// The axis, counted from 0.
        axis: usize,
        /// Its size.
        count: u64,
    },
    /// Elements that overlap or are interleaved.
    #[error(
        "axis {axis} has a stride of {stride} elements, and the axes inside it take {inner}; \
         elements would overlap"
    )]
    Overlap {
        /// The axis, counted from 0.
        axis: usize,
        /// Its stride.
        stride: u64,
        /// The span of the axes with smaller strides, in elements.
        inner: u64,
    },
    /// A number of elements that overflows.
    #[error(
        "with the size {size} of axis {axis}, the tensor has more than 2^63 − 1 elements; use \
         smaller sizes"
    )]
    TooManyElements {
        /// The axis, counted from 0.
        axis: usize,
        /// Its size.
        size: u64,
    },
    /// A distance that overflows.
    #[error(
        "with the stride {stride} of axis {axis}, the tensor ends past the address space; use \
         smaller strides"
    )]
    TooFarApart {
        /// The axis, counted from 0.
        axis: usize,
        /// Its stride.
        stride: u64,
    },
    /// Bytes that overflow.
    #[error("{elements} elements of {element} take more than 2^63 − 1 bytes; use smaller sizes")]
    TooManyBytes {
        /// The number of elements from the first to the last.
        elements: u64,
        /// The element type.
        element: ElementType,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const E: ElementType = ElementType::F32;

    #[test]
    fn compact_shapes() {
        let shape = TensorShape::compact(E, &[2, 3, 5]).unwrap();
        assert_eq!(shape.strides(), [15, 5, 1]);
        assert_eq!((shape.elements(), shape.bytes().get(), shape.is_dense()), (30, 120, true));
        let scalar = TensorShape::compact(E, &[]).unwrap();
        assert_eq!((scalar.elements(), scalar.bytes().get()), (1, 4));
        let empty = TensorShape::compact(E, &[u64::MAX >> 1, 0, u64::MAX >> 1]).unwrap();
        assert_eq!((empty.elements(), empty.bytes().get()), (0, 0));
    }

    #[test]
    fn strided_shapes() {
        let transposed = TensorShape::strided(E, &[3, 2], &[1, 3]).unwrap();
        assert!(transposed.is_dense());
        let gaps = TensorShape::strided(E, &[3, 2], &[4, 1]).unwrap();
        assert_eq!((gaps.is_dense(), gaps.bytes().get()), (false, 40));
        // Along an axis of one element, the stride has no meaning.
        let one = TensorShape::strided(E, &[1, 2], &[0, 1]).unwrap();
        assert!(one.is_dense());
    }

    #[test]
    fn every_product_is_checked() {
        let compact = |sizes: &[u64]| TensorShape::compact(E, sizes).unwrap_err();
        assert!(matches!(compact(&[u64::MAX]), ShapeError::TooManyElements { axis: 0, .. }));
        assert!(matches!(
            compact(&[1 << 40, 1 << 40]),
            ShapeError::TooManyElements { axis: 1, .. }
        ));
        assert!(matches!(compact(&[1 << 62]), ShapeError::TooManyBytes { .. }));
        assert!(matches!(compact(&[1; 65]), ShapeError::TooManyAxes { axes: 65 }));
        let far = TensorShape::strided(E, &[1 << 40, 2], &[1 << 40, 1]).unwrap_err();
        assert!(matches!(far, ShapeError::TooFarApart { axis: 0, .. }));
    }

    #[test]
    fn elements_do_not_overlap() {
        let strided = |sizes: &[u64], strides: &[u64]| TensorShape::strided(E, sizes, strides);
        assert!(matches!(
            strided(&[4, 4], &[0, 1]),
            Err(ShapeError::Repeated { axis: 0, count: 4 })
        ));
        assert!(matches!(strided(&[4, 4], &[2, 1]), Err(ShapeError::Overlap { axis: 0, .. })));
        assert!(matches!(strided(&[4], &[1, 1]), Err(ShapeError::StrideCount { .. })));
        let negative = TensorShape::checked(
            E,
            [4].into_iter().collect(),
            Some([-1].into_iter().collect()),
            false,
        );
        assert!(matches!(negative, Err(ShapeError::NegativeStride { axis: 0, stride: -1 })));
        let negative = TensorShape::checked(E, [-4].into_iter().collect(), None, false);
        assert!(matches!(negative, Err(ShapeError::NegativeSize { axis: 0, size: -4 })));
    }

    #[test]
    fn elements_below_a_byte_are_packed_unless_padded() {
        let fp4 = ElementType::new(super::super::TypeCode::Float4E2M1Fn, 4, 1).unwrap();
        let odd = TensorShape::compact(fp4, &[3, 3]).unwrap();
        assert_eq!((odd.bytes().get(), odd.is_dense()), (5, false), "the byte is shared");
        assert!(TensorShape::compact(fp4, &[3, 4]).unwrap().is_dense());
        let padded = TensorShape::checked(fp4, [3, 3].into_iter().collect(), None, true).unwrap();
        assert_eq!((padded.bytes().get(), padded.is_dense()), (9, true));
    }
}
