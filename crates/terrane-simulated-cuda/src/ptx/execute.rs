//! One thread of a kernel.

use super::Kernel;
use super::instruction::{
    Action, Address, Binary, Comparison, Memory, Operand, Special, Type, Unary,
};
use crate::arena::to_usize;
use crate::code::{Code, Outcome};
use crate::space::{Reach, Space, Window};

/// The number of instructions after which a thread counts as endless.
const MOST_INSTRUCTIONS: u64 = 1 << 30;
const LAUNCH_TIMEOUT: Code = Code(702);

/// The state that the threads of a step share.
pub struct Machine<'a> {
    pub kernel: &'a Kernel,
    pub parameters: &'a [u8],
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub space: &'a Space,
    pub reach: Reach<'a>,
    /// The latest accessed memory windows, the newest first.
    pub windows: [Option<Window>; 4],
}

/// A thread between two instructions.
#[derive(Debug)]
pub struct Thread {
    registers: Vec<u64>,
    local: Vec<u8>,
    next: usize,
    index: [u32; 3],
    block: [u32; 3],
    lane: u32,
}

/// The reason why a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Barrier,
    Exit,
}

impl Thread {
    pub fn new(kernel: &Kernel, index: [u32; 3], block: [u32; 3], lane: u32) -> Self {
        let registers = vec![0; kernel.registers];
        Self { registers, local: vec![0; kernel.local], next: 0, index, block, lane }
    }

    /// Runs up to the next barrier, or to the end.
    ///
    /// # Errors
    ///
    /// The code that loses the context.
    pub fn run(&mut self, machine: &mut Machine<'_>, shared: &mut [u8]) -> Outcome<Stop> {
        let code = machine.kernel.code.as_slice();
        for _ in 0..MOST_INSTRUCTIONS {
            let Some(instruction) = code.get(self.next) else { return Ok(Stop::Exit) };
            self.next += 1;
            if let Some((register, expected)) = instruction.guard
                && (self.register(register) != 0) != expected
            {
                continue;
            }
            match &instruction.action {
                Action::Branch(target) => self.next = *target,
                Action::Barrier => return Ok(Stop::Barrier),
                Action::Exit => return Ok(Stop::Exit),
                Action::Trap => return Err(Code::LAUNCH_FAILED),
                action => self.act(action, machine, shared)?,
            }
        }
        Err(LAUNCH_TIMEOUT)
    }

    fn register(&self, register: usize) -> u64 {
        self.registers.get(register).copied().unwrap_or(0)
    }

    fn set(&mut self, register: usize, value: u64) {
        if let Some(place) = self.registers.get_mut(register) {
            *place = value;
        }
    }

    fn value(&self, operand: Operand, machine: &Machine<'_>) -> u64 {
        let of = |numbers: &[u32; 3], dimension: usize| {
            numbers.get(dimension).copied().map_or(0, u64::from)
        };
        match operand {
            Operand::Register(register) => self.register(register),
            Operand::Number(number) => number,
            Operand::Special(Special::Thread(dimension)) => of(&self.index, dimension),
            Operand::Special(Special::Threads(dimension)) => of(&machine.block, dimension),
            Operand::Special(Special::Block(dimension)) => of(&self.block, dimension),
            Operand::Special(Special::Blocks(dimension)) => of(&machine.grid, dimension),
            Operand::Special(Special::Lane) => u64::from(self.lane),
        }
    }

    fn act(&mut self, action: &Action, machine: &mut Machine<'_>, shared: &mut [u8]) -> Outcome {
        let value = |operand: &Operand, own: &Self| own.value(*operand, machine);
        match action {
            Action::Move { to, from, kind } => self.set(*to, kind.cut(value(from, self))),
            Action::Pack { to, from, part } => {
                let parts = from.iter().rev();
                let whole =
                    parts.fold(0, |whole, from| whole << part.bits | part.cut(value(from, self)));
                self.set(*to, whole);
            }
            Action::Unpack { to, from, part } => {
                let mut whole = value(from, self);
                for &to in to {
                    self.set(to, part.cut(whole));
                    whole >>= part.bits;
                }
            }
            Action::Unary { operation, kind, to, from } => {
                self.set(*to, unary(*operation, *kind, value(from, self)));
            }
            Action::Binary { operation, kind, to, left, right } => {
                let result = binary(*operation, *kind, value(left, self), value(right, self));
                self.set(*to, result);
            }
            Action::MultiplyAdd { operation, kind, to, factors: [left, right], summand } => {
                let product = binary(*operation, *kind, value(left, self), value(right, self));
                let wide = Type { bits: kind.bits * 2, ..*kind };
                let kind = if *operation == Binary::MultiplyWide { wide } else { *kind };
                self.set(*to, kind.cut(product.wrapping_add(value(summand, self))));
            }
            Action::Insert { kind, to, from: [inserted, into, at, count] } => {
                let (at, count) = (value(at, self) & 0xFF, value(count, self) & 0xFF);
                let mask = mask(*kind, at, count);
                let moved = value(inserted, self).checked_shl(to_u32(at)).unwrap_or(0);
                self.set(*to, kind.cut(value(into, self) & !mask | moved & mask));
            }
            Action::Extract { kind, to, from: [of, at, count] } => {
                let (at, count) = (value(at, self) & 0xFF, value(count, self) & 0xFF);
                let of = kind.cut(value(of, self));
                let bits = Type { bits: to_u32(count.min(64)), ..*kind };
                let found = of.checked_shr(to_u32(at)).unwrap_or(0);
                let found = if count == 0 { 0 } else { bits.widen(found) };
                self.set(*to, kind.cut(found));
            }
            Action::Compare { operation, kind, to, opposite, from: [left, right] } => {
                let is = compare(*operation, *kind, value(left, self), value(right, self));
                self.set(*to, u64::from(is));
                if let Some(opposite) = opposite {
                    self.set(*opposite, u64::from(!is));
                }
            }
            Action::Select { kind, to, from: [yes, no], by } => {
                let from = if value(by, self) != 0 { yes } else { no };
                self.set(*to, kind.cut(value(from, self)));
            }
            Action::Convert { to_kind, kind, to, from } => {
                self.set(*to, to_kind.cut(kind.widen(value(from, self))));
            }
            Action::Load { memory, kind, to, address } => {
                let at = self.address(*address, machine);
                self.load(machine, shared, *memory, *kind, to, at)?;
            }
            Action::Store { memory, kind, from, address } => {
                let at = self.address(*address, machine);
                self.store(machine, shared, *memory, *kind, from, at)?;
            }
            Action::Atomic { operation, memory, kind, to, address, from } => {
                let (at, right) = (self.address(*address, machine), value(from, self));
                let left = self.read(machine, shared, *memory, *kind, at)?;
                let result = Operand::Number(binary(*operation, *kind, left, right));
                self.store(machine, shared, *memory, *kind, &[result], at)?;
                to.iter().for_each(|&to| self.set(to, left));
            }
            Action::Branch(_) | Action::Barrier | Action::Exit | Action::Trap | Action::Nothing => {
            }
        }
        Ok(())
    }

    fn address(&self, address: Address, machine: &Machine<'_>) -> u64 {
        self.value(address.base, machine).wrapping_add(address.offset)
    }

    fn load(
        &mut self,
        machine: &mut Machine<'_>,
        shared: &[u8],
        memory: Memory,
        kind: Type,
        to: &[usize],
        at: u64,
    ) -> Outcome {
        let each = kind.bytes();
        let count = crate::arena::wide(to.len());
        check_alignment(at, each * count)?;
        let global = match memory {
            Memory::Global => Some(machine.bytes(at, each * count)?),
            _ => None,
        };
        for (index, &to) in to.iter().enumerate() {
            let offset = to_usize(each) * index;
            let mut bytes = [0; 8];
            let part = bytes.get_mut(..to_usize(each)).ok_or(Code::LAUNCH_FAILED)?;
            match global {
                Some(global) => {
                    let from = global.wrapping_add(offset);
                    // SAFETY: the whole vector is in live memory: it was looked up above, under the
                    // same lock.
                    unsafe { std::ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
                }
                None => {
                    let from = match memory {
                        Memory::Parameters => machine.parameters,
                        Memory::Shared => shared,
                        Memory::Local | Memory::Global => self.local.as_slice(),
                    };
                    let start = to_usize(at) + offset;
                    let from = from.get(start..start + part.len()).ok_or(Code::ILLEGAL_ADDRESS)?;
                    part.copy_from_slice(from);
                }
            }
            self.set(to, u64::from_le_bytes(bytes));
            if kind.is_signed {
                let value = self.register(to);
                self.set(to, kind.widen(value));
            }
        }
        Ok(())
    }

    /// One number, aligned to its size.
    fn read(
        &self,
        machine: &mut Machine<'_>,
        shared: &[u8],
        memory: Memory,
        kind: Type,
        at: u64,
    ) -> Outcome<u64> {
        let each = kind.bytes();
        check_alignment(at, each)?;
        let mut bytes = [0; 8];
        let part = bytes.get_mut(..to_usize(each)).ok_or(Code::LAUNCH_FAILED)?;
        if memory == Memory::Global {
            let from = machine.bytes(at, each)?;
            // SAFETY: as for a load.
            unsafe { std::ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
        } else {
            let from = if memory == Memory::Shared { shared } else { self.local.as_slice() };
            let start = to_usize(at);
            let from = from.get(start..start + part.len()).ok_or(Code::ILLEGAL_ADDRESS)?;
            part.copy_from_slice(from);
        }
        Ok(u64::from_le_bytes(bytes))
    }

    fn store(
        &mut self,
        machine: &mut Machine<'_>,
        shared: &mut [u8],
        memory: Memory,
        kind: Type,
        from: &[Operand],
        at: u64,
    ) -> Outcome {
        let each = kind.bytes();
        let count = crate::arena::wide(from.len());
        check_alignment(at, each * count)?;
        let global = match memory {
            Memory::Global => Some(machine.bytes(at, each * count)?),
            Memory::Parameters => return Err(Code(717)),
            Memory::Shared | Memory::Local => None,
        };
        for (index, &from) in from.iter().enumerate() {
            let offset = to_usize(each) * index;
            let bytes = self.value(from, machine).to_le_bytes();
            let part = bytes.get(..to_usize(each)).ok_or(Code::LAUNCH_FAILED)?;
            match global {
                Some(global) => {
                    let to = global.wrapping_add(offset);
                    // SAFETY: as for a load.
                    unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
                }
                None => {
                    let to = if memory == Memory::Shared { &mut *shared } else { &mut self.local };
                    let start = to_usize(at) + offset;
                    let to = to.get_mut(start..start + part.len()).ok_or(Code::ILLEGAL_ADDRESS)?;
                    to.copy_from_slice(part);
                }
            }
        }
        Ok(())
    }
}

impl Machine<'_> {
    /// The host address of bytes in global memory.
    fn bytes(&mut self, at: u64, length: u64) -> Outcome<*mut u8> {
        for window in self.windows.iter().flatten() {
            if let Some(bytes) = window.bytes(at, length) {
                return Ok(bytes);
            }
        }
        let window = self.space.window(at, self.reach)?;
        self.windows.rotate_right(1);
        if let Some(first) = self.windows.first_mut() {
            *first = Some(window);
        }
        window.bytes(at, length).ok_or(Code::ILLEGAL_ADDRESS)
    }
}

fn check_alignment(at: u64, bytes: u64) -> Outcome {
    if at.is_multiple_of(bytes.max(1)) { Ok(()) } else { Err(Code::MISALIGNED_ADDRESS) }
}

fn to_u32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// `count` bits from bit `at` on, limited to the bits of the type.
fn mask(kind: Type, at: u64, count: u64) -> u64 {
    let bits = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
    kind.cut(bits.checked_shl(to_u32(at)).unwrap_or(0))
}

fn unary(operation: Unary, kind: Type, value: u64) -> u64 {
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

fn binary(operation: Binary, kind: Type, left: u64, right: u64) -> u64 {
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

fn compare(operation: Comparison, kind: Type, left: u64, right: u64) -> bool {
    let (left, right) = (kind.widen(left), kind.widen(right));
    let order = if kind.is_signed {
        left.cast_signed().cmp(&right.cast_signed())
    } else {
        left.cmp(&right)
    };
    match operation {
        Comparison::Equal => order.is_eq(),
        Comparison::Unequal => order.is_ne(),
        Comparison::Less => order.is_lt(),
        Comparison::AtMost => order.is_le(),
        Comparison::Greater => order.is_gt(),
        Comparison::AtLeast => order.is_ge(),
    }
}
