//! Pinned memory: host memory that is locked, so that the device's copy engines can access it
//! directly.

pub(crate) mod background;
pub(crate) mod chunks;
pub(crate) mod host_allocation;
pub(crate) mod options;

use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Capability, CapabilityReport, CapabilityStatus,
    DeviceAddress, HostAddress, Limits, Location, Memory, Reason, RegionRequest, Requirement,
    StorageKind,
};
use terrane_storage::{
    HugePages, NodeId, NumaPolicy, NumaTopology, Progress, ProgressEntry, StorageError,
    SystemAllocator,
};

use crate::error::CudaError;
use crate::memory::pinned::background::BackgroundMemory;
use crate::memory::pinned::chunks::{Registrations, chunk_length};
use crate::memory::pinned::host_allocation::HostAllocation;
use crate::memory::{PINNED, address_of_no_bytes};
use crate::runtime::context::Context;

pub use background::PinnedBringUp;

pub use options::{PinnedNuma, PinnedOptions};

pub(crate) use chunks::device_pointer;

/// Allocates pinned memory.
///
/// Each region is mapped, placed near the device, touched by several threads and then registered
/// with the driver. If the driver refuses the registration, it allocates the memory itself. The
/// memory's report ([`Capability::HostRegistration`]) then gives the reason.
///
/// A registration has at most 64 GiB. Longer memory has several registrations. Each except the last
/// ends between two [units](RegionRequest::unit) of the request. In a layout's request the units
/// are blocks, so no block is in two registrations.
#[derive(Clone, Debug)]
pub struct PinnedAllocator {
    context: Context,
    options: PinnedOptions,
    system: SystemAllocator,
    progress: Progress,
    /// The result of the request for memory near the device, if sysfs decided it.
    near_device: Option<(Requirement, CapabilityStatus)>,
}

impl PinnedAllocator {
    /// Creates an allocator for the context's device, with these options. Reads the NUMA topology.
    ///
    /// # Errors
    ///
    /// [`CudaError::UnitTooLarge`] if no registration can hold a whole unit.
    pub fn new(context: &Context, options: PinnedOptions) -> Result<Self, CudaError> {
        Self::with_topology(context, options, NumaTopology::read())
    }

    /// Like [`new`](Self::new), with a topology that was read before. The topology gives the
    /// device's NUMA node.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_topology(
        context: &Context,
        options: PinnedOptions,
        topology: NumaTopology,
    ) -> Result<Self, CudaError> {
        let mut system = options.system.clone();
        let mut near_device = None;
        match &options.numa {
            PinnedNuma::Policy(policy) => system.numa = policy.clone(),
            PinnedNuma::NearDevice(Requirement::Off) => {
                system.numa = NumaPolicy::Local;
                near_device = Some((Requirement::Off, CapabilityStatus::NotTried));
            }
            PinnedNuma::NearDevice(requirement) => match node_of(context, &topology) {
                Some(node) => system.numa = NumaPolicy::Bind(node, *requirement),
                None => {
                    system.numa = NumaPolicy::Local;
                    let reason = Reason::Needs("sysfs to name the device's node");
                    near_device = Some((*requirement, CapabilityStatus::Refused(reason)));
                }
            },
        }
        let system = SystemAllocator::with_topology(system, topology);
        let (context, progress) = (context.clone(), Progress::default());
        let allocator = Self { context, options, system, progress: progress.clone(), near_device };
        allocator.length_of_parts(ByteCount::ZERO, ByteCount::ZERO)?;
        Ok(allocator.reporting_to(progress))
    }

    /// Returns the same allocator, whose allocations report to `progress` and can be cancelled
    /// through it.
    ///
    /// Memory is first [touched](Progress::touched), then registered. Only then is it
    /// [ready](Progress::ready), a whole region at once. A registration is a driver call without
    /// progress reports, and takes about as long as touching the memory. A region can be cancelled
    /// between its registrations. Memory that is prepared in the background is ready up to its
    /// usable prefix.
    #[must_use]
    pub fn reporting_to(self, progress: Progress) -> Self {
        let system = self.system.reporting_to(progress.clone());
        Self { system, progress, ..self }
    }

    /// The number of bytes in one registration, for `wanted` bytes of memory that is used in pieces
    /// of `unit` bytes. Pieces that are larger than a registration are split.
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

    /// Allocates one region, like [`allocate`](Allocate::allocate), but returns this crate's error.
    ///
    /// # Errors
    ///
    /// [`CudaError::HostMemory`] if the memory cannot be mapped or was cancelled;
    /// [`CudaError::Capability`] if a required capability was not granted; [`CudaError::Driver`] if
    /// the driver cannot allocate memory either; [`CudaError::ContextLost`]. After an error nothing
    /// stays mapped or registered.
    pub fn allocate_memory(&self, request: &RegionRequest) -> Result<PinnedMemory, CudaError> {
        let mut report = self.report()?;
        if request.bytes.is_zero() {
            return Ok(PinnedMemory {
                backing: Backing::Nothing,
                address: address_of_no_bytes(request.alignment.max(Alignment::PAGE)),
                length: ByteCount::ZERO,
                alias: None,
                report,
            });
        }
        let requirement = self.options.registration;
        let mut entry = None;
        if requirement == Requirement::Off {
            report.record(Capability::HostRegistration, requirement, CapabilityStatus::NotTried);
        } else {
            match self.register(request, &mut report)? {
                Ok(memory) => return Ok(memory),
                Err((reason, begun)) => {
                    report.record(
                        Capability::HostRegistration,
                        requirement,
                        CapabilityStatus::Refused(reason),
                    );
                    entry = Some(begun);
                }
            }
        }
        self.record_ignored_requests(&mut report);
        report.check()?;
        self.let_the_driver_allocate(request, report, entry)
    }

    /// The first entries of a report: the result of the request for memory near the device.
    fn report(&self) -> Result<CapabilityReport, CudaError> {
        let mut report = CapabilityReport::default();
        if let Some((requirement, status)) = &self.near_device {
            report.record(Capability::NumaBinding, *requirement, status.clone());
            report.check()?;
        }
        Ok(report)
    }

    /// Records the requests that the driver ignores when it allocates: it chooses the pages and
    /// their nodes itself.
    fn record_ignored_requests(&self, report: &mut CapabilityReport) {
        let mut record = |capability, requirement| {
            if requirement != Requirement::Off {
                let reason = Reason::Unsupported { by: "the driver's own allocation" };
                report.record(capability, requirement, CapabilityStatus::Refused(reason));
            }
        };
        let options = self.system.options();
        match &options.numa {
            NumaPolicy::Bind(_, requirement) | NumaPolicy::Interleave(_, requirement) => {
                record(Capability::NumaBinding, *requirement);
            }
            _ => {}
        }
        match options.huge_pages {
            HugePages::Transparent(requirement) => {
                record(Capability::TransparentHugePages, requirement)
            }
            HugePages::Explicit(_, requirement) => {
                record(Capability::ExplicitHugePages, requirement)
            }
            _ => {}
        }
    }

    /// Maps and registers. If the driver refuses, returns the reason and the progress so far.
    fn register(
        &self,
        request: &RegionRequest,
        report: &mut CapabilityReport,
    ) -> Result<Result<PinnedMemory, (Reason, ProgressEntry)>, CudaError> {
        let chunk = self.length_of_parts(request.unit, self.options.largest_registration)?;
        let (memory, entry) = self.system.allocate_unfinished(request).map_err(host_memory)?;
        let (Location::Host(address), length) = (memory.location(), memory.length()) else {
            let reason = Reason::Unsupported { by: "memory that is not the host's" };
            return Ok(Err((reason, entry)));
        };
        let granted = memory.capabilities();
        let (memory, check_cancelled) =
            (Arc::new(memory), |ready| self.check_cancelled(ready, length));
        // SAFETY: the span is the memory's.
        let registered = unsafe {
            Registrations::new(&self.context, memory, (address, length), chunk, check_cancelled)
        };
        let registrations = match registered {
            Ok(registrations) => registrations,
            Err(CudaError::Driver { operation, code }) => {
                return Ok(Err((Reason::Driver { operation, code: code.get() }, entry)));
            }
            Err(error) => return Err(error),
        };
        entry.finish();
        report.extend(granted.outcomes().iter().cloned());
        let requirement = self.options.registration;
        report.record(Capability::HostRegistration, requirement, CapabilityStatus::Granted);
        Ok(Ok(PinnedMemory {
            alias: registrations.device_alias(),
            backing: Backing::Registered(registrations),
            address,
            length,
            report: std::mem::take(report),
        }))
    }

    /// Returns an error if the caller has cancelled.
    fn check_cancelled(&self, ready: ByteCount, of: ByteCount) -> Result<(), CudaError> {
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
        self.check_cancelled(ByteCount::ZERO, length)?;
        let entry = entry.unwrap_or_else(|| self.progress.enter(length));
        let allocation = HostAllocation::new(&self.context, length, alignment)?;
        let address = allocation.first;
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

/// The node that is nearest to the device. On machines with only one node, firmware often does not
/// report that the device is attached to it.
fn node_of(context: &Context, topology: &NumaTopology) -> Option<NodeId> {
    let only = || match topology.nodes() {
        [only] if topology.gap().is_none() => Some(only.id),
        _ => None,
    };
    context.device().numa_node(topology).or_else(only)
}

// SAFETY: each region is a mapping or a driver allocation, made for this call.
unsafe impl Allocate for PinnedAllocator {
    type Memory = PinnedMemory;

    fn kind(&self) -> StorageKind {
        PINNED
    }

    /// Whole pages, like the limits of system memory.
    fn limits(&self) -> Limits {
        self.system.limits()
    }

    fn allocate(&self, request: &RegionRequest) -> Result<PinnedMemory, AllocateError> {
        self.allocate_memory(request).map_err(|error| {
            error.into_allocate_error(PINNED, request.bytes, None, request.label.clone())
        })
    }
}

/// A region of pinned memory, initially zeroed. Its drop stops background work, if there is any,
/// and waits for it. Then it unregisters the memory, and unmaps it.
///
/// If the driver refuses to unregister a part, all of the memory stays mapped until the process
/// ends. The part counts as one of the [`failed_drops`](Context::failed_drops), and stays in
/// [`ResourceUsage::registered`](crate::ResourceUsage::registered).
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
    Registered(Registrations),
    /// Mapped memory, with its registration complete or in progress in the background.
    Background(BackgroundMemory),
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

    /// The length in bytes of each registration except the last, which may be shorter. A copy must
    /// not cross a multiple of this length, counted from the beginning. `None` if all of the memory
    /// is one driver allocation.
    #[must_use]
    pub const fn registration_length(&self) -> Option<ByteCount> {
        match &self.backing {
            Backing::Registered(registrations) => Some(registrations.chunk_length),
            Backing::Background(background) => Some(background.step),
            Backing::Nothing | Backing::Driver { .. } => None,
        }
    }

    /// The number of bytes, counted from the first, that are now locked for the device. These are
    /// all bytes, unless the memory is still [in
    /// preparation](PinnedAllocator::allocate_in_background). A copy beyond them is correct, but as
    /// slow as with pageable memory.
    #[must_use]
    pub fn usable_prefix(&self) -> ByteCount {
        match &self.backing {
            Backing::Background(background) => background.bring_up.usable_prefix(),
            Backing::Nothing | Backing::Registered(_) | Backing::Driver { .. } => self.length,
        }
    }
}

// SAFETY: the bytes are a mapping or a driver allocation that this value alone owns. They are
// readable, writable and zeroed, and stay until the value drops, wherever it moves.
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
            Backing::Background(background) => background.device_alias(),
            Backing::Nothing | Backing::Registered(_) | Backing::Driver { .. } => self.alias,
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
        if let Backing::Background(background) = &self.backing {
            background.report_to(&mut report);
        }
        report
    }
}
