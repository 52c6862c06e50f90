//! Modules of PTX, and their kernels.

use std::ffi::c_char;
use std::sync::Arc;

use crate::arena::wide;
use crate::code::{Code, Outcome};
use crate::exports::arguments::{In, Out};
use crate::exports::entry::exports;
use crate::ptx::{Launch, Module};
use crate::simulator::Simulator;
use crate::state::{Caller, Function};
use crate::work::Work;

const ERROR_LOG_BUFFER: u32 = 5;
const ERROR_LOG_BUFFER_SIZE: u32 = 6;

exports! {
    fn cuModuleLoadData(module: Out<u64>, image: In<c_char>) |simulator, caller| {
        load(simulator, caller, module, image).map_err(|(code, _)| code)
    }

    /// Errors of the PTX are written into the error log, if the options name one.
    fn cuModuleLoadDataEx(
        module: Out<u64>, image: In<c_char>, count: u32, options: In<u32>, values: In<u64>,
    ) |simulator, caller| {
        load(simulator, caller, module, image).map_err(|(code, message)| {
            // If the log cannot be written, the code is returned without it.
            let _ = write_log(&message, count, options, values);
            code
        })
    }

    fn cuModuleUnload(module: u64) |simulator, caller| {
        simulator.with(|state| {
            state.context(caller.context)?;
            state.modules.remove(&module).ok_or(Code::INVALID_HANDLE)?;
            state.functions.retain(|_, function| function.module != module);
            Ok(())
        })
    }

    fn cuModuleGetFunction(function: Out<u64>, module: u64, name: In<c_char>)
    |simulator, caller| {
        let name = name.text()?.to_str().map_err(|_| Code::NOT_FOUND)?;
        function.set(simulator.with(|state| {
            state.context(caller.context)?;
            let (context, loaded) = state.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
            let kernel = loaded.kernel(name).ok_or(Code::NOT_FOUND)?;
            let context = *context;
            let handle = state.new_handle();
            state.functions.insert(handle, Function { module, context, kernel });
            Ok(handle)
        })?)
    }

    fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, function: u64) |simulator, caller| {
        simulator.with(|state| {
            state.context(caller.context)?;
            state.functions.get(&function).map(|_| ()).ok_or(Code::INVALID_HANDLE)
        })?;
        value.set(match attribute {
            // Threads of a block, registers, versions of the PTX and of the binary.
            0 => 1024,
            4 => 32,
            5 => 80,
            6 => 90,
            1..=17 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    fn cuFuncSetAttribute(function: u64, _attribute: u32, _value: i32) |simulator, caller| {
        simulator.with(|state| {
            state.context(caller.context)?;
            state.functions.get(&function).map(|_| ()).ok_or(Code::INVALID_HANDLE)
        })
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>, function: u64, threads: i32, _shared: usize,
    ) |simulator, caller| {
        simulator.with(|state| {
            state.context(caller.context)?;
            state.functions.get(&function).map(|_| ()).ok_or(Code::INVALID_HANDLE)
        })?;
        if threads <= 0 {
            return Err(Code::INVALID_VALUE);
        }
        blocks.set((2048 / threads).min(32))
    }

    /// The arguments are copied now. Memory that they point to is read when the kernel runs.
    fn cuLaunchKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32,
        block_z: u32, shared: u32, stream: u64, parameters: In<In<u8>>, extra: In<u64>,
    ) |simulator, caller| {
        let (context, kernel) = simulator.with(|state| {
            state.context(caller.context)?;
            let function = state.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
            Ok((function.context, Arc::clone(&function.kernel)))
        })?;
        let parameters = arguments(&kernel.parameter_sizes(), parameters, extra)?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let launch = Launch::new(kernel, parameters, grid, block, shared)?;
        simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            let of_stream = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?.context;
            if of_stream != context {
                return Err(Code::INVALID_HANDLE);
            }
            state.submit(stream, Vec::new(), Work::Kernel(Box::new(launch))).map(|_| ())
        })
    }
}

fn load(
    simulator: &Simulator,
    caller: Caller,
    module: Out<u64>,
    image: In<c_char>,
) -> Result<(), (Code, String)> {
    let silent = |code| (code, String::new());
    simulator.with(|state| state.context(caller.context).map(|_| ())).map_err(silent)?;
    let text = image.text().map_err(silent)?;
    let invalid = |message: &str| (Code::INVALID_IMAGE, message.to_owned());
    let text = text.to_str().map_err(|_| invalid("the simulated driver loads only PTX texts"))?;
    let loaded = Module::parse(text).map_err(|message| (Code::INVALID_PTX, message))?;
    let handle = simulator.with(|state| {
        let handle = state.new_handle();
        state.modules.insert(handle, (caller.context, Arc::new(loaded)));
        handle
    });
    module.set(handle).map_err(silent)
}

/// Writes a message into the error log that the options name.
fn write_log(message: &str, count: u32, options: In<u32>, values: In<u64>) -> Outcome {
    let (mut buffer, mut size) = (None, 0);
    for index in 0..usize::try_from(count).map_err(|_| Code::INVALID_VALUE)? {
        match options.get(index)? {
            ERROR_LOG_BUFFER => buffer = Some(values.get(index)?),
            ERROR_LOG_BUFFER_SIZE => size = values.get(index)?,
            _ => {}
        }
    }
    let Some(buffer) = buffer else { return Ok(()) };
    let buffer = usize::try_from(buffer).map_err(|_| Code::INVALID_VALUE)?;
    let size = i32::try_from(size).unwrap_or(i32::MAX);
    Out(std::ptr::with_exposed_provenance_mut::<u8>(buffer)).set_text(message, size)
}

/// The bytes of each argument, from an array of pointers or from one buffer.
fn arguments(sizes: &[usize], parameters: In<In<u8>>, extra: In<u64>) -> Outcome<Vec<Vec<u8>>> {
    const BUFFER_POINTER: u64 = 1;
    if sizes.is_empty() {
        return Ok(Vec::new());
    }
    if !parameters.is_null() {
        let each = sizes.iter().enumerate();
        return each.map(|(index, &size)| parameters.get(index)?.bytes(size)).collect();
    }
    // In one buffer, each argument is aligned to its size.
    if extra.get(0)? != BUFFER_POINTER {
        return Err(Code::INVALID_VALUE);
    }
    let start = usize::try_from(extra.get(1)?).map_err(|_| Code::INVALID_VALUE)?;
    let mut offset = 0_usize;
    let mut all = Vec::new();
    for &size in sizes {
        offset = offset.next_multiple_of(size.clamp(1, 8));
        let at = std::ptr::with_exposed_provenance::<u8>(start).wrapping_add(offset);
        all.push(In(at).bytes(size)?);
        offset += size;
    }
    debug_assert!(wide(offset) <= 32 << 10);
    Ok(all)
}
