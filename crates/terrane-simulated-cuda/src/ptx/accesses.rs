//! Accesses of a warp to memory. Each is checked against the allocations and its alignment.

use super::arithmetic::{Lanes, binary};
use super::instruction::{Binary, Memory, Operand, Type};
use super::warp::{Machine, Mask, Warp, lanes};
use crate::arena::{to_usize, wide};
use crate::code::{Code, Outcome};

/// `CUDA_ERROR_INVALID_ADDRESS_SPACE`: parameters cannot be written.
const READ_ONLY: Code = Code(717);

impl Warp {
    /// Loads consecutive numbers from an address of each thread into registers.
    pub(super) fn load(
        &mut self,
        machine: &mut Machine<'_>,
        shared: &mut [u8],
        mask: Mask,
        (memory, kind): (Memory, Type),
        to: &[usize],
        at: &Lanes,
    ) -> Outcome {
        let (each, whole) = (to_usize(kind.bytes()), kind.bytes() * wide(to.len()));
        for (lane, at) in lanes(mask, at) {
            let from = self.place(machine, shared, lane, memory, at, whole)?;
            for (index, &to) in to.iter().enumerate() {
                // SAFETY: the whole span is in live memory: it was looked up above, under the same
                // lock.
                let value = unsafe { read(from.wrapping_add(each * index), each) };
                self.set_one(to, lane, if kind.is_signed { kind.widen(value) } else { value });
            }
        }
        Ok(())
    }

    /// Stores consecutive numbers at an address of each thread.
    pub(super) fn store(
        &mut self,
        machine: &mut Machine<'_>,
        shared: &mut [u8],
        mask: Mask,
        (memory, kind): (Memory, Type),
        from: &[Operand],
        at: &Lanes,
    ) -> Outcome {
        if memory == Memory::Parameters {
            return Err(READ_ONLY);
        }
        let (each, whole) = (to_usize(kind.bytes()), kind.bytes() * wide(from.len()));
        let from: Vec<Lanes> = from.iter().map(|&from| self.value(from, machine)).collect();
        for (lane, at) in lanes(mask, at) {
            let to = self.place(machine, shared, lane, memory, at, whole)?;
            for (index, values) in from.iter().enumerate() {
                let value = values.get(lane).copied().unwrap_or(0);
                // SAFETY: as for a load.
                unsafe { write(to.wrapping_add(each * index), each, value) };
            }
        }
        Ok(())
    }

    /// Combines a number at an address of each thread with a value, one thread after the other.
    #[expect(clippy::too_many_arguments, reason = "the parts of the instruction and its operands")]
    pub(super) fn atomic(
        &mut self,
        machine: &mut Machine<'_>,
        shared: &mut [u8],
        mask: Mask,
        (memory, kind): (Memory, Type),
        operation: Binary,
        to: Option<usize>,
        at: &Lanes,
        right: &Lanes,
    ) -> Outcome {
        if memory == Memory::Parameters {
            return Err(READ_ONLY);
        }
        let each = to_usize(kind.bytes());
        for (lane, at) in lanes(mask, at) {
            let right = right.get(lane).copied().unwrap_or(0);
            let place = self.place(machine, shared, lane, memory, at, kind.bytes())?;
            // SAFETY: as for a load.
            let left = unsafe { read(place, each) };
            // SAFETY: as for a load.
            unsafe { write(place, each, binary(operation, kind, left, right)) };
            if let Some(to) = to {
                self.set_one(to, lane, left);
            }
        }
        Ok(())
    }

    /// The host address of bytes that one thread accesses.
    fn place(
        &mut self,
        machine: &mut Machine<'_>,
        shared: &mut [u8],
        lane: usize,
        memory: Memory,
        at: u64,
        length: u64,
    ) -> Outcome<*mut u8> {
        if !at.is_multiple_of(length.max(1)) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let span = to_usize(at)..to_usize(at).saturating_add(to_usize(length));
        let bytes = match memory {
            Memory::Global => return machine.bytes(at, length),
            Memory::Parameters => {
                let bytes = machine.parameters.get(span).ok_or(Code::ILLEGAL_ADDRESS)?;
                // Loads only read there. Stores and atomic operations were refused before.
                return Ok(bytes.as_ptr().cast_mut());
            }
            Memory::Shared => shared.get_mut(span),
            Memory::Local => self.local.get_mut(lane).and_then(|local| local.get_mut(span)),
        };
        Ok(bytes.ok_or(Code::ILLEGAL_ADDRESS)?.as_mut_ptr())
    }
}

/// Reads a number of 1, 2, 4 or 8 bytes.
///
/// # Safety
///
/// The bytes are in live memory.
unsafe fn read(from: *const u8, bytes: usize) -> u64 {
    let mut value = [0; 8];
    // SAFETY: the caller guarantees it, and a number has no more than 8 bytes.
    unsafe { std::ptr::copy_nonoverlapping(from, value.as_mut_ptr(), bytes.min(value.len())) };
    u64::from_le_bytes(value)
}

/// Writes the low 1, 2, 4 or 8 bytes of a number.
///
/// # Safety
///
/// The bytes are in live memory, and may be written.
unsafe fn write(to: *mut u8, bytes: usize, value: u64) {
    let value = value.to_le_bytes();
    // SAFETY: the caller guarantees it, and a number has no more than 8 bytes.
    unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to, bytes.min(value.len())) };
}
