//! The reports of an engine about layers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::{LayerState, SharedLayers};
use crate::completion::waiter_progress::{Invitation, WaiterProgress};
use crate::engine::order::EventHandle;
use crate::sync::lock;

/// The engine's handle, which reports the state of layers. From
/// [`CopyJob::layers`](crate::CopyJob::layers).
///
/// An engine reports each layer as soon as it can. An engine that cannot distinguish layers reports
/// nothing. All of its layers are then done, or have failed, when the job ends. Ranges are clipped
/// to the layers of the transfer. A late report, such as one for a layer that is already done, has
/// no effect.
///
/// A report wakes threads and tasks that wait for the layer, and so runs foreign code. The engine
/// must not hold a lock that it also needs to end the job. It can therefore keep a clone outside
/// the lock, at the cost of a reference count. A clone reports nothing once the job has ended.
#[derive(Clone)]
pub struct LayerSignals {
    pub(super) shared: Arc<SharedLayers>,
}

impl LayerSignals {
    /// Copies of these layers have been submitted to a stream, and `event` is recorded behind the
    /// last of them. When it has completed, the bytes of the layers are at the destination.
    ///
    /// The event is kept until the job and every view of its layers have dropped. That is later
    /// than the job's end, because a caller's stream may begin to wait for the event by then. Its
    /// owner may drop on any thread.
    pub fn submitted(&self, layers: Range<u32>, event: EventHandle) {
        self.shared.set(layers, LayerState::Submitted(event.clone()), Some(event));
    }

    /// The bytes of these layers are at the destination, and visible to every thread that observes
    /// this.
    pub fn done(&self, layers: Range<u32>) {
        self.shared.set(layers, LayerState::Done, None);
    }

    pub(crate) fn invite_waiters(&self, progress: &Arc<dyn WaiterProgress>) {
        let mut state = lock(&self.shared.state);
        if !state.ended {
            let invitation = Invitation::new(progress, state.invitation.as_ref());
            let replaced = state.invitation.replace(invitation);
            drop(state);
            self.shared.changed.notify_all();
            drop(replaced);
        }
    }

    /// The transfer has ended: layers that are not final become done, or failed.
    pub(crate) fn end(&self, succeeded: bool) {
        let end = if succeeded { LayerState::Done } else { LayerState::Failed };
        self.shared.update(|state| {
            state.ended = true;
            state.invitation = None;
            state
                .layers
                .iter_mut()
                .filter(|layer| !layer.is_final())
                .for_each(|layer| layer.clone_from(&end));
        });
    }
}

impl fmt::Debug for LayerSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}
