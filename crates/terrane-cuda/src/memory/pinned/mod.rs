//! Pinned memory: the host's, locked so that the device's copy engines reach it by themselves.

mod background;
mod chunks;
mod host_allocation;
mod options;

use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Capability, CapabilityReport, DeviceAddress,
    Grant, HostAddress, Limits, Location, Memory, Reason, RegionRequest, StorageKind, Wish,
};
use terrane_storage::{
    HugePages, NodeId, NumaPolicy, NumaTopology, Progress, ProgressEntry, StorageError,
    SystemAllocator, SystemMemory,
};

pub use background::PinnedBringUp;

pub use options::{PinnedNuma, PinnedOptions};

use super::{PINNED, nowhere};
use crate::context::Context;
use crate::error::CudaError;
use background::Rising;
pub(crate) use chunks::device_pointer;
use chunks::{Registrations, chunk_length};
use host_allocation::HostAllocation;

/// Hands out pinned memory.
///
/// Each region is mapped, placed near the device, touched by several threads and then registered
/// with the driver; where the driver does not take that, it allocates itself, and the report of
/// the memory ([`Capability::HostRegistration`]) says why.
///
/// A registration holds 64 GiB at most. Of memory that is longer, each but the last ends between two
/// [units](RegionRequest::unit) of the request, which are a layout's blocks where a layout asks, so
/// that no block lies in two of them.
#[derive(Clone, Debug)]
pub struct PinnedAllocator {
    context: Context,
    options: PinnedOptions,
    system: SystemAllocator,
    progress: Progress,
    /// What became of the wish to be near the device, where sysfs decided it.
    near_device: Option<(Wish, Grant)>,
}

impl PinnedAllocator {
    /// An allocator for the context's device, with these options. Reads the NUMA topology.
    ///
    /// # Errors
    ///
    /// [`CudaError::UnitTooLarge`] if no registration could hold a whole unit.
    pub fn new(context: &Context, options: PinnedOptions) -> Result<Self, CudaError> {
        Self::with_topology(context, options, NumaTopology::read())
    }

    /// As [`new`](Self::new), on a topology that was read before: it says which node the device is
    /// attached to.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new) has them.
    pub fn with_topology(
        context: &Context,
        options: PinnedOptions,
        topology: NumaTopology,
    ) -> Result<Self, CudaError> {
        let mut system = options.system.clone();
        let mut near_device = None;
        match &options.numa {
            PinnedNuma::Policy(policy) => system.numa = policy.clone(),
            PinnedNuma::NearDevice(Wish::Off) => {
                system.numa = NumaPolicy::Local;
                near_device = Some((Wish::Off, Grant::NotTried));
            }
            PinnedNuma::NearDevice(wish) => match node_of(context, &topology) {
                Some(node) => system.numa = NumaPolicy::Bind(node, *wish),
                None => {
                    system.numa = NumaPolicy::Local;
                    let reason = Reason::Needs("sysfs to name the device's node");
                    near_device = Some((*wish, Grant::Refused(reason)));
                }
            },
        }
        let system = SystemAllocator::with_topology(system, topology);
        let (context, progress) = (context.clone(), Progress::default());
        let allocator = Self { context, options, system, progress: progress.clone(), near_device };
        allocator.length_of_parts(ByteCount::ZERO, ByteCount::ZERO)?;
        Ok(allocator.reporting_to(progress))
    }

    /// The same allocator, whose bring-ups can be watched and cancelled through `progress`.
    ///
    /// Memory is [touched](Progress::touched) first and registered after, and only then
    /// [ready](Progress::ready), all of a region at once: a registration is a call of the driver
    /// that says nothing before its end, and takes about as long as touching does. Between the
    /// registrations of a region it can be cancelled. What comes up in the background is ready
    /// as far as its prefix is usable.
    #[must_use]
    pub fn reporting_to(self, progress: Progress) -> Self {
        let system = self.system.reporting_to(progress.clone());
        Self { system, progress, ..self }
    }

    /// How many bytes are registered at once, where as many as `wanted` are wanted for memory
    /// that is used in pieces of `unit` bytes. Pieces that fit no registration are split.
    fn length_of_parts(&self, unit: ByteCount, wanted: ByteCount) -> Result<ByteCount, CudaError> {
        let (page, largest) = (self.system.limits().alignment, self.options.largest_registration);
        let length = |unit| chunk_length(unit, page, wanted, largest);
        match length(unit) {
            Ok(length) if !unit.is_zero() => Ok(length),
            _ => length(self.options.unit),
        }
    }

    /// The options.
    #[must_use]
    pub const fn options(&self) -> &PinnedOptions {
        &self.options
    }

    /// Brings one region up; what [`allocate`](Allocate::allocate) does, with this crate's error.
    ///
    /// # Errors
    ///
    /// [`CudaError::HostMemory`] if the memory cannot be mapped or was cancelled,
    /// [`CudaError::Capability`] if something required was not granted, [`CudaError::Driver`] if
    /// the driver allocates no memory either, [`CudaError::DeviceLost`]. Nothing stays mapped or
    /// registered.
    pub fn bring_up(&self, request: &RegionRequest) -> Result<PinnedMemory, CudaError> {
        let mut report = self.report()?;
        if request.bytes.is_zero() {
            return Ok(PinnedMemory {
                backing: Backing::Nothing,
                address: nowhere(request.alignment.max(Alignment::PAGE)),
                length: ByteCount::ZERO,
                alias: None,
                report,
            });
        }
        let wish = self.options.registration;
        let mut entry = None;
        if self.options.is_write_combined {
            let reason = Reason::Unsupported { by: "write-combined memory" };
            report.record(Capability::HostRegistration, wish, Grant::Refused(reason));
        } else if wish == Wish::Off {
            report.record(Capability::HostRegistration, wish, Grant::NotTried);
        } else {
            match self.register(request, &mut report)? {
                Ok(memory) => return Ok(memory),
                Err((reason, begun)) => {
                    report.record(Capability::HostRegistration, wish, Grant::Refused(reason));
                    entry = Some(begun);
                }
            }
        }
        self.record_unheeded(&mut report);
        report.check()?;
        self.let_the_driver_allocate(request, report, entry)
    }

    /// The beginning of a report: what became of the wish to be near the device.
    fn report(&self) -> Result<CapabilityReport, CudaError> {
        let mut report = CapabilityReport::default();
        if let Some((wish, grant)) = &self.near_device {
            report.record(Capability::NumaBinding, *wish, grant.clone());
            report.check()?;
        }
        Ok(report)
    }

    /// What of the wishes the driver does not heed when it allocates by itself: it takes its pages
    /// where and as it likes.
    fn record_unheeded(&self, report: &mut CapabilityReport) {
        let mut record = |capability, wish| {
            if wish != Wish::Off {
                let reason = Reason::Unsupported { by: "the driver's own allocation" };
                report.record(capability, wish, Grant::Refused(reason));
            }
        };
        let options = self.system.options();
        match &options.numa {
            NumaPolicy::Bind(_, wish) | NumaPolicy::Interleave(_, wish) => {
                record(Capability::NumaBinding, *wish);
            }
            _ => {}
        }
        match options.huge_pages {
            HugePages::Transparent(wish) => record(Capability::TransparentHugePages, wish),
            HugePages::Explicit(_, wish) => record(Capability::ExplicitHugePages, wish),
            _ => {}
        }
    }

    /// Maps and registers, or answers why the driver refused to register, and what stands in the
    /// progress.
    fn register(
        &self,
        request: &RegionRequest,
        report: &mut CapabilityReport,
    ) -> Result<Result<PinnedMemory, (Reason, ProgressEntry)>, CudaError> {
        let chunk = self.length_of_parts(request.unit, self.options.largest_registration)?;
        let (memory, entry) = self.system.bring_up_unfinished(request).map_err(host_memory)?;
        let (Location::Host(address), length) = (memory.location(), memory.length()) else {
            let reason = Reason::Unsupported { by: "memory that is not the host's" };
            return Ok(Err((reason, entry)));
        };
        let go_on = |ready| self.go_on(ready, length);
        // SAFETY: the memory is mapped until it drops, which is after the registrations.
        let registered =
            unsafe { Registrations::new(&self.context, (address, length), chunk, go_on) };
        let registrations = match registered {
            Ok(registrations) => registrations,
            Err(CudaError::Driver { operation, code }) => {
                return Ok(Err((Reason::Driver { operation, code: code.get() }, entry)));
            }
            Err(error) => return Err(error),
        };
        entry.finish();
        report.extend(memory.capabilities().outcomes().iter().cloned());
        let wish = self.options.registration;
        report.record(Capability::HostRegistration, wish, Grant::Granted);
        Ok(Ok(PinnedMemory {
            alias: registrations.device_alias(),
            backing: Backing::Registered { registrations, _memory: Box::new(memory) },
            address,
            length,
            report: std::mem::take(report),
        }))
    }

    /// An error where somebody has cancelled.
    fn go_on(&self, ready: ByteCount, of: ByteCount) -> Result<(), CudaError> {
        if self.progress.is_cancelled() {
            return Err(host_memory(StorageError::Cancelled { ready, of }));
        }
        Ok(())
    }

    fn let_the_driver_allocate(
        &self,
        request: &RegionRequest,
        report: CapabilityReport,
        entry: Option<ProgressEntry>,
    ) -> Result<PinnedMemory, CudaError> {
        let Limits { alignment, granule, .. } = self.limits();
        let length = request.bytes.align_up(granule)?;
        let alignment = request.alignment.max(alignment);
        let is_write_combined = self.options.is_write_combined;
        self.go_on(ByteCount::ZERO, length)?;
        let entry = entry.unwrap_or_else(|| self.progress.enter(length));
        let allocation = HostAllocation::new(&self.context, length, alignment, is_write_combined)?;
        let address = allocation.first();
        entry.finish();
        Ok(PinnedMemory {
            alias: device_pointer(&self.context, address).ok(),
            backing: Backing::Driver { _allocation: allocation },
            address,
            length,
            report,
        })
    }
}

fn host_memory(error: StorageError) -> CudaError {
    CudaError::HostMemory { source: Arc::new(error) }
}

/// The node that is nearest to the device. Where there is one node only, firmware often does not
/// say that the device is attached to it.
fn node_of(context: &Context, topology: &NumaTopology) -> Option<NodeId> {
    let only = || match topology.nodes() {
        [only] if topology.gap().is_none() => Some(only.id),
        _ => None,
    };
    context.device().numa_node(topology).or_else(only)
}

// SAFETY: each region is a mapping, or an allocation of the driver's, made for this call.
unsafe impl Allocate for PinnedAllocator {
    type Memory = PinnedMemory;

    fn kind(&self) -> StorageKind {
        PINNED
    }

    /// Whole pages, as system memory's limits are.
    fn limits(&self) -> Limits {
        self.system.limits()
    }

    fn allocate(&self, request: &RegionRequest) -> Result<PinnedMemory, AllocateError> {
        self.bring_up(request).map_err(|error| {
            error.into_allocate_error(PINNED, request.bytes, None, request.label.clone())
        })
    }
}

/// A region of pinned memory, zeroed at first. When it drops it is unregistered first, and
/// unmapped after that; if it is still coming up, that is stopped and waited for before.
#[derive(Debug)]
pub struct PinnedMemory {
    backing: Backing,
    address: HostAddress,
    length: ByteCount,
    alias: Option<DeviceAddress>,
    report: CapabilityReport,
}

#[derive(Debug)]
enum Backing {
    Nothing,
    Registered {
        /// Before the memory, as fields drop in their order.
        registrations: Registrations,
        _memory: Box<SystemMemory>,
    },
    /// Mapped, and being registered in the background, or registered so.
    Rising(Rising),
    Driver {
        _allocation: HostAllocation,
    },
}

impl PinnedMemory {
    /// The address of the first byte.
    #[must_use]
    pub const fn address(&self) -> HostAddress {
        self.address
    }

    /// How many bytes each registration has but the last, which may have fewer: a copy must not
    /// cross a multiple of this, counted from the beginning. `None` if all is one allocation of
    /// the driver's.
    #[must_use]
    pub const fn registration_length(&self) -> Option<ByteCount> {
        match &self.backing {
            Backing::Registered { registrations, .. } => Some(registrations.chunk_length()),
            Backing::Rising(rising) => Some(rising.registration_length()),
            Backing::Nothing | Backing::Driver { .. } => None,
        }
    }

    /// How many bytes from the first on are locked for the device by now: all of them, unless the
    /// memory is still [coming up](PinnedAllocator::bring_up_in_background). A copy beyond them is
    /// correct, and as slow as with memory that is not pinned.
    #[must_use]
    pub fn usable_prefix(&self) -> ByteCount {
        match &self.backing {
            Backing::Rising(rising) => rising.bring_up().usable_prefix(),
            Backing::Nothing | Backing::Registered { .. } | Backing::Driver { .. } => self.length,
        }
    }
}

// SAFETY: the bytes are a mapping or an allocation of this value's alone, readable, writable and
// zeroed, which stays until the value drops, wherever that moves.
unsafe impl Memory for PinnedMemory {
    fn kind(&self) -> StorageKind {
        PINNED
    }

    fn location(&self) -> Location {
        Location::Host(self.address)
    }

    fn length(&self) -> ByteCount {
        self.length
    }

    fn device_alias(&self) -> Option<DeviceAddress> {
        match &self.backing {
            Backing::Rising(rising) => rising.device_alias(),
            Backing::Nothing | Backing::Registered { .. } | Backing::Driver { .. } => self.alias,
        }
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        let left = self.usable_prefix().checked_sub(offset).unwrap_or(ByteCount::ZERO);
        Some(match self.registration_length() {
            Some(chunk) if !chunk.is_zero() => {
                ByteCount::new(chunk.get() - offset.get() % chunk.get()).min(left)
            }
            _ => left,
        })
    }

    fn capabilities(&self) -> CapabilityReport {
        let mut report = self.report.clone();
        if let Backing::Rising(rising) = &self.backing {
            rising.report_to(&mut report);
        }
        report
    }
}
