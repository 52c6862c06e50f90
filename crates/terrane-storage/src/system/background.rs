//! System memory that is returned first and touched later.

use std::mem::ManuallyDrop;
use std::thread::JoinHandle;

use terrane_core::{
    ByteCount, Capability, CapabilityReport, CapabilityStatus, Memory, OsError, OwnerProcess,
    Reason, RegionRequest, Requirement,
};

use super::bring_up::{BringUp, BringUpProducer};
use super::first_touch::touch_from_the_front;
use super::mapping::Mapping;
use super::{FirstTouch, HugePages, SystemAllocator, SystemMemory, TouchTime, check_touched};
use crate::error::StorageError;
use crate::sys;

/// The interval at which a background bring-up reports more usable bytes.
const STEP: ByteCount = ByteCount::mib(64);

impl SystemAllocator {
    /// Maps a region, with the pages and nodes from the options, and touches none of it. Pages are
    /// allocated on first use, or by [`touch_from_the_front`](Self::touch_from_the_front).
    ///
    /// # Errors
    ///
    /// As for [`allocate_memory`](Self::allocate_memory).
    pub fn allocate_untouched(
        &self,
        request: &RegionRequest,
    ) -> Result<SystemMemory, StorageError> {
        Ok(self.allocate_with(request, TouchTime::Later)?.0)
    }

    /// Touches memory from [`allocate_untouched`](Self::allocate_untouched), from the first byte
    /// on, with the number of threads from the options. Returns a report of the capabilities. The
    /// memory may be in use: touching does not change its bytes.
    ///
    /// Each time that another `step` bytes from the beginning, or all bytes, have been touched,
    /// this thread calls `reached` with their number. The other threads continue meanwhile. If the
    /// options disable touching ([`FirstTouch::None`]), or the kernel cannot populate pages without
    /// changing bytes, `reached` is called for every step. Pages are then allocated on first use.
    ///
    /// In the allocator's [progress](Self::reporting_to), the usable bytes of `producer` count as
    /// ready. All bytes are ready once it is complete. If it ends in another way, the progress is
    /// reverted.
    ///
    /// # Errors
    ///
    /// [`StorageError::OutOfMemory`] or [`StorageError::Memory`] if the kernel has no pages.
    /// [`StorageError::Cancelled`] if `producer` or the allocator's progress is cancelled.
    pub fn touch_from_the_front<E: Send + Sync>(
        &self,
        memory: &SystemMemory,
        step: ByteCount,
        producer: &BringUpProducer<E>,
        reached: impl FnMut(ByteCount),
    ) -> Result<CapabilityReport, StorageError> {
        match &memory.mapping {
            Some(mapping) => self.touch_mapping(mapping, &memory.report, step, producer, reached),
            None => Ok(CapabilityReport::default()),
        }
    }

    /// Maps a region and returns it at once. A background thread touches it from the front. All of
    /// the region may be used from the start: pages that are not touched yet are allocated on first
    /// use. The usable bytes of the [`BringUp`] have their pages already.
    ///
    /// When the memory drops, it stops and joins the thread.
    ///
    /// # Errors
    ///
    /// As for [`allocate_memory`](Self::allocate_memory), and [`StorageError::Thread`]. The
    /// [`BringUp`] has later errors.
    pub fn allocate_in_background(
        &self,
        request: &RegionRequest,
    ) -> Result<(SystemMemory, BringUp), StorageError> {
        let mut memory = self.allocate_untouched(request)?;
        let Some(mapping) = memory.mapping.clone() else {
            return Ok((memory, BringUp::complete(ByteCount::ZERO)));
        };
        let (bring_up, producer) = BringUp::new(memory.length());
        let (allocator, report) = (self.clone(), memory.report.clone());
        let run = move || {
            let reached = |prefix| producer.usable(prefix);
            match allocator.touch_mapping(&mapping, &report, STEP, &producer, reached) {
                Ok(_) => producer.complete(),
                // Dropping `producer` reports the cancellation.
                Err(StorageError::Cancelled { .. }) => {}
                Err(error) => producer.fail(error),
            }
        };
        let thread =
            std::thread::Builder::new().name("terrane-touch".to_owned()).spawn(run).map_err(
                |error| StorageError::Thread { source: OsError::from_io("pthread_create", &error) },
            )?;
        let owner = OwnerProcess::current();
        memory.background_touch =
            Some(BackgroundTouch { bring_up: bring_up.clone(), thread: Some(thread), owner });
        Ok((memory, bring_up))
    }

    fn touch_mapping<E: Send + Sync>(
        &self,
        mapping: &Mapping,
        mapped: &CapabilityReport,
        step: ByteCount,
        producer: &BringUpProducer<E>,
        mut reached: impl FnMut(ByteCount),
    ) -> Result<CapabilityReport, StorageError> {
        let mut report = CapabilityReport::default();
        let length = ByteCount::from_usize(mapping.length());
        let is_cancelled = || producer.is_cancelled() || self.progress.is_cancelled();
        if is_cancelled() {
            return Err(StorageError::Cancelled { ready: ByteCount::ZERO, of: length });
        }
        let entry = producer.enter(&self.progress);
        let wants_touch = self.options.first_touch != FirstTouch::None;
        if !wants_touch || !sys::memory::can_populate() {
            if wants_touch {
                let reason = Reason::Needs("MADV_POPULATE_WRITE (Linux 5.14)");
                let refused = CapabilityStatus::Refused(reason);
                report.record(Capability::ParallelFirstTouch, Requirement::Preferred, refused);
            }
            let mut prefix = ByteCount::ZERO;
            while prefix < length {
                if is_cancelled() {
                    return Err(StorageError::Cancelled { ready: prefix, of: length });
                }
                let before = prefix;
                prefix = prefix.checked_add(step.max(ByteCount::new(1)))?.min(length);
                entry.touched(ByteCount::new(prefix.get() - before.get()));
                reached(prefix);
            }
            return Ok(report);
        }
        let is_bound = mapped.status(&Capability::NumaBinding) == Some(&CapabilityStatus::Granted);
        let threads = self.touch_threads(is_bound);
        let page = match self.options.huge_pages {
            HugePages::Explicit(size, _)
                if mapped.status(&Capability::ExplicitHugePages)
                    == Some(&CapabilityStatus::Granted) =>
            {
                size.alignment()
            }
            _ => sys::memory::page_size(),
        };
        let advance = |bytes| {
            entry.touched(bytes);
            producer.touched(bytes);
            !is_cancelled()
        };
        let touched = touch_from_the_front(mapping, page, threads, step, &advance, &mut reached);
        check_touched(&touched, length, threads, &mut report)?;
        Ok(report)
    }
}

/// The thread that touches a region. The drop stops and joins it, in the process that started it.
#[derive(Debug)]
pub(super) struct BackgroundTouch {
    bring_up: BringUp,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
}

impl Drop for BackgroundTouch {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // The thread does not exist here, and its locks may stay locked.
            let _left = ManuallyDrop::new(self.thread.take());
            return;
        }
        self.bring_up.cancel();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A waker that this thread calls may drop the memory. The thread cannot join itself,
            // and exits on its own. A panic of the thread has been reported already, and the
            // bring-up has ended.
            let _ = thread.join();
        }
    }
}
