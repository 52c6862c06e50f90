//! System memory that is handed out first and touched after.

use std::thread::JoinHandle;

use terrane_core::{
    ByteCount, Capability, CapabilityReport, Grant, Memory, OsError, Reason, RegionRequest, Wish,
};

use super::bring_up::{BringUp, Raising};
use super::first_touch::touch_from_the_front;
use super::mapping::Mapping;
use super::{FirstTouch, HugePages, SystemAllocator, SystemMemory, Touching, refusal};
use crate::error::StorageError;
use crate::sys;

/// How often a bring-up in the background says that more is usable.
const STEP: ByteCount = ByteCount::mib(64);

impl SystemAllocator {
    /// Maps a region, with its pages and nodes as the options say, and touches none of it: pages
    /// come up as they are used, or by [`touch_from_the_front`](Self::touch_from_the_front).
    ///
    /// # Errors
    ///
    /// As for [`bring_up`](Self::bring_up).
    pub fn map(&self, request: &RegionRequest) -> Result<SystemMemory, StorageError> {
        Ok(self.bring_up_when(request, Touching::Later)?.0)
    }

    /// Touches memory that [`map`](Self::map) made, from the first byte on, with the threads that
    /// the options say, and answers with how that went. The memory may be in use: its bytes stay
    /// as they are.
    ///
    /// Each time that the bytes up to one more multiple of `step`, or to the end, have been
    /// touched, `reached` is called with their number on this thread, while the others go on.
    /// Where pages are not to be touched ([`FirstTouch::None`]), or the kernel knows no way that
    /// leaves the bytes alone, it is called for every step, and pages come up as they are used.
    ///
    /// In the allocator's [progress](Self::reporting_to), what `raising` calls usable is ready,
    /// and all of it once that is complete; if it ends otherwise, the bring-up is taken back.
    ///
    /// # Errors
    ///
    /// [`StorageError::OutOfMemory`] or [`StorageError::Memory`] if the kernel gives no pages,
    /// [`StorageError::Cancelled`] if `raising` or the allocator's progress is cancelled.
    pub fn touch_from_the_front<E: Send + Sync>(
        &self,
        memory: &SystemMemory,
        step: ByteCount,
        raising: &Raising<E>,
        reached: impl FnMut(ByteCount),
    ) -> Result<CapabilityReport, StorageError> {
        match &memory.mapping {
            Some(mapping) => self.touch_mapping(mapping, &memory.report, step, raising, reached),
            None => Ok(CapabilityReport::default()),
        }
    }

    /// Maps a region and hands it out at once, to be used while a thread touches it from the
    /// front. All of it may be used from the start, as pages come up as they are used; what the
    /// [`BringUp`] calls usable costs no such wait any more.
    ///
    /// The memory joins the thread when it drops, after having stopped it.
    ///
    /// # Errors
    ///
    /// As for [`bring_up`](Self::bring_up), and [`StorageError::Thread`]. What goes wrong later is
    /// in the [`BringUp`].
    pub fn bring_up_in_background(
        &self,
        request: &RegionRequest,
    ) -> Result<(SystemMemory, BringUp), StorageError> {
        let mut memory = self.map(request)?;
        let Some(mapping) = memory.mapping.clone() else {
            return Ok((memory, BringUp::complete(ByteCount::ZERO)));
        };
        let (bring_up, raising) = BringUp::new(memory.length());
        let (allocator, report) = (self.clone(), memory.report.clone());
        let run = move || {
            let reached = |prefix| raising.usable(prefix);
            match allocator.touch_mapping(&mapping, &report, STEP, &raising, reached) {
                Ok(_) => raising.complete(),
                // Dropped, it says so.
                Err(StorageError::Cancelled { .. }) => {}
                Err(error) => raising.fail(error),
            }
        };
        let thread =
            std::thread::Builder::new().name("terrane-touch".to_owned()).spawn(run).map_err(
                |error| StorageError::Thread { source: OsError::from_io("pthread_create", &error) },
            )?;
        memory.toucher = Some(Toucher { bring_up: bring_up.clone(), thread: Some(thread) });
        Ok((memory, bring_up))
    }

    fn touch_mapping<E: Send + Sync>(
        &self,
        mapping: &Mapping,
        mapped: &CapabilityReport,
        step: ByteCount,
        raising: &Raising<E>,
        mut reached: impl FnMut(ByteCount),
    ) -> Result<CapabilityReport, StorageError> {
        let mut report = CapabilityReport::default();
        let length = ByteCount::from_usize(mapping.length());
        let is_cancelled = || raising.is_cancelled() || self.progress.is_cancelled();
        if is_cancelled() {
            return Err(StorageError::Cancelled { ready: ByteCount::ZERO, of: length });
        }
        let entry = raising.enter(&self.progress);
        let wants_touch = self.options.first_touch != FirstTouch::None;
        if !wants_touch || !sys::memory::can_populate() {
            if wants_touch {
                let reason = Reason::Needs("MADV_POPULATE_WRITE (Linux 5.14)");
                let refused = Grant::Refused(reason);
                report.record(Capability::ParallelFirstTouch, Wish::Preferred, refused);
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
        let is_bound = mapped.grant(&Capability::NumaBinding) == Some(&Grant::Granted);
        let crew = self.crew_of(is_bound);
        let page = match self.options.huge_pages {
            HugePages::Explicit(size, _)
                if mapped.grant(&Capability::ExplicitHugePages) == Some(&Grant::Granted) =>
            {
                size.alignment()
            }
            _ => sys::memory::page_size(),
        };
        let advance = |bytes| {
            entry.touched(bytes);
            raising.touched(bytes);
            !is_cancelled()
        };
        let touched = touch_from_the_front(mapping, page, crew, step, &advance, &mut reached);
        if touched.bytes < length {
            return Err(match touched.failure {
                Some(error) => refusal(length, error),
                None => StorageError::Cancelled { ready: touched.bytes, of: length },
            });
        }
        self.report_crew(crew, &touched, &mut report);
        Ok(report)
    }
}

/// The thread that touches a region, stopped and joined when it drops.
#[derive(Debug)]
pub(super) struct Toucher {
    bring_up: BringUp,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Toucher {
    fn drop(&mut self) {
        self.bring_up.cancel();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // Not where a waker that the thread itself called drops the memory: it ends by itself.
            // What it panicked with was reported by the panic; the bring-up has ended.
            let _ = thread.join();
        }
    }
}
