//! Checks which types can have values, and their nesting.

use arrow_schema::{
    DECIMAL32_MAX_PRECISION, DECIMAL64_MAX_PRECISION, DECIMAL128_MAX_PRECISION,
    DECIMAL256_MAX_PRECISION, DataType,
};

use super::{ColumnError, shape};

/// The maximum number of levels below the top. Each level needs stack when types and columns are
/// walked.
pub(crate) const MOST_LEVELS: u64 = 64;
/// The maximum number of fields of a type, counted at each place where they occur. Fields are
/// shared, so a small type can have 2^40 fields.
pub(crate) const MOST_FIELDS: u64 = 1 << 20;

/// The maximum number of rows, including those before the first. Arrow counts rows in signed
/// integers.
pub(crate) const MOST_ROWS: u64 = i64::MAX.cast_unsigned();

/// Why a type cannot have values, independently of its child types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Its values have a negative width.
    NegativeWidth,
    /// Another reason.
    Other(&'static str),
}

impl Fault {
    /// The fault as an error of a column.
    pub(crate) fn of(self, data_type: &DataType) -> ColumnError {
        let data_type = data_type.clone();
        match self {
            Self::NegativeWidth => ColumnError::NegativeWidth { data_type },
            Self::Other(reason) => ColumnError::InvalidType { data_type, reason },
        }
    }
}

/// Checks one level of a type.
pub(crate) fn check_level(data_type: &DataType) -> Result<(), Fault> {
    use DataType as T;
    let refused = |reason| Err(Fault::Other(reason));
    match data_type {
        T::FixedSizeBinary(size) | T::FixedSizeList(_, size) if *size < 0 => {
            Err(Fault::NegativeWidth)
        }
        T::Decimal32(precision, scale)
        | T::Decimal64(precision, scale)
        | T::Decimal128(precision, scale)
        | T::Decimal256(precision, scale)
            if !has_digits(data_type, *precision, *scale) =>
        {
            refused("has an invalid precision or scale")
        }
        T::Dictionary(key, _) if !key.is_dictionary_key_type() => {
            refused("has keys that are not integers")
        }
        T::RunEndEncoded(ends, _)
            if !matches!(ends.data_type(), T::Int16 | T::Int32 | T::Int64) =>
        {
            refused("has run ends that are not signed integers of 16, 32 or 64 bits")
        }
        T::Map(field, _) => match field.data_type() {
            T::Struct(entries) if entries.len() == 2 => Ok(()),
            _ => refused("has entries that are not a struct of a key and a value"),
        },
        _ => Ok(()),
    }
}

/// Checks all levels of adjacent types, such as the fields of a schema.
pub(crate) fn check<'a>(types: impl Iterator<Item = &'a DataType>) -> Result<(), ColumnError> {
    let mut fields = 0;
    for data_type in types {
        check_below(data_type, 0, &mut fields)?;
    }
    Ok(())
}

fn check_below(data_type: &DataType, levels: u64, fields: &mut u64) -> Result<(), ColumnError> {
    *fields += 1;
    check_size(levels, *fields)?;
    check_level(data_type).map_err(|fault| fault.of(data_type))?;
    for (field, _) in shape::children(data_type, 0)? {
        check_below(field.data_type(), levels + 1, fields)?;
    }
    match data_type {
        DataType::Dictionary(_, values) => check_below(values, levels + 1, fields),
        _ => Ok(()),
    }
}

/// Checks the number of levels and fields.
pub(crate) const fn check_size(levels: u64, fields: u64) -> Result<(), ColumnError> {
    if levels > MOST_LEVELS {
        return Err(ColumnError::TooMany { what: "levels of nesting", limit: MOST_LEVELS });
    }
    if fields > MOST_FIELDS {
        return Err(ColumnError::TooMany { what: "fields", limit: MOST_FIELDS });
    }
    Ok(())
}

/// Checks the number of rows, including those before the first.
pub(crate) const fn check_rows(rows: u64) -> Result<(), ColumnError> {
    if rows > MOST_ROWS {
        return Err(ColumnError::TooMany { what: "rows", limit: MOST_ROWS });
    }
    Ok(())
}

/// Whether decimals of the type can have this precision and scale.
fn has_digits(data_type: &DataType, precision: u8, scale: i8) -> bool {
    use DataType as T;
    let most = match data_type {
        T::Decimal32(..) => DECIMAL32_MAX_PRECISION,
        T::Decimal64(..) => DECIMAL64_MAX_PRECISION,
        T::Decimal128(..) => DECIMAL128_MAX_PRECISION,
        _ => DECIMAL256_MAX_PRECISION,
    };
    (1..=most).contains(&precision) && i16::from(scale) <= i16::from(precision)
}
