//! The progress of a job.

use std::sync::{Arc, Mutex};

use terrane_core::ByteCount;
use terrane_core::sync::lock;
use terrane_transfer::{CopyJob, CopyProgress};

/// The progress of a job. Several threads report it, and it ends at all of the job's bytes.
#[derive(Debug)]
pub(crate) struct JobProgress {
    progress: Arc<CopyProgress>,
    /// The bytes of the whole job. Parts that are copied twice count once.
    all: u64,
    /// `None` once the job has ended.
    counted: Mutex<Option<u64>>,
}

impl JobProgress {
    pub(crate) fn new(job: &CopyJob) -> Arc<Self> {
        let (progress, all) = (Arc::clone(job.progress()), job.plan().bytes().get());
        Arc::new(Self { progress, all, counted: Mutex::new(Some(0)) })
    }

    pub(crate) fn add(&self, bytes: u64) {
        let mut counted = lock(&self.counted);
        if let Some(so_far) = &mut *counted {
            let bytes = bytes.min(self.all - *so_far);
            *so_far += bytes;
            self.progress.add(ByteCount::new(bytes));
        }
    }

    pub(crate) fn complete(&self) {
        let mut counted = lock(&self.counted);
        if let Some(so_far) = counted.take() {
            self.progress.add(ByteCount::new(self.all - so_far));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_copied_twice_count_once() {
        let progress = Arc::new(CopyProgress::default());
        let counted = Mutex::new(Some(0));
        let count = JobProgress { progress: Arc::clone(&progress), all: 100, counted };
        count.add(60);
        count.add(60);
        assert_eq!(progress.copied(), ByteCount::new(100));
        count.complete();
        count.add(60);
        assert_eq!(progress.copied(), ByteCount::new(100));
    }
}
