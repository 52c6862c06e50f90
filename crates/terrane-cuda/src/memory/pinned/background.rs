//! Pinned memory that is used while it comes up.

use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use terrane_core::{
    ByteCount, Capability, CapabilityReport, DeviceAddress, Grant, HostAddress, Location, Memory,
    OsError, Reason, RegionRequest, Wish,
};
use terrane_storage::{BringUp, Raising, StorageError, SystemAllocator, SystemMemory};

use super::chunks::Registrations;
use super::{Backing, PinnedAllocator, PinnedMemory, host_memory};
use crate::context::Context;
use crate::error::CudaError;

/// How far pinned memory has come up: the prefix that is usable is locked for the device.
pub type PinnedBringUp = BringUp<CudaError>;

impl PinnedAllocator {
    /// Maps a region and hands it out at once, to be used while it comes up: threads touch it from
    /// the front, and as soon as one more [step](super::PinnedOptions::background_step) has its
    /// pages, it is registered. The [`PinnedBringUp`] says how far that is, and waits for it.
    ///
    /// All of the memory is mapped and zeroed from the start, so that the processor may use any of
    /// it, and a copy to or from any of it is correct; but only what is within the usable prefix
    /// is copied as pinned memory is, and a [`DeviceEngine`](crate::DeviceEngine) declines blocks
    /// beyond it, rather than keep its caller waiting. How many blocks of a layout that are says
    /// `LayoutPlan::blocks_within`.
    ///
    /// - The [device alias](Memory::device_alias) is there when all of the memory is, and only if
    ///   the device reaches the steps one after the other: until then no kernel can be led beyond
    ///   what is registered.
    /// - No copy may cross a multiple of the [registration
    ///   length](PinnedMemory::registration_length), which is that of a step; a step splits no
    ///   [unit](RegionRequest::unit) of the request.
    /// - If the driver refuses a step, or there are no pages, coming up ends with the error. What
    ///   is registered stays so for as long as the memory lives, as copies may be using it.
    ///   Nothing takes its place: where the driver registers no memory at all,
    ///   [`bring_up`](Self::bring_up) has the driver allocate it.
    /// - Dropping the memory while it comes up stops that, waits for the threads, and unregisters
    ///   what was registered.
    ///
    /// What the driver itself is to allocate (registration off, or write-combined memory) is up
    /// when this returns.
    ///
    /// # Errors
    ///
    /// As for [`bring_up`](Self::bring_up), but for what happens in the background.
    pub fn bring_up_in_background(
        &self,
        request: &RegionRequest,
    ) -> Result<(PinnedMemory, PinnedBringUp), CudaError> {
        let options = self.options();
        let is_registered = options.registration != Wish::Off && !options.is_write_combined;
        if request.bytes.is_zero() || !is_registered {
            let memory = self.bring_up(request)?;
            let bring_up = PinnedBringUp::complete(memory.length());
            return Ok((memory, bring_up));
        }
        let mut report = self.report()?;
        let step = self.length_of_parts(request.unit, options.background_step)?;
        let memory = self.system.map(request).map_err(host_memory)?;
        report.extend(memory.capabilities().outcomes().iter().cloned());
        let (length, location) = (memory.length(), memory.location());
        let Location::Host(address) = location else {
            return Err(CudaError::Unreachable { location });
        };
        let (bring_up, raising) = PinnedBringUp::new(length);
        let (memory, end) = (Arc::new(memory), Arc::new(End::default()));
        let raise = Raise {
            context: self.context.clone(),
            system: self.system.clone(),
            memory: Arc::clone(&memory),
            address,
            step,
            end: Arc::clone(&end),
        };
        let thread = std::thread::Builder::new()
            .name("terrane-pin".to_owned())
            .spawn(move || raise.run(raising))
            .map_err(|error| {
                let source = OsError::from_io("pthread_create", &error);
                host_memory(StorageError::Thread { source })
            })?;
        let rising = Rising {
            context: self.context.clone(),
            bring_up: bring_up.clone(),
            thread: Some(thread),
            step,
            wish: options.registration,
            end,
            _memory: memory,
        };
        let backing = Backing::Rising(rising);
        Ok((PinnedMemory { backing, address, length, alias: None, report }, bring_up))
    }
}

/// Memory that is coming up, or has come up, in the background.
#[derive(Debug)]
pub(super) struct Rising {
    context: Context,
    bring_up: PinnedBringUp,
    /// Taken by the drop. What it returns is unregistered when it drops.
    thread: Option<JoinHandle<Registered>>,
    step: ByteCount,
    wish: Wish,
    end: Arc<End>,
    _memory: Arc<SystemMemory>,
}

/// What has been registered, and after it, as fields drop in their order, the memory.
#[derive(Debug)]
struct Registered {
    _registrations: Registrations,
    _memory: Arc<SystemMemory>,
}

/// What is known when all has come up.
#[derive(Debug, Default)]
struct End {
    /// Before it is said that all is usable.
    alias: OnceLock<Option<DeviceAddress>>,
    touched: OnceLock<CapabilityReport>,
}

impl Rising {
    pub(super) const fn registration_length(&self) -> ByteCount {
        self.step
    }

    pub(super) const fn bring_up(&self) -> &PinnedBringUp {
        &self.bring_up
    }

    pub(super) fn device_alias(&self) -> Option<DeviceAddress> {
        *self.end.alias.get()?
    }

    /// Enters what has become of the wish to register, by now.
    pub(super) fn report_to(&self, report: &mut CapabilityReport) {
        if let Some(touched) = self.end.touched.get() {
            report.extend(touched.outcomes().iter().cloned());
        }
        let ended = self.bring_up.ended();
        let (granted, of) = (self.bring_up.usable_prefix(), self.bring_up.length());
        let refusal = ended.filter(|_| granted.is_zero()).and_then(|ended| ended.cause);
        let grant = match refusal.as_deref() {
            Some(CudaError::Driver { operation, code }) => {
                Grant::Refused(Reason::Driver { operation, code: code.get() })
            }
            _ if granted == of => Grant::Granted,
            _ => Grant::Partial { granted, of },
        };
        report.record(Capability::HostRegistration, self.wish, grant);
    }
}

impl Drop for Rising {
    fn drop(&mut self) {
        if self.context.driver().is_of_parent() {
            // The thread is the parent's, which joins it.
            let _left = ManuallyDrop::new(self.thread.take());
            return;
        }
        self.bring_up.cancel();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // Not where a waker that the thread itself called drops the memory: what it returns is
            // dropped as it ends. If it panicked, that unregistered what it had registered.
            drop(thread.join());
        }
    }
}

/// What the thread that brings memory up works with.
struct Raise {
    context: Context,
    system: SystemAllocator,
    memory: Arc<SystemMemory>,
    address: HostAddress,
    step: ByteCount,
    end: Arc<End>,
}

impl Raise {
    /// Registers the memory step by step, as it is touched.
    fn run(self, raising: Raising<CudaError>) -> Registered {
        let mut registrations = Registrations::none(&self.context, self.step);
        let (mut registered, mut refusal) = (ByteCount::ZERO, None);
        let touched =
            self.system.touch_from_the_front(&self.memory, self.step, &raising, |prefix| {
                if refusal.is_some() || raising.is_cancelled() {
                    return;
                }
                match self.register(&mut registrations, registered, prefix) {
                    Ok(()) => {
                        registered = prefix;
                        if registered >= self.memory.length() {
                            // It is set here only.
                            let _ = self.end.alias.set(registrations.device_alias());
                        }
                        raising.usable(prefix);
                    }
                    Err(error) => {
                        refusal = Some(error);
                        raising.stop();
                    }
                }
            });
        match (refusal, touched) {
            (Some(error), _) => raising.fail(error),
            // Dropped, it says so.
            (None, Err(StorageError::Cancelled { .. })) => drop(raising),
            (None, Err(error)) => raising.fail(host_memory(error)),
            // All was touched, and not all registered.
            (None, Ok(_)) if registered < self.memory.length() => drop(raising),
            (None, Ok(touched)) => {
                // It is set here only.
                let _ = self.end.touched.set(touched);
                tracing::debug!(bytes = %registered, "pinned memory has come up");
                raising.complete();
            }
        }
        Registered { _registrations: registrations, _memory: self.memory }
    }

    /// Registers what lies between two steps.
    fn register(
        &self,
        registrations: &mut Registrations,
        from: ByteCount,
        to: ByteCount,
    ) -> Result<(), CudaError> {
        let bytes = to.checked_sub(from).unwrap_or(ByteCount::ZERO);
        let Some(chunk) = self.address.checked_add(from) else { return Ok(()) };
        // SAFETY: the chunk lies in the memory, which stays mapped until the registrations have
        // dropped: `run` holds it for longer than them, and returns it behind them.
        unsafe { registrations.register(chunk, bytes) }
    }
}
