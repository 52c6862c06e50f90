//! Arithmetic of one value, and of the values of all threads of a warp.

use super::instruction::{Binary, Comparison, Type, Unary};

/// The threads of a warp.
pub const LANES: usize = 32;

/// A value of each thread of a warp.
pub type Lanes = [u64; LANES];

/// Applies `call` to each value.
pub fn each(mut values: Lanes, call: impl Fn(u64) -> u64) -> Lanes {
    for value in &mut values {
        *value = call(*value);
    }
    values
}

/// Applies `call` to each pair of values.
pub fn each_pair(mut left: Lanes, right: &Lanes, call: impl Fn(u64, u64) -> u64) -> Lanes {
    for (left, right) in left.iter_mut().zip(right) {
        *left = call(*left, *right);
    }
    left
}

pub fn to_u32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// `count` bits from bit `at` on, limited to the bits of the type.
fn mask(kind: Type, at: u64, count: u64) -> u64 {
    let bits = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
    kind.cut(bits.checked_shl(to_u32(at)).unwrap_or(0))
}

/// Inserts the lowest `count` bits of one value into another, from bit `at` on.
pub fn insert(kind: Type, [inserted, into, at, count]: [u64; 4]) -> u64 {
    let (at, count) = (at & 0xFF, count & 0xFF);
    let mask = mask(kind, at, count);
    let moved = inserted.checked_shl(to_u32(at)).unwrap_or(0);
    kind.cut(into & !mask | moved & mask)
}

/// Extracts `count` bits of a value, from bit `at` on.
pub fn extract(kind: Type, [of, at, count]: [u64; 3]) -> u64 {
    let (at, count) = (at & 0xFF, count & 0xFF);
    let bits = Type { bits: to_u32(count.min(64)), ..kind };
    let found = kind.cut(of).checked_shr(to_u32(at)).unwrap_or(0);
    kind.cut(if count == 0 { 0 } else { bits.widen(found) })
}

pub fn unary(operation: Unary, kind: Type, value: u64) -> u64 {
    let value = kind.widen(value);
    match operation {
        Unary::Not if kind.bits == 1 => u64::from(value == 0),
        Unary::Not => kind.cut(!value),
        Unary::Negate => kind.cut(value.wrapping_neg()),
        Unary::Absolute => kind.cut(value.cast_signed().unsigned_abs()),
        Unary::Count => u64::from(kind.cut(value).count_ones()),
        Unary::Leading => u64::from(kind.cut(value).leading_zeros() - (64 - kind.bits)),
        Unary::Reverse => kind.cut(value).reverse_bits() >> (64 - kind.bits),
    }
}

/// [`binary`] for each thread. The most frequent operations have loops that the compiler vectorizes.
pub fn binary_of_all(operation: Binary, kind: Type, left: Lanes, right: &Lanes) -> Lanes {
    match operation {
        // The low bits of these results depend on the low bits of the arguments alone.
        Binary::Add => each_pair(left, right, |left, right| kind.cut(left.wrapping_add(right))),
        Binary::Subtract => {
            each_pair(left, right, |left, right| kind.cut(left.wrapping_sub(right)))
        }
        Binary::Multiply => {
            each_pair(left, right, |left, right| kind.cut(left.wrapping_mul(right)))
        }
        Binary::And => each_pair(left, right, |left, right| kind.cut(left & right)),
        Binary::Or => each_pair(left, right, |left, right| kind.cut(left | right)),
        Binary::Xor => each_pair(left, right, |left, right| kind.cut(left ^ right)),
        Binary::ShiftLeft => {
            each_pair(left, right, |left, right| binary(Binary::ShiftLeft, kind, left, right))
        }
        Binary::ShiftRight => {
            each_pair(left, right, |left, right| binary(Binary::ShiftRight, kind, left, right))
        }
        Binary::MultiplyWide => {
            each_pair(left, right, |left, right| binary(Binary::MultiplyWide, kind, left, right))
        }
        rare => each_pair(left, right, |left, right| binary(rare, kind, left, right)),
    }
}

#[inline]
pub fn binary(operation: Binary, kind: Type, left: u64, right: u64) -> u64 {
    let count = kind.cut(right);
    let (left, right) = (kind.widen(left), kind.widen(right));
    let wide = |value: u64| -> i128 {
        if kind.is_signed { i128::from(value.cast_signed()) } else { i128::from(value) }
    };
    let result = match operation {
        Binary::Add => left.wrapping_add(right),
        Binary::Subtract => left.wrapping_sub(right),
        Binary::Multiply => left.wrapping_mul(right),
        // The arguments have at most 32 bits, so the product has at most 64.
        Binary::MultiplyWide => return left.wrapping_mul(right),
        Binary::MultiplyHigh => {
            let product = if kind.is_signed {
                (wide(left) * wide(right)).cast_unsigned()
            } else {
                u128::from(left) * u128::from(right)
            };
            low_half(product >> kind.bits)
        }
        // The documentation does not define a division by zero.
        Binary::Divide if kind.is_signed => {
            left.cast_signed().checked_div(right.cast_signed()).unwrap_or(-1).cast_unsigned()
        }
        Binary::Divide => left.checked_div(right).unwrap_or(u64::MAX),
        Binary::Remainder if kind.is_signed => {
            left.cast_signed().checked_rem(right.cast_signed()).unwrap_or(-1).cast_unsigned()
        }
        Binary::Remainder => left.checked_rem(right).unwrap_or(u64::MAX),
        Binary::Least if wide(left) <= wide(right) => left,
        Binary::Least => right,
        Binary::Greatest if wide(left) >= wide(right) => left,
        Binary::Greatest => right,
        Binary::And => left & right,
        Binary::Or => left | right,
        Binary::Xor => left ^ right,
        Binary::ShiftLeft if count >= u64::from(kind.bits) => 0,
        Binary::ShiftLeft => left << count,
        Binary::ShiftRight if kind.is_signed => {
            (left.cast_signed() >> count.min(63)).cast_unsigned()
        }
        Binary::ShiftRight if count >= u64::from(kind.bits) => 0,
        Binary::ShiftRight => left >> count,
    };
    kind.cut(result)
}

fn low_half(value: u128) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = value.to_le_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Returns 1 for each thread whose comparison holds, and 0 for the others.
pub fn compare_all(operation: Comparison, kind: Type, left: Lanes, right: &Lanes) -> Lanes {
    let by = |is: fn(i64, i64) -> bool| {
        each_pair(left, right, |left, right| {
            u64::from(is(ordered(kind, left), ordered(kind, right)))
        })
    };
    match operation {
        Comparison::Equal => by(|left, right| left == right),
        Comparison::Unequal => by(|left, right| left != right),
        Comparison::Less => by(|left, right| left < right),
        Comparison::AtMost => by(|left, right| left <= right),
        Comparison::Greater => by(|left, right| left > right),
        Comparison::AtLeast => by(|left, right| left >= right),
    }
}

/// A signed number with the order that `value` has in its type.
fn ordered(kind: Type, value: u64) -> i64 {
    let value = kind.widen(value);
    if kind.is_signed { value.cast_signed() } else { (value ^ (1 << 63)).cast_signed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Binary; 14] = [
        Binary::Add,
        Binary::Subtract,
        Binary::Multiply,
        Binary::MultiplyHigh,
        Binary::MultiplyWide,
        Binary::Divide,
        Binary::Remainder,
        Binary::Least,
        Binary::Greatest,
        Binary::And,
        Binary::Or,
        Binary::Xor,
        Binary::ShiftLeft,
        Binary::ShiftRight,
    ];

    /// Numbers with every sign bit of the types, and small ones.
    fn numbers(step: u64) -> Lanes {
        let mut number = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(step);
        [0; LANES].map(|_| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            number.rotate_left(to_u32(number % 64)) >> (number % 61)
        })
    }

    #[test]
    fn all_threads_get_the_result_of_one() {
        for bits in [8, 16, 32, 64] {
            for is_signed in [false, true] {
                let kind = Type { is_signed, bits };
                for step in 1..20 {
                    let (left, right) = (numbers(step), numbers(step + 100));
                    for operation in ALL {
                        let found = binary_of_all(operation, kind, left, &right);
                        let pairs = left.iter().zip(&right);
                        let one = pairs.map(|(left, right)| binary(operation, kind, *left, *right));
                        assert!(found.into_iter().eq(one), "{operation:?} {kind:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn comparisons_have_the_order_of_their_type() {
        let pair = |left: u64, right: u64, kind| {
            let less = compare_all(Comparison::Less, kind, [left; LANES], &[right; LANES]);
            let least = compare_all(Comparison::AtLeast, kind, [left; LANES], &[right; LANES]);
            assert!(less.iter().zip(&least).all(|(less, least)| less + least == 1));
            less == [1; LANES]
        };
        let (signed, unsigned) =
            (Type { is_signed: true, bits: 8 }, Type { is_signed: false, bits: 8 });
        assert!(pair(0xFF, 1, signed) && !pair(0xFF, 1, unsigned));
        assert!(pair(0x1_02, 3, unsigned), "only the bits of the type count");
        let wide = Type { is_signed: false, bits: 64 };
        assert!(pair(1, u64::MAX, wide) && !pair(1, u64::MAX, Type { is_signed: true, ..wide }));
    }
}
