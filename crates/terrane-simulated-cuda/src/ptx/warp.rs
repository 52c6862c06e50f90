//! The threads of a warp, which run each instruction together.
//!
//! Threads that take different branches form groups. The group with the lowest instruction runs
//! first, so that groups join again where their branches meet.

use super::Kernel;
use super::arithmetic::{
    LANES, Lanes, binary_of_all, compare_all, each, each_pair, extract, insert, unary,
};
use super::instruction::{Action, Address, Binary, Instruction, Operand, Special, Type};
use crate::arena::wide;
use crate::code::{Code, Outcome};
use crate::space::{Reach, Space, Window};

/// The number of instructions, of all groups, after which a warp counts as endless.
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

/// Threads of a warp: one bit for each.
pub type Mask = u32;

/// Threads with the same next instruction.
type Group = (usize, Mask);

/// A warp between two instructions.
#[derive(Debug)]
pub struct Warp {
    registers: Vec<Lanes>,
    /// The local memory of each thread.
    pub(super) local: Vec<Vec<u8>>,
    /// The threads that have not ended, the group with the lowest instruction last.
    groups: Vec<Group>,
    /// The position of each thread in its block, by dimension.
    index: [Lanes; 3],
    /// The number of the first thread in its warp.
    first_lane: u64,
    block: [u32; 3],
}

/// The reason why a warp has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// All threads that have not ended have reached a barrier.
    Barrier,
    Exit,
}

impl Warp {
    /// The threads at these positions in their block: a warp of at most [`LANES`], or the part of
    /// one that begins at `first_lane`.
    pub fn new(kernel: &Kernel, threads: &[[u32; 3]], first_lane: usize, block: [u32; 3]) -> Self {
        let mut index = [[0; LANES]; 3];
        let mut mask = 0;
        for (lane, thread) in threads.iter().enumerate().take(LANES) {
            mask |= 1 << lane;
            for (of_dimension, &number) in index.iter_mut().zip(thread) {
                if let Some(of_lane) = of_dimension.get_mut(lane) {
                    *of_lane = u64::from(number);
                }
            }
        }
        Self {
            registers: vec![[0; LANES]; kernel.registers],
            local: vec![vec![0; kernel.local]; threads.len()],
            groups: vec![(0, mask)],
            index,
            first_lane: wide(first_lane),
            block,
        }
    }

    /// Runs until every thread has reached a barrier or its end.
    ///
    /// # Errors
    ///
    /// The code that loses the context.
    pub fn run(&mut self, machine: &mut Machine<'_>, shared: &mut [u8]) -> Outcome<Stop> {
        let code = machine.kernel.code.as_slice();
        let mut at_barrier = Vec::new();
        let Some((mut next, mut mask)) = self.groups.pop() else { return Ok(Stop::Exit) };
        for _ in 0..MOST_INSTRUCTIONS {
            let instruction = code.get(next);
            let chosen = instruction.map_or(mask, |instruction| self.chosen(instruction, mask));
            next += 1;
            match instruction.map_or(&Action::Exit, |instruction| &instruction.action) {
                _ if chosen == 0 => {}
                Action::Branch(target) if chosen == mask => next = *target,
                Action::Branch(target) => {
                    insert_group(&mut self.groups, (*target, chosen));
                    mask &= !chosen;
                }
                Action::Barrier => {
                    insert_group(&mut at_barrier, (next, chosen));
                    mask &= !chosen;
                }
                Action::Exit => mask &= !chosen,
                Action::Trap => return Err(Code::LAUNCH_FAILED),
                action => self.act(action, chosen, machine, shared)?,
            }
            if self.groups.last().is_some_and(|&(lowest, _)| mask == 0 || lowest <= next) {
                if mask != 0 {
                    insert_group(&mut self.groups, (next, mask));
                }
                (next, mask) = self.groups.pop().unwrap_or((next, 0));
            } else if mask == 0 {
                self.groups = at_barrier;
                return Ok(if self.groups.is_empty() { Stop::Exit } else { Stop::Barrier });
            }
        }
        Err(LAUNCH_TIMEOUT)
    }

    /// The threads of `mask` whose guard permits the instruction.
    fn chosen(&self, instruction: &Instruction, mask: Mask) -> Mask {
        let Some((register, expected)) = instruction.guard else { return mask };
        let Some(values) = self.registers.get(register) else { return mask };
        let mut chosen = 0;
        for (lane, &value) in values.iter().enumerate() {
            chosen |= Mask::from((value != 0) == expected) << lane;
        }
        chosen & mask
    }

    pub(super) fn set(&mut self, register: usize, mask: Mask, values: &Lanes) {
        let Some(own) = self.registers.get_mut(register) else { return };
        if mask == Mask::MAX {
            *own = *values;
            return;
        }
        for (lane, (own, value)) in own.iter_mut().zip(values).enumerate() {
            if mask >> lane & 1 == 1 {
                *own = *value;
            }
        }
    }

    /// Sets the register of one thread.
    pub(super) fn set_one(&mut self, register: usize, lane: usize, value: u64) {
        let values = self.registers.get_mut(register);
        if let Some(own) = values.and_then(|values| values.get_mut(lane)) {
            *own = value;
        }
    }

    /// An operand's value in each thread.
    pub(super) fn value(&self, operand: Operand, machine: &Machine<'_>) -> Lanes {
        let of = |numbers: &[u32; 3], dimension: usize| {
            [numbers.get(dimension).copied().map_or(0, u64::from); LANES]
        };
        match operand {
            Operand::Register(register) => {
                self.registers.get(register).copied().unwrap_or([0; LANES])
            }
            Operand::Number(number) => [number; LANES],
            Operand::Special(Special::Thread(dimension)) => {
                self.index.get(dimension).copied().unwrap_or([0; LANES])
            }
            Operand::Special(Special::Threads(dimension)) => of(&machine.block, dimension),
            Operand::Special(Special::Block(dimension)) => of(&self.block, dimension),
            Operand::Special(Special::Blocks(dimension)) => of(&machine.grid, dimension),
            Operand::Special(Special::Lane) => {
                std::array::from_fn(|lane| wide(lane) + self.first_lane)
            }
        }
    }

    fn act(
        &mut self,
        action: &Action,
        mask: Mask,
        machine: &mut Machine<'_>,
        shared: &mut [u8],
    ) -> Outcome {
        let value = |operand: &Operand, own: &Self| own.value(*operand, machine);
        match action {
            Action::Move { to, from, kind } => {
                let result = each(value(from, self), |value| kind.cut(value));
                self.set(*to, mask, &result);
            }
            Action::Pack { to, from, part } => {
                let whole = from.iter().rev().fold([0; LANES], |whole, from| {
                    each_pair(whole, &value(from, self), |whole, from| {
                        whole << part.bits | part.cut(from)
                    })
                });
                self.set(*to, mask, &whole);
            }
            Action::Unpack { to, from, part } => {
                let mut whole = value(from, self);
                for &to in to {
                    self.set(to, mask, &each(whole, |whole| part.cut(whole)));
                    whole = each(whole, |whole| whole >> part.bits);
                }
            }
            Action::Unary { operation, kind, to, from } => {
                let result = each(value(from, self), |value| unary(*operation, *kind, value));
                self.set(*to, mask, &result);
            }
            Action::Binary { operation, kind, to, left, right } => {
                let (left, right) = (value(left, self), value(right, self));
                self.set(*to, mask, &binary_of_all(*operation, *kind, left, &right));
            }
            Action::MultiplyAdd { operation, kind, to, factors: [left, right], summand } => {
                let (left, right) = (value(left, self), value(right, self));
                let product = binary_of_all(*operation, *kind, left, &right);
                let wide = Type { bits: kind.bits * 2, ..*kind };
                let kind = if *operation == Binary::MultiplyWide { wide } else { *kind };
                let sum = each_pair(product, &value(summand, self), |product, summand| {
                    kind.cut(product.wrapping_add(summand))
                });
                self.set(*to, mask, &sum);
            }
            Action::Insert { kind, to, from } => {
                let result =
                    by_thread(from.map(|from| value(&from, self)), |from| insert(*kind, from));
                self.set(*to, mask, &result);
            }
            Action::Extract { kind, to, from } => {
                let result =
                    by_thread(from.map(|from| value(&from, self)), |from| extract(*kind, from));
                self.set(*to, mask, &result);
            }
            Action::Compare { operation, kind, to, opposite, from: [left, right] } => {
                let is = compare_all(*operation, *kind, value(left, self), &value(right, self));
                self.set(*to, mask, &is);
                if let Some(opposite) = opposite {
                    self.set(*opposite, mask, &each(is, |is| 1 - is));
                }
            }
            Action::Select { kind, to, from: [yes, no], by } => {
                let from = [value(by, self), value(yes, self), value(no, self)];
                let result =
                    by_thread(from, |[by, yes, no]| kind.cut(if by != 0 { yes } else { no }));
                self.set(*to, mask, &result);
            }
            Action::Convert { to_kind, kind, to, from } => {
                let result = each(value(from, self), |value| to_kind.cut(kind.widen(value)));
                self.set(*to, mask, &result);
            }
            Action::Load { memory, kind, to, address } => {
                let at = self.address(*address, machine);
                self.load(machine, shared, mask, (*memory, *kind), to, &at)?;
            }
            Action::Store { memory, kind, from, address } => {
                let at = self.address(*address, machine);
                self.store(machine, shared, mask, (*memory, *kind), from, &at)?;
            }
            Action::Atomic { operation, memory, kind, to, address, from } => {
                let (at, right) = (self.address(*address, machine), value(from, self));
                let place = (*memory, *kind);
                self.atomic(machine, shared, mask, place, *operation, *to, &at, &right)?;
            }
            Action::Branch(_) | Action::Barrier | Action::Exit | Action::Trap | Action::Nothing => {
            }
        }
        Ok(())
    }

    fn address(&self, address: Address, machine: &Machine<'_>) -> Lanes {
        each(self.value(address.base, machine), |base| base.wrapping_add(address.offset))
    }
}

/// Applies `call` to the values of each thread.
fn by_thread<const N: usize>(values: [Lanes; N], call: impl Fn([u64; N]) -> u64) -> Lanes {
    std::array::from_fn(|lane| {
        call(values.each_ref().map(|values| values.get(lane).copied().unwrap_or(0)))
    })
}

/// Adds a group, and unites it with one that is at the same instruction.
fn insert_group(groups: &mut Vec<Group>, (next, mask): Group) {
    // The lowest instruction is the last.
    let place = groups.partition_point(|&(other, _)| other > next);
    match groups.get_mut(place) {
        Some((other, joined)) if *other == next => *joined |= mask,
        _ => groups.insert(place, (next, mask)),
    }
}

/// The threads of a mask, each with its value.
pub(super) fn lanes(mask: Mask, values: &Lanes) -> impl Iterator<Item = (usize, u64)> {
    values.iter().copied().enumerate().filter(move |(lane, _)| mask >> lane & 1 == 1)
}

impl Machine<'_> {
    /// The host address of bytes in global memory.
    pub(super) fn bytes(&mut self, at: u64, length: u64) -> Outcome<*mut u8> {
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
