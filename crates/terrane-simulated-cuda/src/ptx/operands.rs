//! The names in a kernel: registers, parameters, variables, labels.

use std::collections::BTreeMap;

use super::instruction::{Address, Operand, Special, Type};

/// The meanings of the names in a kernel.
#[derive(Debug, Default)]
pub struct Names {
    registers: BTreeMap<String, usize>,
    /// Parameters and variables: their offset in their memory.
    variables: BTreeMap<String, usize>,
    /// The instruction after each label.
    pub labels: BTreeMap<String, usize>,
}

impl Names {
    pub fn registers(&self) -> usize {
        self.registers.len()
    }

    pub fn add_variable(&mut self, name: &str, offset: usize) {
        self.variables.insert(name.to_owned(), offset);
    }

    /// The number of a register, which is created at its first use.
    pub fn register(&mut self, text: &str) -> Result<usize, String> {
        let is_register = text.starts_with('%') && special(text).is_none();
        let is_plain = text.starts_with(|first: char| first.is_alphabetic() || first == '_');
        if !is_register && !is_plain {
            return Err(format!("`{text}` is not a register"));
        }
        let next = self.registers.len();
        Ok(*self.registers.entry(text.to_owned()).or_insert(next))
    }

    pub fn operand(&mut self, text: &str) -> Result<Operand, String> {
        if let Some(special) = special(text) {
            return Ok(Operand::Special(special));
        }
        if let Some(&offset) = self.variables.get(text) {
            let offset = u64::try_from(offset).map_err(|_| format!("`{text}` is too far away"))?;
            return Ok(Operand::Number(offset));
        }
        if text.starts_with(|first: char| first.is_ascii_digit() || first == '-') {
            let number = number(text).ok_or_else(|| format!("`{text}` is not an integer"))?;
            return Ok(Operand::Number(number));
        }
        self.register(text).map(Operand::Register)
    }

    /// `{a, b}`, or a single one.
    pub fn operands(&mut self, text: &str) -> Result<Vec<Operand>, String> {
        parts(text).map(|part| self.operand(part)).collect()
    }

    pub fn register_list(&mut self, text: &str) -> Result<Vec<usize>, String> {
        parts(text).map(|part| self.register(part)).collect()
    }

    /// `[base+offset]`.
    pub fn address(&mut self, text: &str) -> Result<Address, String> {
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let inner = inner.ok_or_else(|| format!("`{text}` is not an address"))?.trim();
        let (base, offset) = match inner.split_once('+') {
            Some((base, offset)) => (base.trim(), offset.trim()),
            None => (inner, "0"),
        };
        let offset = number(offset).ok_or_else(|| format!("`{text}` has an invalid offset"))?;
        Ok(Address { base: self.operand(base)?, offset })
    }
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
    inner.unwrap_or(text).split(',').map(str::trim)
}

fn special(text: &str) -> Option<Special> {
    if text == "%laneid" {
        return Some(Special::Lane);
    }
    let (name, dimension) = text.split_once('.')?;
    let dimension = ["x", "y", "z"].iter().position(|known| *known == dimension)?;
    match name {
        "%tid" => Some(Special::Thread(dimension)),
        "%ntid" => Some(Special::Threads(dimension)),
        "%ctaid" => Some(Special::Block(dimension)),
        "%nctaid" => Some(Special::Blocks(dimension)),
        _ => None,
    }
}

/// Parses a number; negative numbers as their two's complement.
pub fn number(text: &str) -> Option<u64> {
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let digits = digits.strip_suffix('U').unwrap_or(digits);
    let number = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if is_negative { number.wrapping_neg() } else { number })
}

/// The type in the last part of an opcode: `u32`. Floating-point numbers are bits that are moved.
pub fn kind(text: &str) -> Option<Type> {
    if text == "pred" {
        return Some(Type { is_signed: false, bits: 1 });
    }
    let (letter, bits) = text.split_at_checked(1)?;
    let bits = bits.parse().ok().filter(|bits| [8, 16, 32, 64].contains(bits))?;
    matches!(letter, "u" | "s" | "b" | "f").then_some(Type { is_signed: letter == "s", bits })
}
