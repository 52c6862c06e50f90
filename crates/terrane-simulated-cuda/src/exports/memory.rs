//! Device memory, and host memory that devices can access.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::arena::wide;
use crate::code::{Code, Outcome};
use crate::exports::arguments::{In, Out};
use crate::exports::contexts::current;
use crate::exports::entry::exports;
use crate::space::{Allocation, Owner, Pieces, Pinned, Place, host_pointer};
use crate::state::{Caller, State, granted};

const PORTABLE: u32 = 1;
const MAPPED: u32 = 2;
const WRITE_COMBINED: u32 = 4;
/// Flags of registered memory: device registers, and memory that the device only reads.
const IO_MEMORY: u32 = 4;
const READ_ONLY: u32 = 8;

exports! {
    fn cuMemAlloc_v2(address: Out<u64>, length: usize) |simulator, caller| {
        address.set(simulator.with(|state| allocate(state, caller, wide(length)))?)
    }

    /// Waits for all work of the context, as drivers do.
    fn cuMemFree_v2(address: u64) |simulator, caller| {
        if address == 0 {
            return Ok(());
        }
        simulator.with(|state| {
            state.context(caller.context)?;
            let known = state.space.allocation(address).ok_or(Code::INVALID_VALUE)?;
            if known.is_freed { Err(Code::INVALID_VALUE) } else { Ok(()) }
        })?;
        simulator.wait_for_context(caller)?;
        simulator.with(|state| {
            state.free_now(address);
            Ok(())
        })
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |simulator, caller| {
        let (used, memory) = simulator.with(|state| {
            let device = state.current_device(caller)?;
            Ok((state.device(device)?.used, state.config.memory))
        })?;
        let number = |bytes: u64| usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE);
        free.set(number(memory.saturating_sub(used))?)?;
        total.set(number(memory)?)
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, length: Out<usize>, address: u64)
    |simulator, _caller| {
        let context = current(simulator)?;
        let found = simulator.with(|state| {
            state.context(context)?;
            state.space.place(address, 1)
        })?;
        let (start, bytes) = match found {
            Place::Device { base, allocation } => (base, allocation.length),
            Place::Pinned(pinned) => (pinned.alias, pinned.length),
            Place::Pageable => return Err(Code::NOT_FOUND),
        };
        base.set_if_wanted(start);
        length.set_if_wanted(usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE)?);
        Ok(())
    }

    fn cuMemHostAlloc(address: Out<u64>, length: usize, flags: u32) |simulator, caller| {
        if flags & !(PORTABLE | MAPPED | WRITE_COMBINED) != 0 {
            return Err(Code::INVALID_VALUE);
        }
        address.set(simulator.with(|state| map(state, caller, length, flags))?)
    }

    fn cuMemAllocHost_v2(address: Out<u64>, length: usize) |simulator, caller| {
        address.set(simulator.with(|state| map(state, caller, length, 0))?)
    }

    fn cuMemFreeHost(address: u64) |simulator, caller| {
        simulator.with(|state| owned(state, caller, address, true).map_err(|_| Code::INVALID_VALUE))?;
        simulator.wait_for_context(caller)?;
        simulator.with(|state| {
            state.unpin(address);
            Ok(())
        })
    }

    fn cuMemHostRegister_v2(address: u64, length: usize, flags: u32) |simulator, caller| {
        if address == 0 || length == 0 || flags & !(PORTABLE | MAPPED | IO_MEMORY | READ_ONLY) != 0
        {
            return Err(Code::INVALID_VALUE);
        }
        if flags & (IO_MEMORY | READ_ONLY) != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        simulator.with(|state| {
            let context = caller.context;
            state.context(context)?;
            if !is_mapped(address, length) {
                return Err(Code::INVALID_VALUE);
            }
            let length = wide(length);
            let is_owned = false;
            state.space.pin(Pinned { host: address, alias: 0, length, context, is_owned, flags })
        })
    }

    fn cuMemHostUnregister(address: u64) |simulator, caller| {
        simulator.with(|state| {
            owned(state, caller, address, false)?;
            state.unpin(address);
            Ok(())
        })
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: u64, flags: u32) |simulator, caller| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        device.set(simulator.with(|state| {
            state.context(caller.context)?;
            match state.space.place(host, 1)? {
                Place::Pinned(pinned) if host < pinned.host + pinned.length => {
                    Ok(pinned.alias + (host - pinned.host))
                }
                _ => Err(Code::INVALID_VALUE),
            }
        })?)
    }

    fn cuMemHostGetFlags(flags: Out<u32>, host: u64) |simulator, caller| {
        flags.set(simulator.with(|state| {
            state.context(caller.context)?;
            match state.space.place(host, 1)? {
                // With unified addresses, all pinned memory is portable and mapped.
                Place::Pinned(pinned) => Ok(pinned.flags | PORTABLE | MAPPED),
                _ => Err(Code::INVALID_VALUE),
            }
        })?)
    }

    fn cuPointerGetAttribute(data: Out<u64>, attribute: u32, address: u64) |simulator, caller| {
        let value = simulator.with(|state| attribute_of(state, caller, attribute, address))?;
        write(data, value)
    }

    fn cuPointerGetAttributes(count: u32, attributes: In<u32>, data: In<Out<u64>>, address: u64)
    |simulator, caller| {
        for index in 0..usize::try_from(count).map_err(|_| Code::INVALID_VALUE)? {
            let (attribute, data) = (attributes.get(index)?, data.get(index)?);
            let value =
                simulator.with(|state| attribute_of(state, caller, attribute, address));
            // The value of an attribute that does not apply to the address is null. An unknown
            // attribute is refused.
            write(data, match value {
                Err(Code::NOT_SUPPORTED) => return Err(Code::INVALID_VALUE),
                value => value.unwrap_or((0, width_of(attribute))),
            })?;
        }
        Ok(())
    }
}

fn allocate(state: &mut State, caller: Caller, length: u64) -> Outcome<u64> {
    let device = state.current_device(caller)?;
    if length == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let used = state.device(device)?.used.checked_add(granted(length));
    let used = used.filter(|&used| used <= state.config.memory).ok_or(Code::OUT_OF_MEMORY)?;
    let owner = Owner::Context(caller.context);
    let pieces = Pieces::One;
    let allocation = Allocation { device, length, owner, is_live: true, is_freed: false, pieces };
    let address = state.space.allocate(allocation)?;
    state.device(device)?.used = used;
    Ok(address)
}

/// Maps pinned memory for the driver's own allocation.
fn map(state: &mut State, caller: Caller, length: usize, flags: u32) -> Outcome<u64> {
    state.context(caller.context)?;
    if length == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let whole = length.checked_next_multiple_of(4096).ok_or(Code::OUT_OF_MEMORY)?;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the system chooses.
    let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), whole, rights, MapFlags::PRIVATE) };
    let host = wide(mapped.map_err(|_| Code::OUT_OF_MEMORY)?.expose_provenance());
    let (length, context) = (wide(whole), caller.context);
    state.space.pin(Pinned { host, alias: 0, length, context, is_owned: true, flags })?;
    Ok(host)
}

/// Checks that an address is the beginning of pinned memory, allocated or registered.
fn owned(state: &mut State, caller: Caller, address: u64, is_owned: bool) -> Outcome {
    state.context(caller.context)?;
    let pinned = state.space.pinned_at(address).filter(|pinned| pinned.is_owned == is_owned);
    pinned.map(|_| ()).ok_or(Code::HOST_MEMORY_NOT_REGISTERED)
}

/// Whether the system has memory in a span.
fn is_mapped(address: u64, length: usize) -> bool {
    let first = address / 4096 * 4096;
    let Some(end) = address.checked_add(wide(length)) else { return false };
    let Ok(length) = usize::try_from(end.next_multiple_of(4096) - first) else { return false };
    // SAFETY: this advice is the default, and changes no bytes.
    unsafe { madvise(host_pointer(first).cast(), length, Advice::Normal) }.is_ok()
}

/// The value of an attribute, and its number of bytes.
fn attribute_of(
    state: &mut State,
    caller: Caller,
    attribute: u32,
    address: u64,
) -> Outcome<(u64, u32)> {
    const HOST: u64 = 1;
    const DEVICE: u64 = 2;
    state.context(caller.context)?;
    let place = state.space.place(address, 1)?;
    if !(1..=21).contains(&attribute) {
        return Err(Code::NOT_SUPPORTED);
    }
    let value = match place {
        Place::Pageable => return Err(Code::INVALID_VALUE),
        Place::Device { base, allocation } => match attribute {
            1 => match allocation.owner {
                Owner::Context(context) => context,
                Owner::Pool(_) => 0,
            },
            2 => DEVICE,
            3 => address,
            4 => return Err(Code::INVALID_VALUE),
            7 => base,
            9 => u64::from(allocation.device),
            10 => match (allocation.owner, allocation.pieces) {
                (Owner::Pool(_), _) | (_, Pieces::Mapped) => 0,
                _ => 1,
            },
            11 => allocation.range(base, address).0,
            12 => allocation.range(base, address).1,
            13 => 1,
            17 => match allocation.owner {
                Owner::Context(_) => 0,
                Owner::Pool(pool) => pool,
            },
            _ => 0,
        },
        Place::Pinned(pinned) => {
            let is_alias = address >= pinned.alias;
            let offset = address - if is_alias { pinned.alias } else { pinned.host };
            match attribute {
                1 => pinned.context,
                2 => HOST,
                3 => pinned.alias + offset,
                4 => pinned.host + offset,
                7 => pinned.host,
                9 => state.contexts.get(&pinned.context).map_or(0, |own| u64::from(own.device)),
                11 => pinned.alias,
                12 => pinned.length,
                13 => 1,
                _ => 0,
            }
        }
    };
    Ok((value, width_of(attribute)))
}

/// The number of bytes of an attribute: handles, addresses and sizes have eight, flags have one.
const fn width_of(attribute: u32) -> u32 {
    match attribute {
        1 | 3 | 4 | 5 | 7 | 11 | 12 | 14 | 17 | 18 | 19 | 20 => 8,
        2 | 9 | 16 => 4,
        _ => 1,
    }
}

fn write(data: Out<u64>, (value, width): (u64, u32)) -> Outcome {
    let [first, second, third, fourth, ..] = value.to_le_bytes();
    match width {
        8 => data.set(value),
        4 => data.cast::<[u8; 4]>().set([first, second, third, fourth]),
        _ => data.cast::<u8>().set(first),
    }
}
