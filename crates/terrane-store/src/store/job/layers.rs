//! The layers of a get that arrive before its end.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use terrane_core::sync::{lock, wait_until};
use terrane_transfer::{EventHandle, LayerError, LayerRange, Layers};

use crate::store::job::control::JobControl;

/// The layers of a [layer-by-layer](crate::JobOptions::layer_by_layer) get, from
/// [`Job::layers`](crate::Job::layers). Cloning it costs a reference count.
///
/// A layer has arrived when its bytes of all blocks of the job are at the destination. Compute on
/// layer 0 can then begin while layer 1 travels. Either a host thread [waits](Self::wait) for the
/// layer, or a stream of the device waits for its [events](Self::events)
/// (`Stream::wait_for_events` of `terrane-cuda`).
///
/// Layers travel one by one from tiers of memory that a copy engine reaches. All other blocks hold
/// all layers back until they are at the destination: those that come from disk, those that another
/// job writes, and those that the store copies itself. The checksum of a block from disk is verified
/// before, so no later check makes a layer that has arrived wrong.
///
/// If a block is absent, or the job fails in another way, the layers that have not arrived fail.
/// Those that have arrived stay so. The blocks stay in use until the job has ended.
#[derive(Clone)]
pub struct JobLayers {
    control: Arc<JobControl>,
}

/// Why a layer of a job will not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobLayerError {
    /// The job failed before the layer of all its blocks had arrived.
    #[error(
        "the job failed before layer {layer} of all its blocks had arrived; the job's outcome has the cause"
    )]
    Failed {
        /// The layer.
        layer: u32,
    },
    /// The blocks do not have this layer.
    #[error("layer {layer} requested, and the blocks have layers 0 to {last}; name one of these")]
    NoSuchLayer {
        /// The requested layer.
        layer: u32,
        /// The last layer of the blocks.
        last: u32,
    },
}

impl JobLayers {
    pub(crate) const fn new(control: Arc<JobControl>) -> Self {
        Self { control }
    }

    /// The layers of the blocks. Blocks in spans have one layer.
    #[must_use]
    pub fn range(&self) -> Range<u32> {
        0..self.arrivals().map_or(0, |arrivals| arrivals.count)
    }

    /// Blocks the thread until these layers have arrived: `2`, `0..4` or `..`.
    ///
    /// # Errors
    ///
    /// [`JobLayerError::NoSuchLayer`] at once, or [`JobLayerError::Failed`].
    pub fn wait(&self, layers: impl LayerRange) -> Result<(), JobLayerError> {
        self.wait_by(layers.of(self.range()), None).map(|_| ())
    }

    /// As [`wait`](Self::wait), until `deadline`. Returns whether the layers have arrived.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_until(
        &self,
        layers: impl LayerRange,
        deadline: Instant,
    ) -> Result<bool, JobLayerError> {
        self.wait_by(layers.of(self.range()), Some(deadline))
    }

    /// The events behind the copies of these layers, for a stream to wait for all of them. It is
    /// empty if they have arrived.
    ///
    /// Blocks the thread until engines have submitted the layers to streams of the device. It does
    /// not wait for these copies, but for all other blocks, which no event covers. When the events
    /// have completed, the layers have arrived, unless the device failed. Only the job's outcome
    /// reports that.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn events(&self, layers: impl LayerRange) -> Result<Vec<EventHandle>, JobLayerError> {
        self.events_by(layers.of(self.range()), None).map(Option::unwrap_or_default)
    }

    /// As [`events`](Self::events), until `deadline`; `None` if it passed first.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn events_until(
        &self,
        layers: impl LayerRange,
        deadline: Instant,
    ) -> Result<Option<Vec<EventHandle>>, JobLayerError> {
        self.events_by(layers.of(self.range()), Some(deadline))
    }

    fn wait_by(
        &self,
        layers: Range<u32>,
        deadline: Option<Instant>,
    ) -> Result<bool, JobLayerError> {
        let Some(copies) = self.copies(&layers, deadline)? else { return Ok(false) };
        for copy in &*copies {
            let arrived = match deadline {
                None => copy.wait(layers.clone()).map(|()| true),
                Some(deadline) => copy.wait_until(layers.clone(), deadline),
            };
            if !arrived.map_err(|error| failed(error, &layers))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn events_by(
        &self,
        layers: Range<u32>,
        deadline: Option<Instant>,
    ) -> Result<Option<Vec<EventHandle>>, JobLayerError> {
        let Some(copies) = self.copies(&layers, deadline)? else { return Ok(None) };
        let mut all = Vec::new();
        for copy in &*copies {
            let events = match deadline {
                None => copy.events(layers.clone()).map(Some),
                Some(deadline) => copy.events_until(layers.clone(), deadline),
            };
            let Some(events) = events.map_err(|error| failed(error, &layers))? else {
                return Ok(None);
            };
            all.extend(events);
        }
        Ok(Some(all))
    }

    /// Waits for all blocks but those that travel layer by layer, and returns the copies of these.
    /// `None` at the deadline.
    fn copies(
        &self,
        layers: &Range<u32>,
        deadline: Option<Instant>,
    ) -> Result<Option<Copies>, JobLayerError> {
        let count = self.range().end;
        if layers.is_empty() {
            return Ok(Some(Copies::default()));
        }
        if layers.end > count {
            let (layer, last) = (layers.start.max(count), count.saturating_sub(1));
            return Err(JobLayerError::NoSuchLayer { layer, last });
        }
        let failed = Err(JobLayerError::Failed { layer: layers.start });
        match self.arrivals().filter(|_| !self.control.outcome.is_lost()) {
            Some(arrivals) => arrivals.copies(deadline).or(failed),
            None => failed,
        }
    }

    fn arrivals(&self) -> Option<&LayerArrivals> {
        self.control.layers()
    }
}

impl fmt::Debug for JobLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobLayers").field("range", &self.range()).finish_non_exhaustive()
    }
}

fn failed(error: LayerError, layers: &Range<u32>) -> JobLayerError {
    match error {
        LayerError::Failed { layer } => JobLayerError::Failed { layer },
        // The copies have the layers of the blocks.
        _ => JobLayerError::Failed { layer: layers.start },
    }
}

/// The layers of copies that have begun, one value for each.
type Copies = Arc<[Layers]>;

/// The job failed before the copies of all its blocks had begun.
pub(crate) struct FailedEarly;

/// The arrival of a job's layers, in the control of the job.
pub(crate) struct LayerArrivals {
    count: u32,
    stage: Mutex<Stage>,
    /// Notified at each change of the stage to another one.
    changed: Condvar,
}

enum Stage {
    /// Some blocks have not begun to travel by layers, and are not at the destination.
    Waiting(Vec<Layers>),
    /// All blocks are at the destination, or travel with one of these copies.
    Copying(Copies),
    /// The job failed while it was waiting.
    Failed,
}

impl LayerArrivals {
    pub(crate) const fn new(count: u32) -> Self {
        let stage = Mutex::new(Stage::Waiting(Vec::new()));
        Self { count, stage, changed: Condvar::new() }
    }

    /// Adds a copy that has begun.
    pub(crate) fn add(&self, copy: Layers) {
        if let Stage::Waiting(copies) = &mut *lock(&self.stage) {
            copies.push(copy);
        }
    }

    /// All blocks that do not travel with one of the added copies are at the destination. It has no
    /// effect after a failure.
    pub(crate) fn only_copies_are_left(&self) {
        self.leave_waiting(|copies| Stage::Copying(copies.into()));
    }

    /// A block will not arrive. It has no effect once only copies are left: their layers fail
    /// themselves.
    pub(crate) fn fail(&self) {
        self.leave_waiting(|_| Stage::Failed);
    }

    fn leave_waiting(&self, next: impl FnOnce(Vec<Layers>) -> Stage) {
        let mut stage = lock(&self.stage);
        if let Stage::Waiting(copies) = &mut *stage {
            *stage = next(std::mem::take(copies));
            drop(stage);
            self.changed.notify_all();
        }
    }

    /// Waits until only copies are left. `None` at the deadline.
    fn copies(&self, deadline: Option<Instant>) -> Result<Option<Copies>, FailedEarly> {
        let mut stage = lock(&self.stage);
        loop {
            match &*stage {
                Stage::Copying(copies) => return Ok(Some(Arc::clone(copies))),
                Stage::Failed => return Err(FailedEarly),
                Stage::Waiting(_) => {}
            }
            stage = match wait_until(&self.changed, stage, deadline) {
                Ok(stage) => stage,
                Err(_) => return Ok(None),
            };
        }
    }
}
