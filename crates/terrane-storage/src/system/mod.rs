//! System memory: mapped and zeroed by the kernel, with the pages and nodes of a policy.

mod available;
mod background;
mod bring_up;
mod control_groups;
mod first_touch;
mod huge;
mod mapping;
mod memory;
mod options;
mod progress;
mod unmapping;

use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Capability, CapabilityReport, CapabilityStatus,
    HostAddress, Limits, OsError, Reason, RegionRequest, Requirement, StorageKind,
};

pub use available::available_memory;
pub use bring_up::{BringUp, BringUpEnded, BringUpProducer, UsablePrefix};
pub use control_groups::ControlGroupLimits;
pub use memory::SystemMemory;
pub use options::{FirstTouch, HugePageSize, HugePages, NumaPolicy, SystemOptions};
pub use progress::{Progress, ProgressEntry};

use crate::error::StorageError;
use crate::numa::{NodeId, NumaTopology};
use crate::sys;
use first_touch::{TouchOutcome, TouchThreads, touch};
pub(crate) use mapping::Mapping;
use memory::huge_bytes;
use options::GIB;

/// Allocates system memory. Each region is a separate mapping.
///
/// A process may have only a limited number of mappings: 65,530 unless `vm.max_map_count` is set
/// differently. The kernel counts neighbouring mappings with equal properties as one. Allocating
/// many regions can therefore succeed, and freeing every other region can then reach the limit. The
/// pages of such a region are still freed. Only its addresses stay reserved, until later regions
/// drop. For thousands of small regions, wrap the allocator in `terrane_pool::adaptors::Slabs`,
/// which divides large regions.
///
/// ```
/// use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
/// use terrane_storage::{HugePages, SystemAllocator, SystemOptions};
///
/// # fn main() -> Result<(), terrane_core::AllocateError> {
/// let options = SystemOptions { huge_pages: HugePages::None, ..SystemOptions::default() };
/// let allocator = SystemAllocator::new(options);
/// let memory = allocator.allocate(&RegionRequest::new(ByteCount::mib(4)).labelled("blocks"))?;
/// assert_eq!(memory.length(), ByteCount::mib(4));
/// println!("{}", memory.capabilities());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SystemAllocator {
    options: SystemOptions,
    progress: Progress,
    topology: NumaTopology,
}

impl SystemAllocator {
    /// Creates an allocator with these options. It reads the NUMA topology.
    #[must_use]
    pub fn new(options: SystemOptions) -> Self {
        Self::with_topology(options, NumaTopology::read())
    }

    /// Creates an allocator with these options and a topology that was read before.
    #[must_use]
    pub fn with_topology(options: SystemOptions, topology: NumaTopology) -> Self {
        Self { options, progress: Progress::default(), topology }
    }

    /// The same allocator, whose allocations report to `progress` and can be cancelled through it.
    #[must_use]
    pub fn reporting_to(self, progress: Progress) -> Self {
        Self { progress, ..self }
    }

    /// The options.
    #[must_use]
    pub const fn options(&self) -> &SystemOptions {
        &self.options
    }

    /// Allocates one region, as [`allocate`](Allocate::allocate) does, but with this crate's error.
    ///
    /// # Errors
    ///
    /// [`StorageError::TooStrictlyAligned`] for an alignment above 1 GiB.
    /// [`StorageError::OutOfMemory`] if the machine or a control group has too little memory left.
    /// [`StorageError::Capability`] if a required capability was not granted.
    /// [`StorageError::Cancelled`] if the progress was cancelled. [`StorageError::Memory`] if the
    /// kernel refuses for another reason. Nothing stays mapped after an error.
    pub fn allocate_memory(&self, request: &RegionRequest) -> Result<SystemMemory, StorageError> {
        let (memory, entry) = self.allocate_with(request, TouchTime::Now)?;
        entry.into_iter().for_each(ProgressEntry::finish);
        Ok(memory)
    }

    /// Like [`allocate_memory`](Self::allocate_memory), for callers that must prepare the memory
    /// further before it can be used. Touched bytes are not ready in the
    /// [progress](Self::reporting_to) until the entry is [finished](ProgressEntry::finish).
    /// Dropping the entry reverts the progress.
    ///
    /// # Errors
    ///
    /// As for [`allocate_memory`](Self::allocate_memory).
    pub fn allocate_unfinished(
        &self,
        request: &RegionRequest,
    ) -> Result<(SystemMemory, ProgressEntry), StorageError> {
        let (memory, entry) = self.allocate_with(request, TouchTime::First)?;
        Ok((memory, entry.unwrap_or_else(|| self.progress.enter(ByteCount::ZERO))))
    }

    fn allocate_with(
        &self,
        request: &RegionRequest,
        touch_time: TouchTime,
    ) -> Result<(SystemMemory, Option<ProgressEntry>), StorageError> {
        if request.alignment > GIB {
            return Err(StorageError::TooStrictlyAligned {
                requested: request.alignment,
                largest: GIB,
            });
        }
        let mut report = CapabilityReport::default();
        if request.bytes.is_zero() {
            return Ok((SystemMemory::empty(request.alignment, report), None));
        }
        let (mapping, entry) = match self.options.huge_pages {
            HugePages::Explicit(size, requirement) if requirement != Requirement::Off => {
                match self.try_explicit(request, touch_time, size, requirement, &mut report)? {
                    Some(mapped) => mapped,
                    None => {
                        let pages = Pages::Transparent(Requirement::Preferred);
                        self.allocate_on(request, touch_time, pages, &mut report)?
                    }
                }
            }
            HugePages::Transparent(requirement) if requirement != Requirement::Off => {
                self.allocate_on(request, touch_time, Pages::Transparent(requirement), &mut report)?
            }
            _ => self.allocate_on(request, touch_time, Pages::Base, &mut report)?,
        };
        report.check()?;
        tracing::debug!(label = %request.label, bytes = mapping.length(), %report, "memory is allocated");
        let memory = SystemMemory {
            address: HostAddress::new(mapping.address()),
            length: ByteCount::from_usize(mapping.length()),
            background_touch: None,
            mapping: Some(Arc::new(mapping)),
            report,
        };
        Ok((memory, entry))
    }

    /// Maps explicit huge pages. Returns `None`, with the reason in the report, if they are not
    /// available.
    fn try_explicit(
        &self,
        request: &RegionRequest,
        touch_time: TouchTime,
        size: HugePageSize,
        requirement: Requirement,
        report: &mut CapabilityReport,
    ) -> Result<Option<Mapped>, StorageError> {
        let mut own_report = CapabilityReport::default();
        // Huge pages are not reserved per node. Without this advice, a page fault on a node without free
        // huge pages kills the process with a signal.
        let mapped = if self.options.numa != NumaPolicy::Local && !sys::memory::can_populate() {
            Err(Reason::Needs("MADV_POPULATE_WRITE (Linux 5.14) to be bound to a node"))
        } else {
            match self.allocate_on(request, touch_time, Pages::Explicit(size), &mut own_report) {
                Ok(mapped) => Ok(mapped),
                Err(
                    StorageError::OutOfMemory { source: Some(error), .. }
                    | StorageError::Memory { source: error, .. },
                ) => Err(huge::explicit_refusal(size, request.bytes, error)),
                Err(other) => return Err(other),
            }
        };
        let status = CapabilityStatus::of(Some(&mapped));
        report.record(Capability::ExplicitHugePages, requirement, status);
        report.check()?;
        if mapped.is_ok() {
            report.extend(own_report.outcomes().iter().cloned());
        }
        Ok(mapped.ok())
    }

    /// Maps, binds and touches a region with one kind of pages.
    fn allocate_on(
        &self,
        request: &RegionRequest,
        touch_time: TouchTime,
        pages: Pages,
        report: &mut CapabilityReport,
    ) -> Result<Mapped, StorageError> {
        let bytes = request.bytes;
        let wants_touch = self.options.first_touch != FirstTouch::None;
        let is_touched = wants_touch && touch_time != TouchTime::Later;
        if wants_touch && !matches!(pages, Pages::Explicit(_)) {
            // If the memory ran out during the touch, the OOM killer would act and no error would
            // be returned.
            let available = available_memory();
            if available.is_some_and(|available| available < bytes) {
                return Err(StorageError::OutOfMemory {
                    requested: bytes,
                    available,
                    source: None,
                });
            }
        }
        let (alignment, huge) = match pages {
            Pages::Transparent(_) if bytes.get() >= Alignment::HUGE_PAGE.get() => {
                (request.alignment.max(Alignment::HUGE_PAGE), None)
            }
            Pages::Base | Pages::Transparent(_) => (request.alignment, None),
            Pages::Explicit(size) => (request.alignment, Some(size.alignment())),
        };
        let mapping = Mapping::new(bytes, alignment, huge);
        let mapping = mapping.map_err(|error| refusal(bytes, error))?;
        let refused = match pages {
            Pages::Explicit(_) => None,
            Pages::Base => {
                // Without transparent huge pages in the kernel, there are none to disable.
                let _ = advise_huge(&mapping, false);
                None
            }
            Pages::Transparent(_) => transparent_refusal(&mapping),
        };
        let is_bound = self.bind(&mapping, report)?;
        let length = ByteCount::from_usize(mapping.length());
        let entry = (touch_time != TouchTime::Later).then(|| self.progress.enter(length));
        if let Some(entry) = entry.as_ref().filter(|_| wants_touch) {
            let is_ready = touch_time == TouchTime::Now;
            self.touch(&mapping, pages, is_bound, (entry, is_ready), report)?;
        }
        if let Pages::Transparent(requirement) = pages {
            let status = match refused {
                Some(reason) => CapabilityStatus::Refused(reason),
                None if is_touched => huge_status(&mapping),
                None => CapabilityStatus::Granted,
            };
            report.record(Capability::TransparentHugePages, requirement, status);
        }
        Ok((mapping, entry))
    }

    /// Sets the nodes of the pages. Returns `true` if the pages are bound to one node.
    fn bind(&self, mapping: &Mapping, report: &mut CapabilityReport) -> Result<bool, StorageError> {
        let (placement, nodes, requirement) = match &self.options.numa {
            NumaPolicy::Local => return Ok(false),
            NumaPolicy::Bind(node, requirement) => {
                (sys::memory::Placement::Bind, vec![node.get()], *requirement)
            }
            NumaPolicy::Interleave(nodes, requirement) => {
                let nodes = nodes.iter().copied().map(NodeId::get).collect();
                (sys::memory::Placement::Interleave, nodes, *requirement)
            }
        };
        if requirement == Requirement::Off {
            report.record(Capability::NumaBinding, requirement, CapabilityStatus::NotTried);
            return Ok(false);
        }
        // SAFETY: the range is the whole mapping.
        let result =
            unsafe { sys::memory::bind(mapping.address(), mapping.length(), placement, &nodes) };
        let result = result.map_err(Reason::Os);
        report.record(Capability::NumaBinding, requirement, CapabilityStatus::of(Some(&result)));
        report.check()?;
        Ok(result.is_ok() && placement == sys::memory::Placement::Bind)
    }

    /// Touches the pages. Records the threads and CPUs in the report, and the touched bytes in the
    /// progress. `is_ready` states whether touched bytes are ready.
    fn touch(
        &self,
        mapping: &Mapping,
        pages: Pages,
        is_bound: bool,
        (entry, is_ready): (&ProgressEntry, bool),
        report: &mut CapabilityReport,
    ) -> Result<(), StorageError> {
        let threads = self.touch_threads(is_bound);
        let page = match pages {
            Pages::Explicit(size) => size.alignment(),
            _ => sys::memory::page_size(),
        };
        let length = ByteCount::from_usize(mapping.length());
        if self.progress.is_cancelled() {
            return Err(StorageError::Cancelled { ready: ByteCount::ZERO, of: length });
        }
        let advance = |bytes| {
            if is_ready {
                entry.touched_and_ready(bytes);
            } else {
                entry.touched(bytes);
            }
            !self.progress.is_cancelled()
        };
        let touched = touch(mapping, page, threads, &advance);
        check_touched(&touched, length, threads, report)
    }

    /// The threads that touch and their CPUs, depending on whether the memory is bound to a node.
    fn touch_threads(&self, is_bound: bool) -> TouchThreads<'_> {
        let cpus = match self.options.numa {
            NumaPolicy::Bind(node, _) if is_bound => {
                self.topology.nearest_with_cpus(node).first().map(|node| node.cpus.as_slice())
            }
            _ => None,
        };
        let count = match self.options.first_touch {
            FirstTouch::Threads(threads) => threads.get(),
            // A container may have fewer CPUs than the node.
            _ => std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(cpus.map_or(usize::MAX, <[u32]>::len)),
        };
        TouchThreads { count, cpus }
    }
}

/// Records in the report how the pages were touched, unless some were not.
fn check_touched(
    touched: &TouchOutcome,
    length: ByteCount,
    threads: TouchThreads<'_>,
    report: &mut CapabilityReport,
) -> Result<(), StorageError> {
    if touched.bytes < length {
        return Err(match touched.failure {
            Some(error) => refusal(length, error),
            None => StorageError::Cancelled { ready: touched.bytes, of: length },
        });
    }
    for (was_tried, capability, refusal) in [
        (threads.count > 1, Capability::ParallelFirstTouch, touched.thread_refusal),
        (threads.cpus.is_some(), Capability::ThreadAffinity, touched.affinity_refusal),
    ] {
        if was_tried {
            let attempt = refusal.map_or(Ok(()), |error| Err(Reason::Os(error)));
            let status = CapabilityStatus::of(Some(&attempt));
            report.record(capability, Requirement::Preferred, status);
        }
    }
    Ok(())
}

// SAFETY: each region is a separate mapping, and no other code refers to it.
unsafe impl Allocate for SystemAllocator {
    type Memory = SystemMemory;

    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    /// Whole pages: explicit huge pages if they are required, otherwise base pages. If explicit
    /// huge pages are preferred and granted, lengths are rounded up to whole huge pages.
    fn limits(&self) -> Limits {
        let page = match self.options.huge_pages {
            HugePages::Explicit(size, Requirement::Required) => size.alignment(),
            _ => sys::memory::page_size(),
        };
        Limits { alignment: page, granule: page, largest_region: None }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<SystemMemory, AllocateError> {
        self.allocate_memory(request).map_err(|error| {
            let label = request.label.clone();
            error.into_allocate_error(StorageKind::System, request.bytes, label)
        })
    }
}

/// Memory, and its entry in the progress; `None` if its pages are touched later.
type Mapped = (Mapping, Option<ProgressEntry>);

/// When pages are touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TouchTime {
    /// Now. Touched bytes are ready, because no further step follows.
    Now,
    /// Now, before a further step.
    First,
    Later,
}

/// A kind of pages.
#[derive(Clone, Copy, Debug)]
enum Pages {
    Base,
    Transparent(Requirement),
    Explicit(HugePageSize),
}

fn refusal(requested: ByteCount, error: OsError) -> StorageError {
    match error.code {
        libc::ENOMEM | libc::EFAULT | libc::EAGAIN => StorageError::OutOfMemory {
            requested,
            available: available_memory(),
            source: Some(error),
        },
        _ => StorageError::Memory { requested, source: error },
    }
}

fn advise_huge(mapping: &Mapping, wanted: bool) -> Result<(), OsError> {
    // SAFETY: the range is the whole mapping.
    unsafe { sys::memory::advise_huge(mapping.address(), mapping.length(), wanted) }
}

fn transparent_refusal(mapping: &Mapping) -> Option<Reason> {
    if huge::largest_huge_part(ByteCount::from_usize(mapping.length())).is_zero() {
        return Some(Reason::Needs("a region of 2 MiB or more"));
    }
    huge::transparent_refusal().or_else(|| advise_huge(mapping, true).err().map(Reason::Os))
}

/// Reports how much of a touched mapping the kernel assembled into huge pages.
fn huge_status(mapping: &Mapping) -> CapabilityStatus {
    let of = huge::largest_huge_part(ByteCount::from_usize(mapping.length()));
    match huge_bytes(mapping) {
        Ok(granted) if granted >= of => CapabilityStatus::Granted,
        Ok(granted) => CapabilityStatus::Partial { granted, of },
        Err(error) => CapabilityStatus::Refused(Reason::Os(error)),
    }
}
