//! Contexts, and the current context of each thread.

use crate::code::{Code, Outcome};
use crate::exports::arguments::Out;
use crate::exports::entry::{CURRENT, caller, exports, known};
use crate::simulator::Simulator;

exports! {
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        let handle = simulator.with(|state| {
            let known = state.device(device)?;
            known.retained += 1;
            if let Some(primary) = known.primary {
                return Ok(primary);
            }
            let primary = state.new_context(device);
            state.device(device)?.primary = Some(primary);
            Ok(primary)
        })?;
        context.set(handle)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        simulator.with(|state| {
            let known = state.device(device)?;
            if known.retained == 0 {
                return Err(Code::INVALID_CONTEXT);
            }
            known.retained -= 1;
            if known.retained == 0
                && let Some(primary) = known.primary.take()
            {
                state.drain_context(primary);
                state.end_context(primary);
            }
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        simulator.with(|state| {
            if let Some(primary) = state.device(device)?.primary.take() {
                state.end_context(primary);
            }
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>)
    |simulator, _caller| {
        let device = known(simulator, device)?;
        let primary = simulator.with(|state| state.device(device).map(|device| device.primary))?;
        flags.set(0)?;
        active.set(i32::from(primary.is_some()))
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, _flags: u32) |simulator, _caller| {
        known(simulator, device).map(|_| ())
    }

    fn cuCtxCreate_v2(context: Out<u64>, _flags: u32, device: i32) |simulator, _caller| {
        let device = known(simulator, device)?;
        let handle = simulator.with(|state| state.new_context(device));
        CURRENT.with_borrow_mut(|stack| stack.push(handle));
        context.set(handle)
    }

    fn cuCtxCreate_v4(context: Out<u64>, _parameters: u64, _flags: u32, device: i32)
    |simulator, _caller| {
        let device = known(simulator, device)?;
        let handle = simulator.with(|state| state.new_context(device));
        CURRENT.with_borrow_mut(|stack| stack.push(handle));
        context.set(handle)
    }

    fn cuCtxDestroy_v2(context: u64) |simulator, caller| {
        simulator.with(|state| {
            let is_primary = state.devices.iter().any(|device| device.primary == Some(context));
            if is_primary || !state.contexts.contains_key(&context) {
                return Err(Code::INVALID_CONTEXT);
            }
            state.drain_context(context);
            state.end_context(context);
            Ok(())
        })?;
        if caller.context == context {
            CURRENT.with_borrow_mut(Vec::pop);
        }
        Ok(())
    }

    fn cuCtxGetCurrent(context: Out<u64>) |_simulator, caller| {
        context.set(caller.context)
    }

    fn cuCtxSetCurrent(context: u64) |simulator, _caller| {
        if context != 0 {
            exists(simulator, context)?;
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: u64) |simulator, _caller| {
        exists(simulator, context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<u64>) |_simulator, _caller| {
        let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        context.set_if_wanted(popped);
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<i32>) |simulator, caller| {
        let ordinal = simulator.with(|state| state.current_device(caller))?;
        device.set(i32::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?)
    }

    fn cuCtxGetFlags(flags: Out<u32>) |simulator, caller| {
        simulator.with(|state| state.current_device(caller))?;
        flags.set(0)
    }

    fn cuCtxGetApiVersion(context: u64, version: Out<u32>) |simulator, caller| {
        exists(simulator, if context == 0 { caller.context } else { context })?;
        version.set(13_000)
    }

    fn cuCtxSynchronize() |simulator, caller| {
        simulator.wait_for_context(caller)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) |simulator, caller| {
        simulator.with(|state| state.current_device(caller))?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(HIGHEST_PRIORITY);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: u64, flags: u32) |simulator, caller| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        simulator.with(|state| {
            let other = state.context(peer)?.device;
            let peers = state.config.peers;
            let own = state.context(caller.context)?;
            if !peers || own.device == other {
                return Err(Code::PEER_ACCESS_UNSUPPORTED);
            }
            if own.peers.insert(peer) { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
        })
    }

    fn cuCtxDisablePeerAccess(peer: u64) |simulator, caller| {
        simulator.with(|state| {
            let was_enabled = state.context(caller.context)?.peers.remove(&peer);
            if was_enabled { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
        })
    }
}

/// The highest priority of a stream; the lowest is 0.
pub(super) const HIGHEST_PRIORITY: i32 = -5;

/// Checks that a context exists. A lost context may be made current, too.
fn exists(simulator: &Simulator, context: u64) -> Outcome {
    let exists = simulator.with(|state| state.contexts.contains_key(&context));
    if exists { Ok(()) } else { Err(Code::INVALID_CONTEXT) }
}

/// The current context, which is neither destroyed nor lost.
pub(super) fn current(simulator: &Simulator) -> Outcome<u64> {
    let caller = caller();
    simulator.with(|state| state.context(caller.context).map(|_| caller.context))
}
