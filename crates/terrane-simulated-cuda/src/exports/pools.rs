//! Memory that is allocated and freed in the order of a stream.

use crate::arena::wide;
use crate::code::{Code, Outcome};
use crate::exports::arguments::{In, Out};
use crate::exports::entry::exports;
use crate::pools::Pool;
use crate::simulator::Simulator;
use crate::space::{Allocation, Owner, Pieces};
use crate::state::{Caller, State, granted};
use crate::work::Work;

exports! {
    fn cuMemPoolCreate(pool: Out<u64>, properties: In<[i32; 4]>) |simulator, _caller| {
        const PINNED: i32 = 1;
        const DEVICE: i32 = 1;
        // The type of the allocation, the types of handles, and the type and number of the
        // location.
        let [kind, handles, location, device] = properties.get(0)?;
        let device = u32::try_from(device).map_err(|_| Code::INVALID_VALUE)?;
        if (kind, handles, location) != (PINNED, 0, DEVICE) {
            return Err(Code::NOT_SUPPORTED);
        }
        pool.set(simulator.with(|state| {
            state.device(device).map_err(|_| Code::INVALID_VALUE)?;
            let handle = state.new_handle();
            state.pools.insert(handle, Pool::new(device));
            Ok(handle)
        })?)
    }

    fn cuMemPoolDestroy(pool: u64) |simulator, _caller| {
        simulator.with(|state| state.destroy_pool(pool))
    }

    fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: Out<u64>) |simulator, _caller| {
        let (number, is_narrow) =
            simulator.with(|state| state.pool(pool).and_then(|pool| pool.attribute(attribute)))?;
        if is_narrow {
            let number = u32::try_from(number).map_err(|_| Code::INVALID_VALUE)?;
            return value.cast::<u32>().set(number);
        }
        value.set(number)
    }

    fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: In<u32>) |simulator, _caller| {
        let low = u64::from(value.get(0)?);
        let high = if Pool::is_narrow(attribute) { 0 } else { u64::from(value.get(1)?) };
        simulator.with(|state| state.pool(pool)?.set_attribute(attribute, high << 32 | low))
    }

    fn cuMemPoolTrimTo(pool: u64, keep: usize) |simulator, _caller| {
        simulator.with(|state| {
            state.pool(pool)?;
            state.trim_pool(pool, wide(keep));
            Ok(())
        })
    }

    fn cuMemAllocFromPoolAsync(address: Out<u64>, length: usize, pool: u64, stream: u64)
    |simulator, caller| {
        address.set(allocate(simulator, caller, wide(length), Some(pool), stream)?)
    }

    fn cuMemAllocAsync(address: Out<u64>, length: usize, stream: u64) |simulator, caller| {
        address.set(allocate(simulator, caller, wide(length), None, stream)?)
    }

    fn cuMemFreeAsync(address: u64, stream: u64) |simulator, caller| {
        simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            let known = state.space.allocation(address).filter(|known| !known.is_freed);
            known.ok_or(Code::INVALID_VALUE)?.is_freed = true;
            state.submit(stream, Vec::new(), Work::Free(address)).map(|_| ())
        })
    }
}

/// If memory is short, earlier frees of the same stream run first. Frees of other streams are waited
/// for, if the pool permits such internal dependencies. A real driver lets the stream wait for them
/// instead, without a wait of the host.
fn allocate(
    simulator: &Simulator,
    caller: Caller,
    length: u64,
    pool: Option<u64>,
    stream: u64,
) -> Outcome<u64> {
    let first = simulator.with(|state| take(state, caller, length, pool, stream));
    if first != Err(Code::OUT_OF_MEMORY) {
        return first;
    }
    let (context, marks) = simulator.with(|state| {
        let own = state.stream(caller, stream)?;
        let context = state.streams.get(&own).ok_or(Code::INVALID_HANDLE)?.context;
        let pool = pool_number(state, context, pool)?;
        if state.pool(pool)?.may_depend() {
            return Ok((context, state.marks_of(context)));
        }
        let submitted = state.streams.get(&own).ok_or(Code::INVALID_HANDLE)?.submitted;
        while state.step_towards((own, submitted)) {}
        Ok((context, Vec::new()))
    })?;
    simulator.wait(context, &marks)?;
    simulator.with(|state| take(state, caller, length, pool, stream))
}

fn take(
    state: &mut State,
    caller: Caller,
    length: u64,
    pool: Option<u64>,
    stream: u64,
) -> Outcome<u64> {
    let stream = state.stream(caller, stream)?;
    if length == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let context = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?.context;
    let pool = pool_number(state, context, pool)?;
    let device = state.pool(pool)?.device;
    if length > state.config.memory {
        return Err(Code::OUT_OF_MEMORY);
    }
    state.take_from_pool(pool, granted(length))?;
    let owner = Owner::Pool(pool);
    let pieces = Pieces::One;
    let allocation = Allocation { device, length, owner, is_live: false, is_freed: false, pieces };
    let address = state.space.allocate(allocation);
    let Ok(address) = address else {
        state.return_to_pool(pool, granted(length));
        return address;
    };
    state.submit(stream, Vec::new(), Work::Allocate(address))?;
    Ok(address)
}

/// The pool itself, or the current pool of the context's device.
fn pool_number(state: &mut State, context: u64, pool: Option<u64>) -> Outcome<u64> {
    match pool {
        Some(pool) => Ok(pool),
        None => {
            let device = state.context(context)?.device;
            Ok(state.device(device)?.current_pool)
        }
    }
}
