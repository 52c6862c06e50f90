//! The driver itself, and its devices.

use std::ffi::c_char;

use crate::code::{Code, name};
use crate::exports::arguments::{In, Out};
use crate::exports::entry::{exports, known};
use crate::exports::find;

/// CUDA 13.0.
const VERSION: i32 = 13_000;

exports! {
    /// Creates the simulated driver with the settings of `TERRANE_SIMULATED_CUDA`.
    fn cuInit(flags: u32) |simulator, _caller| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if simulator.with(|state| state.devices.is_empty()) { Err(Code(100)) } else { Ok(()) }
    }

    fn cuDeviceGetCount(count: Out<i32>) |simulator, _caller| {
        let devices = simulator.with(|state| state.devices.len());
        count.set(i32::try_from(devices).map_err(|_| Code::INVALID_VALUE)?)
    }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) |simulator, _caller| {
        known(simulator, ordinal)?;
        device.set(ordinal)
    }

    fn cuDeviceGetName(name: Out<u8>, length: i32, device: i32) |simulator, _caller| {
        known(simulator, device)?;
        name.set_text("Terrane Simulated Device", length)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) |simulator, _caller| {
        uuid.set(uuid_of(known(simulator, device)?))
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) |simulator, _caller| {
        uuid.set(uuid_of(known(simulator, device)?))
    }

    fn cuDeviceGetPCIBusId(text: Out<u8>, length: i32, device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        // A PCI domain that no machine has, so that sysfs has no such device.
        text.set_text(&format!("f00d:{:02x}:00.0", device + 1), length)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) |simulator, _caller| {
        known(simulator, device)?;
        let memory = simulator.with(|state| state.config.memory);
        bytes.set(usize::try_from(memory).map_err(|_| Code::INVALID_VALUE)?)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: u32, device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        value.set(attribute_of(device, attribute)?)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) |simulator, _caller| {
        let (device, peer) = (known(simulator, device)?, known(simulator, peer)?);
        let peers = simulator.with(|state| state.config.peers);
        can.set(i32::from(peers && device != peer))
    }

    /// Finds a function by its documented name, which lacks the version suffix of its symbol.
    fn cuGetProcAddress_v2(
        symbol: In<c_char>, function: Out<*const ()>, version: i32, _flags: u64, status: Out<u32>,
    ) |_simulator, _caller| {
        const FOUND: u32 = 0;
        const NOT_FOUND: u32 = 1;
        let symbol = symbol.text()?.to_str().map_err(|_| Code::INVALID_VALUE)?;
        let found = find(symbol, version);
        status.set_if_wanted(if found.is_some() { FOUND } else { NOT_FOUND });
        function.set_if_wanted(found.unwrap_or(std::ptr::null()));
        found.map(|_| ()).ok_or(Code::NOT_FOUND)
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        pool.set(simulator.with(|state| state.device(device).map(|device| device.default_pool))?)
    }

    fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        pool.set(simulator.with(|state| state.device(device).map(|device| device.current_pool))?)
    }

    fn cuDeviceSetMemPool(device: i32, pool: u64) |simulator, _caller| {
        let device = known(simulator, device)?;
        simulator.with(|state| {
            if state.pool(pool)?.device != device {
                return Err(Code::INVALID_VALUE);
            }
            state.device(device)?.current_pool = pool;
            Ok(())
        })
    }
}

/// The simulated version of CUDA.
///
/// # Safety
///
/// The pointer is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: Out<i32>) -> u32 {
    version.set(VERSION).map_or_else(|code| code.0, |()| 0)
}

/// The name of a code.
///
/// # Safety
///
/// The pointer is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: u32, text: Out<*const c_char>) -> u32 {
    let found = name(code);
    text.set_if_wanted(found.map_or(std::ptr::null(), std::ffi::CStr::as_ptr));
    if found.is_some() { 0 } else { Code::INVALID_VALUE.0 }
}

/// The description of a code; here, its name.
///
/// # Safety
///
/// The pointer is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: u32, text: Out<*const c_char>) -> u32 {
    // SAFETY: the caller guarantees it.
    unsafe { cuGetErrorName(code, text) }
}

fn uuid_of(device: u32) -> [u8; 16] {
    let mut uuid = *b"terrane-simulate";
    if let (Some(last), [first, ..]) = (uuid.last_mut(), device.to_le_bytes()) {
        *last = first;
    }
    uuid
}

/// The attributes that programs use. All others are zero.
fn attribute_of(device: u32, attribute: u32) -> Result<i32, Code> {
    if !(1..=200).contains(&attribute) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(match attribute {
        // Threads of a block, and its dimensions.
        1..=3 => 1024,
        4 => 64,
        // Blocks of a grid.
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared memory of a block, constant memory, a warp, a pitch, registers.
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65_536,
        // Overlap, host mapping, concurrent kernels, unified addresses, stream priorities.
        15 | 19 | 31 | 41 | 78 => 1,
        // Multiprocessors, and their blocks and threads.
        16 => 16,
        106 => 32,
        39 => 2048,
        // The PCI address: bus, device, domain.
        33 => i32::try_from(device + 1).map_err(|_| Code::INVALID_DEVICE)?,
        50 => 0xf00d,
        // Copy engines.
        40 => 2,
        // Compute capability 9.0.
        75 => 9,
        // The device address of registered host memory differs from the host address (91 is 0);
        // host memory can be registered, and there are memory pools.
        99 | 115 => 1,
        // No NUMA node of the host is the nearest.
        134 => -1,
        _ => 0,
    })
}
