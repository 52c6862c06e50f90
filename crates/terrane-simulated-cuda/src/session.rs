//! Additional simulated drivers of a test, besides the process's driver.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crate::code::{Code, Outcome};
use crate::config::Config;
use crate::exports::entry::{attach, mark_as_callback};
use crate::simulator::Simulator;

/// A simulated driver other than the process's. It is for tests in Rust that link this crate, and
/// call [`exports`](crate::exports) on threads that are [attached](Self::attach). It ends when this
/// value drops; no thread may be attached then.
#[derive(Debug)]
pub struct Session {
    simulator: Arc<Simulator>,
    threads: Vec<JoinHandle<()>>,
}

impl Session {
    /// Starts a driver.
    ///
    /// # Errors
    ///
    /// The driver's code (304) if the system has no addresses or no threads for it.
    pub fn start(config: Config) -> Result<Self, u32> {
        let (simulator, threads) = start(config).map_err(|code| code.0)?;
        Ok(Self { simulator, threads })
    }

    /// Makes this thread call this driver, until the returned value drops.
    #[must_use]
    pub fn attach(&self) -> Attached {
        Attached(attach(Some(Arc::clone(&self.simulator)), Vec::new()))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.simulator.end();
        for thread in self.threads.drain(..) {
            // The thread has printed its panic.
            let _ = thread.join();
        }
    }
}

/// While this value lives, its thread calls a [`Session`]'s driver.
#[derive(Debug)]
pub struct Attached((Option<Arc<Simulator>>, Vec<u64>));

impl Drop for Attached {
    fn drop(&mut self) {
        let (simulator, stack) = std::mem::take(&mut self.0);
        attach(simulator, stack);
    }
}

/// Starts a driver and its two threads: one runs steps when there are no calls, and the other calls
/// host functions.
pub fn start(config: Config) -> Outcome<(Arc<Simulator>, Vec<JoinHandle<()>>)> {
    let simulator = Arc::new(Simulator::new(config)?);
    let mut threads = Vec::new();
    for (name, run) in [("simulated-cuda", drive as fn(&Simulator)), ("simulated-calls", call)] {
        let own = Arc::clone(&simulator);
        let started = Builder::new().name(name.to_owned()).spawn(move || run(&own));
        let Ok(started) = started else {
            simulator.end();
            return Err(Code::OPERATING_SYSTEM);
        };
        threads.push(started);
    }
    Ok((simulator, threads))
}

fn drive(simulator: &Simulator) {
    simulator.drive();
}

fn call(simulator: &Simulator) {
    mark_as_callback();
    // SAFETY: host functions come from `cuLaunchHostFunc`, whose caller guarantees it.
    unsafe { simulator.call_back() };
}
