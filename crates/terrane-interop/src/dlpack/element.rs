//! The type of a tensor's elements.

use std::fmt;

use terrane_core::{Alignment, ByteCount};

use super::ffi::DLDataType;

/// The type code of an element, as DLPack 1.3 numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum TypeCode {
    /// A signed integer.
    Int = 0,
    /// An unsigned integer.
    UInt = 1,
    /// An IEEE floating-point number.
    Float = 2,
    /// A handle that both sides have agreed on.
    OpaqueHandle = 3,
    /// A bfloat16.
    BFloat = 4,
    /// Two floating-point numbers of half the bits each.
    Complex = 5,
    /// A truth value, of eight bits.
    Bool = 6,
    /// FP8 with 3 bits of exponent.
    Float8E3M4 = 7,
    /// FP8 with 4 bits of exponent, IEEE's special values.
    Float8E4M3 = 8,
    /// FP8 with 4 bits of exponent, biased by 11, without infinities.
    Float8E4M3B11Fnuz = 9,
    /// FP8 with 4 bits of exponent, without infinities: the format of KV caches.
    Float8E4M3Fn = 10,
    /// FP8 with 4 bits of exponent, without infinities and negative zero.
    Float8E4M3Fnuz = 11,
    /// FP8 with 5 bits of exponent.
    Float8E5M2 = 12,
    /// FP8 with 5 bits of exponent, without infinities and negative zero.
    Float8E5M2Fnuz = 13,
    /// FP8 with only an exponent: the scales of microscaling formats.
    Float8E8M0Fnu = 14,
    /// FP6 with 2 bits of exponent.
    Float6E2M3Fn = 15,
    /// FP6 with 3 bits of exponent.
    Float6E3M2Fn = 16,
    /// FP4 with 2 bits of exponent.
    Float4E2M1Fn = 17,
    /// Two bfloat16.
    BComplex = 18,
}

impl TypeCode {
    /// Every code, in the order of their numbers.
    pub const ALL: [Self; 19] = [
        Self::Int,
        Self::UInt,
        Self::Float,
        Self::OpaqueHandle,
        Self::BFloat,
        Self::Complex,
        Self::Bool,
        Self::Float8E3M4,
        Self::Float8E4M3,
        Self::Float8E4M3B11Fnuz,
        Self::Float8E4M3Fn,
        Self::Float8E4M3Fnuz,
        Self::Float8E5M2,
        Self::Float8E5M2Fnuz,
        Self::Float8E8M0Fnu,
        Self::Float6E2M3Fn,
        Self::Float6E3M2Fn,
        Self::Float4E2M1Fn,
        Self::BComplex,
    ];

    /// The code of this number, if there is one.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// DLPack's number.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Whether the code has a format with this number of bits.
    const fn has_bits(self, bits: u8) -> bool {
        match self {
            // Integers may have less than a byte, and some have 24 or 128 bits.
            Self::Int | Self::UInt => bits > 0,
            Self::Float => matches!(bits, 16 | 32 | 64 | 128),
            // Both sides know the format of a handle; it has whole bytes.
            Self::OpaqueHandle => bits > 0 && bits.is_multiple_of(8),
            Self::BFloat => bits == 16,
            Self::Complex => matches!(bits, 32 | 64 | 128),
            Self::BComplex => bits == 32,
            Self::Float6E2M3Fn | Self::Float6E3M2Fn => bits == 6,
            Self::Float4E2M1Fn => bits == 4,
            Self::Bool
            | Self::Float8E3M4
            | Self::Float8E4M3
            | Self::Float8E4M3B11Fnuz
            | Self::Float8E4M3Fn
            | Self::Float8E4M3Fnuz
            | Self::Float8E5M2
            | Self::Float8E5M2Fnuz
            | Self::Float8E8M0Fnu => bits == 8,
        }
    }
}

/// The type of an element: its code, the bits of each lane, and the number of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ElementType {
    code: TypeCode,
    bits: u8,
    lanes: u16,
}

impl ElementType {
    /// Signed integers of 8 bits.
    pub const I8: Self = Self::scalar(TypeCode::Int, 8);
    /// Signed integers of 32 bits.
    pub const I32: Self = Self::scalar(TypeCode::Int, 32);
    /// Signed integers of 64 bits.
    pub const I64: Self = Self::scalar(TypeCode::Int, 64);
    /// Bytes.
    pub const U8: Self = Self::scalar(TypeCode::UInt, 8);
    /// Unsigned integers of 16 bits.
    pub const U16: Self = Self::scalar(TypeCode::UInt, 16);
    /// Unsigned integers of 32 bits.
    pub const U32: Self = Self::scalar(TypeCode::UInt, 32);
    /// Half precision.
    pub const F16: Self = Self::scalar(TypeCode::Float, 16);
    /// Single precision.
    pub const F32: Self = Self::scalar(TypeCode::Float, 32);
    /// Double precision.
    pub const F64: Self = Self::scalar(TypeCode::Float, 64);
    /// bfloat16.
    pub const BF16: Self = Self::scalar(TypeCode::BFloat, 16);
    /// FP8 with 4 bits of exponent, without infinities.
    pub const F8_E4M3FN: Self = Self::scalar(TypeCode::Float8E4M3Fn, 8);
    /// FP8 with 5 bits of exponent.
    pub const F8_E5M2: Self = Self::scalar(TypeCode::Float8E5M2, 8);

    const fn scalar(code: TypeCode, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    /// Creates a type from these parts.
    ///
    /// # Errors
    ///
    /// [`ElementTypeError`] for no bits or lanes, and for bits that the code does not support.
    pub fn new(code: TypeCode, bits: u8, lanes: u16) -> Result<Self, ElementTypeError> {
        if !code.has_bits(bits) {
            return Err(ElementTypeError::Bits { code, bits });
        }
        if lanes == 0 {
            return Err(ElementTypeError::NoLanes { code });
        }
        Ok(Self { code, bits, lanes })
    }

    /// The code.
    #[must_use]
    pub const fn code(self) -> TypeCode {
        self.code
    }

    /// The bits of each lane.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.bits
    }

    /// The lanes of each element.
    #[must_use]
    pub const fn lanes(self) -> u16 {
        self.lanes
    }

    /// The bytes of an element, if they are whole. Lanes below eight bits may not fill them.
    #[must_use]
    pub fn width(self) -> Option<ByteCount> {
        let bits = self.packed_bits();
        bits.is_multiple_of(8).then(|| ByteCount::new(bits / 8))
    }

    /// The bits of an element with adjacent lanes.
    pub(crate) fn packed_bits(self) -> u64 {
        u64::from(self.bits) * u64::from(self.lanes)
    }

    /// The bits of an element whose lanes are padded to whole bytes each.
    pub(crate) fn padded_bits(self) -> u64 {
        u64::from(self.bits).next_multiple_of(8) * u64::from(self.lanes)
    }

    /// Whether each lane is whole bytes, so that padding changes nothing.
    pub(crate) fn fills_bytes(self) -> bool {
        self.packed_bits() == self.padded_bits()
    }

    /// The alignment of an element's address, in bytes: that of one number in a lane.
    pub(crate) fn alignment(self) -> Alignment {
        let bytes = match self.code {
            TypeCode::Complex | TypeCode::BComplex => self.bits / 16,
            _ => self.bits / 8,
        };
        // Zero bytes have any alignment. Otherwise it is the largest power of two that divides
        // them, at most 16.
        match bytes {
            0 => Alignment::BYTE,
            _ => Alignment::of(u64::from(bytes)),
        }
    }

    pub(crate) fn from_raw(raw: DLDataType) -> Result<Self, ElementTypeError> {
        let DLDataType { code, bits, lanes } = raw;
        let code = TypeCode::from_number(code).ok_or(ElementTypeError::UnknownCode { code })?;
        Self::new(code, bits, lanes)
    }

    pub(crate) const fn to_raw(self) -> DLDataType {
        DLDataType { code: self.code.number(), bits: self.bits, lanes: self.lanes }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {} bits", self.code, self.bits)?;
        if self.lanes == 1 { Ok(()) } else { write!(f, " × {}", self.lanes) }
    }
}

/// An invalid type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ElementTypeError {
    /// The code is not one of DLPack's.
    #[error(
        "the element type has the code {code}, which DLPack 1.3 does not define; use a code from 0 \
         to 18"
    )]
    UnknownCode {
        /// The number.
        code: u8,
    },
    /// The code has no format with this number of bits.
    #[error(
        "{bits} bits were requested for elements of {code:?}, which DLPack does not define; use \
         one of the widths of that code"
    )]
    Bits {
        /// The code.
        code: TypeCode,
        /// The bits.
        bits: u8,
    },
    /// An element without lanes.
    #[error("elements of {code:?} have 0 lanes; a scalar has 1")]
    NoLanes {
        /// The code.
        code: TypeCode,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_their_numbers() {
        for (number, code) in (0_u8..).zip(TypeCode::ALL) {
            assert_eq!(code.number(), number);
            assert_eq!(TypeCode::from_number(number), Some(code));
        }
        assert_eq!(TypeCode::from_number(19), None);
    }

    #[test]
    fn types_survive_the_way_there_and_back() {
        for element in
            [ElementType::BF16, ElementType::F8_E4M3FN, ElementType::F64, ElementType::I8]
        {
            assert_eq!(ElementType::from_raw(element.to_raw()), Ok(element));
        }
        let four = ElementType::new(TypeCode::Float, 32, 4).unwrap();
        assert_eq!((four.width(), four.alignment().get()), (Some(ByteCount::new(16)), 4));
        assert_eq!(four.to_string(), "Float of 32 bits × 4");
    }

    #[test]
    fn invalid_types_are_refused() {
        let refused = [
            (0, 0, 1),
            (2, 0, 1),
            (2, 32, 0),
            (2, 7, 1),
            (2, 8, 1),
            (3, 3, 1),
            (4, 32, 1),
            (5, 1, 1),
            (5, 8, 1),
            (10, 16, 1),
            (15, 8, 1),
            (19, 8, 1),
            (255, 8, 1),
        ];
        for (code, bits, lanes) in refused {
            let found = ElementType::from_raw(DLDataType { code, bits, lanes });
            assert!(found.is_err(), "code {code}, {bits} bits, {lanes} lanes");
        }
        // NumPy's long double, and its pairs of half precision.
        assert!(ElementType::new(TypeCode::Float, 128, 1).is_ok());
        assert!(ElementType::new(TypeCode::Complex, 32, 1).is_ok());
    }

    #[test]
    fn bits_below_a_byte_have_no_width_of_their_own() {
        let fp4 = ElementType::new(TypeCode::Float4E2M1Fn, 4, 1).unwrap();
        assert_eq!((fp4.width(), fp4.padded_bits()), (None, 8));
        let pair = ElementType::new(TypeCode::Float4E2M1Fn, 4, 2).unwrap();
        assert_eq!(pair.width(), Some(ByteCount::new(1)));
        assert_eq!(ElementType::new(TypeCode::Complex, 128, 1).unwrap().alignment().get(), 8);
    }
}
