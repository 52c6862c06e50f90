//! The reports of a simulated engine about layers.

use std::collections::BTreeMap;
use std::sync::Arc;

use terrane_core::StorageKind;
use terrane_transfer::{CopyJob, Side};

use crate::device::SimulatedStream;
use crate::random::Seeded;

/// The layers of a job that have begun and are not yet complete.
#[derive(Default)]
pub(super) struct LayerReports {
    /// By layer: the number of remaining runs, and the stream that was reported for them.
    begun: BTreeMap<u32, (usize, Option<Arc<SimulatedStream>>)>,
}

impl LayerReports {
    /// Reports that the layer of a run is on a stream, if this is its first run and a device takes
    /// part.
    pub(super) fn before(&mut self, job: &CopyJob, run: usize) {
        let (plan, Some(signals)) = (job.plan(), job.layers()) else { return };
        let layer = plan.layer(run);
        self.begun.entry(layer).or_insert_with(|| {
            let runs = (0..plan.runs().len()).filter(|&run| plan.layer(run) == layer).count();
            let ends = [Side::Source, Side::Destination].map(|side| plan.end(side).kind());
            let device = ends.into_iter().find_map(|kind| match kind {
                StorageKind::Device(device) => Some(device),
                _ => None,
            });
            let stream = device.map(|device| {
                let stream = Arc::new(SimulatedStream::new(device));
                stream.launch();
                let event = stream.record().into_handle(Arc::clone(&stream));
                signals.submitted(layer..layer + 1, event);
                stream
            });
            (runs, stream)
        });
    }

    /// After the last run of a layer, its event completes. Usually the engine reports that.
    pub(super) fn after(&mut self, job: &CopyJob, run: usize, random: &mut Seeded) {
        let (plan, Some(signals)) = (job.plan(), job.layers()) else { return };
        let layer = plan.layer(run);
        let Some((left, stream)) = self.begun.get_mut(&layer) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        if let Some(stream) = stream {
            stream.finish_one();
        }
        if !random.once_in(4) {
            signals.done(layer..layer + 1);
        }
    }
}
