//! Tensors of any library: memory with sizes and strides.

use std::fmt;

use smallvec::SmallVec;
use terrane_core::{ByteCount, ForeignMemory, Location, Memory, Region, Span, StorageKind};
use terrane_layout::{Axis, SectionName, TensorAxis};

use super::StridedError;
use crate::dlpack::ImportedTensor;

/// One number for each dimension.
type Numbers = SmallVec<[u64; 6]>;

/// A tensor of a cache: the location of its elements, and their strides.
///
/// Create it from [memory](Self::from_memory), from [an address](Self::from_raw) with the owner of
/// the bytes, or from [a DLPack tensor](Self::from_imported). Strides count elements, as in candle,
/// PyTorch and DLPack. Clones share the memory.
#[derive(Clone)]
pub struct StridedTensor {
    pub(super) source: Source,
    pub(super) span: Span,
    pub(super) element_bytes: u32,
    pub(super) sizes: Numbers,
    pub(super) strides: Numbers,
}

/// The owner of the bytes, which determines the bytes that may be used.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// All bytes from the first element to the last.
    Memory(Region),
    /// Only the elements.
    Imported(ImportedTensor),
}

impl StridedTensor {
    /// The tensor whose first element is at the start of `memory`.
    ///
    /// # Errors
    ///
    /// [`StridedError`] for sizes and strides that are negative or too large, or that exceed the
    /// memory.
    pub fn from_memory<S: TryInto<i64>, T: TryInto<i64>>(
        memory: impl Memory,
        element_bytes: u32,
        sizes: impl IntoIterator<Item = S>,
        strides: impl IntoIterator<Item = T>,
    ) -> Result<Self, StridedError> {
        let shape = Shape::checked(element_bytes, sizes, strides)?;
        let actual = memory.length();
        if actual < shape.bytes {
            return Err(StridedError::TooShort { needed: shape.bytes, actual });
        }
        let region = Region::new(memory);
        let region = region
            .view(ByteCount::ZERO, shape.bytes)
            .map_err(|_| StridedError::TooShort { needed: shape.bytes, actual })?;
        Ok(shape.at(region.span(), Source::Memory(region)))
    }

    /// The tensor whose first element is at `location`, kept alive by `owner`.
    ///
    /// # Errors
    ///
    /// [`StridedError`] for sizes and strides that are negative or too large.
    ///
    /// # Safety
    ///
    /// While `owner` lives, the requirements of [`ForeignMemory::new`] hold for every byte from the
    /// first element to the last, including the bytes between elements.
    pub unsafe fn from_raw<S: TryInto<i64>, T: TryInto<i64>>(
        (kind, location): (StorageKind, Location),
        element_bytes: u32,
        sizes: impl IntoIterator<Item = S>,
        strides: impl IntoIterator<Item = T>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self, StridedError> {
        let shape = Shape::checked(element_bytes, sizes, strides)?;
        let span = Span { kind, location, length: shape.bytes };
        if location.checked_add(shape.bytes).is_none() {
            return Err(StridedError::TooLarge { dimension: 0 });
        }
        // SAFETY: the caller's promise, for the bytes up to the last element.
        let memory = unsafe { ForeignMemory::new(span, owner) };
        Ok(shape.at(span, Source::Memory(Region::new(memory))))
    }

    /// A DLPack tensor. Only its elements may be used, because the bytes between them may belong to
    /// another library. To use these bytes too, pass [`ImportedTensor::memory_with_gaps`] to
    /// [`from_memory`](Self::from_memory).
    ///
    /// # Errors
    ///
    /// [`StridedError::Element`] for elements that are not a whole number of bytes.
    pub fn from_imported(tensor: &ImportedTensor) -> Result<Self, StridedError> {
        let shape = tensor.shape();
        let element = shape.element();
        let width = element.width().and_then(|width| u32::try_from(width.get()).ok());
        let is_whole = !shape.is_padded() || element.fills_bytes();
        let width = width.filter(|_| is_whole).ok_or(StridedError::Element { element })?;
        let (sizes, strides) = (shape.sizes().iter().copied(), shape.strides().iter().copied());
        let shape = Shape::checked(width, sizes, strides)?;
        Ok(shape.at(tensor.span(), Source::Imported(tensor.clone())))
    }

    /// The number of elements along each dimension.
    #[must_use]
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// The distances along each dimension, in elements.
    #[must_use]
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// The bytes from the first element to the last.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }

    /// The bytes of all elements, without the bytes between them.
    pub(super) fn element_bytes_in_all(&self) -> Option<u64> {
        let mut factors = self.sizes.iter();
        factors.try_fold(u64::from(self.element_bytes), |bytes, &size| bytes.checked_mul(size))
    }
}

impl fmt::Debug for StridedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StridedTensor")
            .field("span", &self.span)
            .field("element_bytes", &self.element_bytes)
            .field("sizes", &self.sizes.as_slice())
            .field("strides", &self.strides.as_slice())
            .finish_non_exhaustive()
    }
}

/// Sizes and strides that have been checked.
struct Shape {
    element_bytes: u32,
    sizes: Numbers,
    strides: Numbers,
    /// From the first byte of the first element to the last byte of the last.
    bytes: ByteCount,
}

impl Shape {
    fn checked<S: TryInto<i64>, T: TryInto<i64>>(
        element_bytes: u32,
        sizes: impl IntoIterator<Item = S>,
        strides: impl IntoIterator<Item = T>,
    ) -> Result<Self, StridedError> {
        let too_large = |dimension| StridedError::TooLarge { dimension };
        let signed = |(dimension, number): (usize, Result<i64, _>)| {
            number.map_err(|_: ()| too_large(dimension)).map(|number| (dimension, number))
        };
        let sizes = sizes.into_iter().map(|size| size.try_into().map_err(|_| ())).enumerate();
        let sizes = sizes.map(|size| {
            let (dimension, size) = signed(size)?;
            u64::try_from(size).map_err(|_| StridedError::NegativeSize { dimension, size })
        });
        let strides = strides.into_iter().map(|each| each.try_into().map_err(|_| ())).enumerate();
        let strides = strides.map(|stride| {
            let (dimension, stride) = signed(stride)?;
            u64::try_from(stride).map_err(|_| StridedError::NegativeStride { dimension, stride })
        });
        let sizes = sizes.collect::<Result<Numbers, _>>()?;
        let strides = strides.collect::<Result<Numbers, _>>()?;
        if sizes.len() != strides.len() {
            return Err(StridedError::Rank { expected: sizes.len(), found: strides.len() });
        }
        let mut bytes = u64::from(element_bytes);
        for (dimension, (&size, &stride)) in sizes.iter().zip(&strides).enumerate() {
            let far = size.checked_sub(1).ok_or(StridedError::ZeroSize { dimension })?;
            bytes = far
                .checked_mul(stride)
                .and_then(|elements| elements.checked_mul(element_bytes.into()))
                .and_then(|more| bytes.checked_add(more))
                .filter(|&bytes| i64::try_from(bytes).is_ok())
                .ok_or(too_large(dimension))?;
        }
        Ok(Self { element_bytes, sizes, strides, bytes: ByteCount::new(bytes) })
    }

    fn at(self, span: Span, source: Source) -> StridedTensor {
        let Self { element_bytes, sizes, strides, .. } = self;
        StridedTensor { source, span, element_bytes, sizes, strides }
    }
}

/// The meaning of each dimension of a cache's tensors.
///
/// Sizes and strides come from the tensors. A form only names the dimensions. A dimension that
/// occurs twice is split in two, such as `D/x` and `x` in `[B, H, D/x, N, x]`.
///
/// ```
/// use terrane_interop::tensors::StridedForm;
/// use terrane_layout::{Axis, SectionName, TensorAxis};
///
/// // 32 tensors [2, blocks, heads, tokens, head size], one for each layer.
/// let form = StridedForm::new(&[SectionName::K, SectionName::V])
///     .tensors(Axis::Layer, 32)
///     .dim(TensorAxis::Outer)
///     .dim(Axis::Block)
///     .dim(Axis::Head)
///     .dim(Axis::Token)
///     .dim(Axis::Element);
/// ```
#[derive(Clone, Debug)]
#[must_use = "a form describes tensors to `adopt_strided`"]
pub struct StridedForm {
    pub(super) sections: SmallVec<[SectionName; 2]>,
    pub(super) lists: SmallVec<[(TensorAxis, u32); 2]>,
    pub(super) dimensions: SmallVec<[Dimension; 6]>,
    /// The bytes of a group of elements that is never split.
    pub(super) unit: Option<u32>,
}

/// The meaning of one dimension.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dimension {
    Of(TensorAxis),
    /// Two axes in one: positions of `outer`, each of `count` positions of `inner`.
    Joined {
        outer: Axis,
        inner: Axis,
        count: u32,
    },
    /// An axis of size 1 without meaning.
    One,
}

impl StridedForm {
    /// Creates a form for these sections.
    pub fn new(sections: &[SectionName]) -> Self {
        Self {
            sections: sections.into(),
            lists: SmallVec::new(),
            dimensions: SmallVec::new(),
            unit: None,
        }
    }

    /// Adds a list of tensors, one for each position of `axis`. With two lists, the tensors of the
    /// second list are adjacent.
    pub fn tensors(mut self, axis: impl Into<TensorAxis>, count: u32) -> Self {
        self.lists.push((axis.into(), count));
        self
    }

    /// Adds the next dimension of each tensor.
    pub fn dim(self, axis: impl Into<TensorAxis>) -> Self {
        self.with(Dimension::Of(axis.into()))
    }

    /// Adds a dimension for two axes: positions of `outer`, each with `count` positions of `inner`.
    /// For example, SGLang's slots are blocks of tokens.
    pub fn joined(self, outer: Axis, inner: Axis, count: u32) -> Self {
        self.with(Dimension::Joined { outer, inner, count })
    }

    /// Adds a dimension with size 1 and no meaning.
    pub fn one(self) -> Self {
        self.with(Dimension::One)
    }

    /// Never splits groups of this number of bytes along the elements, such as elements that share
    /// a scale. The elements must be adjacent.
    pub fn grouped(self, bytes: u32) -> Self {
        Self { unit: Some(bytes), ..self }
    }

    fn with(mut self, dimension: Dimension) -> Self {
        self.dimensions.push(dimension);
        self
    }
}
