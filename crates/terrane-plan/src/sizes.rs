//! Parses and prints sizes and numbers.

use terrane_core::ByteCount;

use crate::error::PlanError;

/// The units of a size. A number without a unit is a number of bytes.
const UNITS: [(&str, u64); 13] = [
    ("", 1),
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("pib", 1 << 50),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("pb", 1_000_000_000_000_000),
    // The usual abbreviation in settings of containers.
    ("gi", 1 << 30),
];

/// Parses a size: `256GiB`, `1.5 TiB`, `80GB`, `4096`. A number without a unit is in bytes. A
/// fraction of a byte is rounded down.
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_plan::parse_bytes;
///
/// # fn main() -> Result<(), terrane_plan::PlanError> {
/// assert_eq!(parse_bytes("256GiB")?, ByteCount::gib(256));
/// assert_eq!(parse_bytes("1.5 kB")?, ByteCount::new(1500));
/// assert!(parse_bytes("12 parsecs").is_err());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`PlanError::Size`] with the text.
pub fn parse_bytes(text: &str) -> Result<ByteCount, PlanError> {
    let scale = |unit: &str| {
        let unit = unit.to_lowercase();
        UNITS.iter().find(|(name, _)| *name == unit).map(|&(_, size)| size)
    };
    scaled(text, scale).map(ByteCount::new).ok_or_else(|| PlanError::Size { text: text.to_owned() })
}

/// Parses a number of tokens or users: `131072`, `128k`, `1M`. The suffixes are powers of 1,024, as
/// in the names of context lengths.
///
/// # Errors
///
/// [`PlanError::Count`] with the text.
pub fn parse_count(text: &str) -> Result<u64, PlanError> {
    let scale = |unit: &str| match unit {
        "" => Some(1),
        "k" | "K" => Some(1 << 10),
        "m" | "M" => Some(1 << 20),
        _ => None,
    };
    scaled(text, scale).ok_or_else(|| PlanError::Count { text: text.to_owned() })
}

/// A decimal number times the size of its unit, rounded down, if the product fits in 64 bits.
fn scaled(text: &str, scale: impl Fn(&str) -> Option<u64>) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(end)?;
    let scale = scale(unit.trim())?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let fraction = fraction.trim_end_matches('0');
    if whole.is_empty() || fraction.len() > 9 {
        return None;
    }
    let whole = whole.parse::<u64>().ok()?.checked_mul(scale)?;
    if fraction.is_empty() {
        return Some(whole);
    }
    let parts = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale);
    let divisor = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    // A size such as 1.3 GiB is not a whole number of bytes. It is rounded down.
    whole.checked_add(u64::try_from(parts / divisor).ok()?)
}

/// A size in the syntax of docker and `mount`: `256g`, `512m`, or bytes.
pub(crate) fn option_size(bytes: u64) -> String {
    let units = [(1 << 30, "g"), (1 << 20, "m")];
    let unit = units.into_iter().find(|&(unit, _)| bytes > 0 && bytes.is_multiple_of(unit));
    unit.map_or_else(|| bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_decimal_and_binary_units() {
        let bytes = |text| parse_bytes(text).unwrap().get();
        assert_eq!(bytes("80GB"), 80_000_000_000);
        assert_eq!(bytes("80 GiB"), 80 << 30);
        assert_eq!(bytes("2tib"), 2 << 40);
        assert_eq!(bytes("0.5GiB"), 1 << 29);
        assert_eq!(bytes("1.3GiB"), 1_395_864_371);
        assert_eq!(bytes("17"), 17);
        assert_eq!(bytes("256Gi"), 256 << 30);
    }

    #[test]
    fn sizes_of_options_are_exact() {
        assert_eq!(option_size(256 << 30), "256g");
        assert_eq!(option_size(512 << 20), "512m");
        assert_eq!(option_size(80_000_000_000), "80000000000");
    }

    #[test]
    fn counts_have_suffixes_of_1024() {
        assert_eq!(parse_count("128k").unwrap(), 131_072);
        assert_eq!(parse_count("1M").unwrap(), 1_048_576);
        assert_eq!(parse_count("64").unwrap(), 64);
    }

    #[test]
    fn other_texts_are_refused_with_the_text() {
        for text in
            ["", "GiB", "-4GiB", "4 gigs", "1.2.3GB", "20000000PiB", "0x10", "1.0123456789GB"]
        {
            let error = parse_bytes(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("256GiB"), "{error}");
        }
        for text in ["", "k", "12q", "-1", "99999999999999999999"] {
            assert!(parse_count(text).unwrap_err().to_string().contains("128k"), "{text}");
        }
    }
}
