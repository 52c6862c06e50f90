//! Pinned memory that is usable while a background thread prepares it.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use terrane_core::{
    ByteCount, Capability, CapabilityReport, CapabilityStatus, DeviceAddress, HostAddress, Memory,
    OsError, Reason, RegionRequest, Requirement,
};
use terrane_storage::{BringUp, BringUpProducer, StorageError, SystemAllocator, SystemMemory};

use crate::error::CudaError;
use crate::memory::pinned::chunks::Registrations;
use crate::memory::pinned::{Backing, PinnedAllocator, PinnedMemory, host_memory};
use crate::runtime::context::Context;

/// The progress of pinned memory: the usable prefix is locked for the device.
pub type PinnedBringUp = BringUp<CudaError>;

impl PinnedAllocator {
    /// Maps a region and returns it at once. It is usable while threads touch it from the front.
    /// When the pages of one more [step](super::PinnedOptions::background_step) are present, that
    /// step is registered. The [`PinnedBringUp`] reports the progress, and can be waited on.
    ///
    /// All of the memory is mapped and zeroed from the start. The processor may use all of it, and
    /// copies to and from all of it are correct. Only the usable prefix is copied at the speed of
    /// pinned memory. A [`DeviceEngine`](crate::DeviceEngine) declines blocks beyond it, so that it
    /// does not block its caller. `LayoutPlan::blocks_within` returns the number of a layout's
    /// blocks within the prefix.
    ///
    /// - The [device alias](Memory::device_alias) is available when all of the memory is ready, and
    ///   only if the steps are contiguous in the device's address space. Until then no kernel can
    ///   access bytes beyond the registered ones.
    /// - No copy may cross a multiple of the [registration
    ///   length](PinnedMemory::registration_length), which is the length of a step. A step splits
    ///   no [unit](RegionRequest::unit) of the request.
    /// - If the driver refuses a step, or no pages are available, the background work ends with the
    ///   error. Registered steps stay registered for the lifetime of the memory, because copies may
    ///   be using them. There is no fallback. If the driver registers no memory at all, use
    ///   [`allocate_memory`](Self::allocate_memory), where the driver allocates.
    /// - Dropping the memory during the background work stops that work, waits for the threads, and
    ///   unregisters the registered steps.
    ///
    /// Memory that the driver itself allocates (registration off) is ready when this returns.
    ///
    /// # Errors
    ///
    /// As for [`allocate_memory`](Self::allocate_memory), except for errors of the background work.
    pub fn allocate_in_background(
        &self,
        request: &RegionRequest,
    ) -> Result<(PinnedMemory, PinnedBringUp), CudaError> {
        let options = self.options();
        if request.bytes.is_zero() || options.registration == Requirement::Off {
            let memory = self.allocate_memory(request)?;
            let bring_up = PinnedBringUp::complete(memory.length());
            return Ok((memory, bring_up));
        }
        let mut report = self.report()?;
        let step = self.length_of_parts(request.unit, options.background_step)?;
        let memory = self.system.allocate_untouched(request).map_err(host_memory)?;
        report.extend(memory.capabilities().outcomes().iter().cloned());
        let (length, location) = (memory.length(), memory.location());
        let address = location.as_host().ok_or(CudaError::Unreachable { location })?;
        let (bring_up, producer) = PinnedBringUp::new(length);
        let (memory, results) = (Arc::new(memory), Arc::new(ReadyResults::default()));
        let register_thread = RegisterThread {
            context: self.context.clone(),
            system: self.system.clone(),
            memory: Arc::clone(&memory),
            address,
            step,
            results: Arc::clone(&results),
        };
        let thread = std::thread::Builder::new()
            .name("terrane-pin".to_owned())
            .spawn(move || register_thread.run(producer))
            .map_err(|error| {
                let source = OsError::from_io("pthread_create", &error);
                host_memory(StorageError::Thread { source })
            })?;
        let background = BackgroundMemory {
            context: self.context.clone(),
            bring_up: bring_up.clone(),
            thread: Some(thread),
            step,
            requirement: options.registration,
            results,
            _memory: memory,
        };
        let backing = Backing::Background(background);
        Ok((PinnedMemory { backing, address, length, alias: None, report }, bring_up))
    }
}

/// Memory that is being prepared, or is ready, in the background.
#[derive(Debug)]
pub(super) struct BackgroundMemory {
    context: Context,
    pub(super) bring_up: PinnedBringUp,
    /// The background thread, which the drop joins. Its return value unregisters the memory when it
    /// drops.
    thread: Option<JoinHandle<Registrations>>,
    pub(super) step: ByteCount,
    requirement: Requirement,
    results: Arc<ReadyResults>,
    _memory: Arc<SystemMemory>,
}

/// Results that are known when all of the memory is ready.
#[derive(Debug, Default)]
struct ReadyResults {
    /// Set before all of the memory is reported as usable.
    alias: OnceLock<Option<DeviceAddress>>,
    touched: OnceLock<CapabilityReport>,
}

impl BackgroundMemory {
    pub(super) fn device_alias(&self) -> Option<DeviceAddress> {
        *self.results.alias.get()?
    }

    /// Adds the current result of the request for registration.
    pub(super) fn report_to(&self, report: &mut CapabilityReport) {
        if let Some(touched) = self.results.touched.get() {
            report.extend(touched.outcomes().iter().cloned());
        }
        let ended = self.bring_up.ended();
        let (granted, of) = (self.bring_up.usable_prefix(), self.bring_up.length());
        let refusal = ended.filter(|_| granted.is_zero()).and_then(|ended| ended.cause);
        let status = match refusal.as_deref() {
            Some(CudaError::Driver { operation, code }) => {
                CapabilityStatus::Refused(Reason::Driver { operation, code: code.get() })
            }
            _ if granted == of => CapabilityStatus::Granted,
            _ => CapabilityStatus::Partial { granted, of },
        };
        report.record(Capability::HostRegistration, self.requirement, status);
    }
}

impl Drop for BackgroundMemory {
    fn drop(&mut self) {
        if self.context.driver().is_of_parent() {
            // The thread belongs to the parent, which joins it.
            let _left = ManuallyDrop::new(self.thread.take());
            return;
        }
        self.bring_up.cancel();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // No join if the thread itself calls a waker that drops the memory. The thread's return
            // value then drops as the thread ends.
            drop(thread.join());
        }
    }
}

/// The state of the background thread.
struct RegisterThread {
    context: Context,
    system: SystemAllocator,
    memory: Arc<SystemMemory>,
    address: HostAddress,
    step: ByteCount,
    results: Arc<ReadyResults>,
}

impl RegisterThread {
    fn run(self, producer: BringUpProducer<CudaError>) -> Registrations {
        let memory = Arc::clone(&self.memory);
        let mut registrations = Registrations::none(&self.context, memory, self.step);
        // Only foreign code can panic, such as a subscriber of `tracing`. The unwinding drops the
        // producer, which reports the end. The usable prefix stays registered.
        let run = AssertUnwindSafe(|| self.register_all(&mut registrations, producer));
        drop(catch_unwind(run));
        registrations
    }

    /// Registers the memory step by step, as it is touched.
    fn register_all(
        &self,
        registrations: &mut Registrations,
        producer: BringUpProducer<CudaError>,
    ) {
        let (mut registered, mut refusal) = (ByteCount::ZERO, None);
        let touched =
            self.system.touch_from_the_front(&self.memory, self.step, &producer, |prefix| {
                if refusal.is_some() || producer.is_cancelled() {
                    return;
                }
                match self.register(registrations, registered, prefix) {
                    Ok(()) => {
                        registered = prefix;
                        if registered >= self.memory.length() {
                            // No other code sets it.
                            let _ = self.results.alias.set(registrations.device_alias());
                        }
                        producer.usable(prefix);
                    }
                    Err(error) => {
                        refusal = Some(error);
                        producer.stop();
                    }
                }
            });
        match (refusal, touched) {
            (Some(error), _) => producer.fail(error),
            // Dropping the producer reports the end.
            (None, Err(StorageError::Cancelled { .. })) => drop(producer),
            (None, Err(error)) => producer.fail(host_memory(error)),
            // All pages were touched, but not all registered.
            (None, Ok(_)) if registered < self.memory.length() => drop(producer),
            (None, Ok(touched)) => {
                // No other code sets it.
                let _ = self.results.touched.set(touched);
                tracing::debug!(bytes = %registered, "all pinned memory is registered");
                producer.complete();
            }
        }
    }

    /// Registers the bytes between two steps.
    fn register(
        &self,
        registrations: &mut Registrations,
        from: ByteCount,
        to: ByteCount,
    ) -> Result<(), CudaError> {
        let bytes = to.checked_sub(from).unwrap_or(ByteCount::ZERO);
        let Some(chunk) = self.address.checked_add(from) else { return Ok(()) };
        // SAFETY: the chunk is a part of the memory of the registrations.
        unsafe { registrations.register(chunk, bytes) }
    }
}
