//! The state of each layer of a transfer, before the whole transfer has ended.

mod future;
pub(crate) mod range;
mod signals;

pub use future::LayerFuture;
pub use signals::LayerSignals;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use terrane_core::OwnerProcess;
use terrane_core::convert::to_usize;

use crate::completion::layers::range::LayerRange;
use crate::completion::waiter_progress::{self, Invitation, WaiterPolling};
use crate::engine::order::EventHandle;
use crate::hazard::notify::catch_foreign_panic;
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait_at_most};

/// The caller's view of the layers of a transfer in flight, from
/// [`Completion::layers`](crate::Completion::layers). Cloning it costs a reference count.
///
/// Compute on layer 0 can begin while layer 1 travels. Either its stream waits for the layer's
/// [`event`](Self::event) (`Stream::wait_for_layers` of `terrane-cuda`), or a host thread waits for
/// the layer. A layer that is done stays done, even if others fail. Its blocks stay claimed until
/// the whole transfer has ended.
///
/// Layers are numbered as in the layout and in [`Transfer::layers`](crate::Transfer::layers). In a
/// process that was forked from the transfer's, every layer has failed.
///
/// Layers can be done in any order. An engine may report several together, or all at the end.
#[derive(Clone)]
pub struct Layers {
    shared: Arc<SharedLayers>,
    spin: Duration,
}

/// The state of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerState {
    /// The engine has reported nothing yet.
    Waiting,
    /// Its copies are on a device stream, and this event is recorded behind them.
    Submitted(EventHandle),
    /// Its bytes are at the destination.
    Done,
    /// The transfer ended with an error before the layer was done.
    Failed,
}

/// Why a layer will not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The transfer failed before the layer was done. The completion's outcome has the reason.
    #[error(
        "the transfer failed before layer {layer} was done; the outcome of its completion has the cause"
    )]
    Failed {
        /// The layer.
        layer: u32,
    },
    /// The transfer does not move this layer.
    #[error(
        "layer {layer} requested, and the transfer copies layers {first} to {last}; name one of these"
    )]
    NotTransferred {
        /// The requested layer.
        layer: u32,
        /// The first layer of the transfer.
        first: u32,
        /// The last layer of the transfer.
        last: u32,
    },
}

impl Layers {
    /// The layers of the transfer.
    #[must_use]
    pub fn range(&self) -> Range<u32> {
        self.shared.range.clone()
    }

    /// The state of a layer.
    ///
    /// # Errors
    ///
    /// [`LayerError::NotTransferred`].
    pub fn state(&self, layer: u32) -> Result<LayerState, LayerError> {
        let index = self.shared.index(layer)?;
        if self.shared.is_lost() {
            return Ok(LayerState::Failed);
        }
        self.shared.poll_engine();
        Ok(lock(&self.shared.state).layer(index))
    }

    /// Whether the bytes of these layers are at the destination; `false` if one of them is not
    /// transferred.
    #[must_use]
    pub fn is_done(&self, layers: impl LayerRange) -> bool {
        let mut layers = layers.of(self.range());
        layers.all(|layer| self.state(layer) == Ok(LayerState::Done))
    }

    /// The event behind the copies of a layer, for a stream to wait for; `None` if the layer is
    /// done. Blocks the thread until the engine has submitted the layer to a stream, that is, until
    /// the transfer has started. If the engine does not use streams, it blocks until the layer is
    /// done.
    ///
    /// When the event has completed, the bytes are at the destination, unless the device failed;
    /// only the transfer's outcome reports that. The handle owns the event, and may be used after
    /// the transfer has ended.
    ///
    /// # Errors
    ///
    /// [`LayerError`], if the layer will not arrive.
    pub fn event(&self, layer: u32) -> Result<Option<EventHandle>, LayerError> {
        self.wait_for(layer, None, LayerState::has_begun).map(|state| state?.event())
    }

    /// The events behind the copies of these layers, for a stream to wait for all of them, as for
    /// [`event`](Self::event). Layers that are done have none, and layers that share an event add
    /// it once.
    ///
    /// # Errors
    ///
    /// [`LayerError::NotTransferred`] at once, or [`LayerError::Failed`] of the first layer that
    /// will not arrive.
    pub fn events(&self, layers: impl LayerRange) -> Result<Vec<EventHandle>, LayerError> {
        self.events_by(layers, None).map(Option::unwrap_or_default)
    }

    /// As [`events`](Self::events), until `deadline`; `None` if it passed first.
    ///
    /// # Errors
    ///
    /// As [`events`](Self::events).
    pub fn events_until(
        &self,
        layers: impl LayerRange,
        deadline: Instant,
    ) -> Result<Option<Vec<EventHandle>>, LayerError> {
        self.events_by(layers, Some(deadline))
    }

    fn events_by(
        &self,
        layers: impl LayerRange,
        deadline: Option<Instant>,
    ) -> Result<Option<Vec<EventHandle>>, LayerError> {
        let mut events = Vec::new();
        for layer in self.shared.check(layers.of(self.range()))? {
            let state = self.wait_for(layer, deadline, LayerState::has_begun)?;
            let Some(state) = state else { return Ok(None) };
            events.extend(state.event().filter(|event| !events.contains(event)));
        }
        Ok(Some(events))
    }

    /// Blocks the thread until the bytes of these layers are at the destination.
    ///
    /// ```
    /// # use terrane_transfer::{LayerError, Layers};
    /// # fn example(layers: &Layers) -> Result<(), LayerError> {
    /// layers.wait(0)?;
    /// layers.wait(1..4)?;
    /// layers.wait(..)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LayerError::NotTransferred`] at once, or [`LayerError::Failed`] of the first layer that
    /// will not arrive.
    pub fn wait(&self, layers: impl LayerRange) -> Result<(), LayerError> {
        self.wait_by(layers, None).map(|_| ())
    }

    /// As [`wait`](Self::wait), until `deadline`. Returns whether the layers are done.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_until(
        &self,
        layers: impl LayerRange,
        deadline: Instant,
    ) -> Result<bool, LayerError> {
        self.wait_by(layers, Some(deadline))
    }

    fn wait_by(
        &self,
        layers: impl LayerRange,
        deadline: Option<Instant>,
    ) -> Result<bool, LayerError> {
        for layer in self.shared.check(layers.of(self.range()))? {
            if self.wait_for(layer, deadline, LayerState::is_final)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A future that is ready when these layers are done, for any runtime.
    pub fn future(&self, layers: impl LayerRange) -> LayerFuture {
        LayerFuture::new(&self.shared, layers.of(self.range()))
    }

    /// Waits until `enough` is true of the layer, and polls the engine meanwhile. Returns `None` at
    /// the deadline. Fails if the layer has failed.
    fn wait_for(
        &self,
        layer: u32,
        deadline: Option<Instant>,
        enough: impl Fn(&LayerState) -> bool,
    ) -> Result<Option<LayerState>, LayerError> {
        let index = self.shared.index(layer)?;
        if self.shared.is_lost() {
            return Err(LayerError::Failed { layer });
        }
        let mut polling = match deadline {
            None => WaiterPolling::blocking(self.spin),
            Some(_) => WaiterPolling::new(self.spin),
        };
        let mut state = lock(&self.shared.state);
        loop {
            match state.layer(index) {
                LayerState::Failed => return Err(LayerError::Failed { layer }),
                found if enough(&found) => return Ok(Some(found)),
                _ => {}
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            match &state.invitation {
                Some(invitation) if polling.continues(invitation) => {
                    let invitation = invitation.clone();
                    drop(state);
                    polling.poll(&invitation);
                    state = lock(&self.shared.state);
                }
                _ => {
                    let most = polling.sleep_limit().into_iter().chain(left).min();
                    state = wait_at_most(&self.shared.changed, state, most);
                }
            }
        }
    }
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl LayerState {
    fn is_final(&self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }

    fn has_begun(&self) -> bool {
        *self != Self::Waiting
    }

    fn event(self) -> Option<EventHandle> {
        match self {
            Self::Submitted(event) => Some(event),
            Self::Waiting | Self::Done | Self::Failed => None,
        }
    }
}

/// Creates both ends of the layers of a new transfer.
pub(crate) fn pair(range: Range<u32>, spin: Duration) -> (Layers, LayerSignals) {
    let state = LayersState {
        layers: range.clone().map(|_| LayerState::Waiting).collect(),
        events: Vec::new(),
        invitation: None,
        wakers: Vec::new(),
        futures: 0,
        ended: false,
    };
    let (owner, state, changed) = (OwnerProcess::current(), Mutex::new(state), Condvar::new());
    let shared = Arc::new(SharedLayers { owner, range, state, changed });
    (Layers { shared: Arc::clone(&shared), spin }, LayerSignals { shared })
}

/// State shared by the two ends.
struct SharedLayers {
    owner: OwnerProcess,
    range: Range<u32>,
    state: Mutex<LayersState>,
    changed: Condvar,
}

struct LayersState {
    layers: Box<[LayerState]>,
    /// All reported events. They are kept, so that no change of a layer drops the last clone of an
    /// event under the lock.
    events: Vec<EventHandle>,
    invitation: Option<Invitation>,
    wakers: Vec<LayerWaiter>,
    /// The number of futures so far.
    futures: u64,
    ended: bool,
}

struct LayerWaiter {
    future: u64,
    index: usize,
    waker: Waker,
}

impl LayersState {
    fn layer(&self, index: usize) -> LayerState {
        // Indices come from `SharedLayers::index`.
        self.layers.get(index).cloned().unwrap_or(LayerState::Failed)
    }
}

impl SharedLayers {
    /// Returns the layers if all of them are transferred.
    fn check(&self, layers: Range<u32>) -> Result<Range<u32>, LayerError> {
        if !layers.is_empty() {
            self.index(layers.start)?;
            // The first layer that the transfer does not copy, if there is one.
            self.index((layers.end - 1).min(self.range.end))?;
        }
        Ok(layers)
    }

    fn index(&self, layer: u32) -> Result<usize, LayerError> {
        if self.range.contains(&layer) {
            Ok(to_usize((layer - self.range.start).into()))
        } else {
            let (first, last) = (self.range.start, self.range.end.saturating_sub(1));
            Err(LayerError::NotTransferred { layer, first, last })
        }
    }

    /// Whether this process was forked from the transfer's process. If so, the state must not be
    /// locked: a thread of the parent may hold the lock.
    fn is_lost(&self) -> bool {
        !self.owner.is_current()
    }

    fn poll_engine(&self) {
        let invitation = lock(&self.state).invitation.clone();
        if let Some(invitation) = invitation {
            waiter_progress::poll(&invitation);
        }
    }

    fn set(&self, layers: Range<u32>, to: LayerState, event: Option<EventHandle>) {
        let layers = layers.start.max(self.range.start)..layers.end.min(self.range.end);
        let Ok(first) = self.index(layers.start) else { return };
        self.update(|state| {
            let slots = state.layers.iter_mut().skip(first).take(layers.len());
            slots.filter(|layer| !layer.is_final()).for_each(|layer| layer.clone_from(&to));
            state.events.extend(event);
        });
    }

    /// Changes the state, and wakes waiters of layers that are now final.
    fn update(&self, change: impl FnOnce(&mut LayersState)) {
        if self.is_lost() {
            return;
        }
        let mut state = lock(&self.state);
        change(&mut state);
        let woken = take_wakers(&mut state);
        drop(state);
        self.changed.notify_all();
        woken.into_iter().for_each(|waiter| catch_foreign_panic(|| waiter.waker.wake()));
    }
}

/// Takes the waiters of layers that are final.
fn take_wakers(state: &mut MutexGuard<'_, LayersState>) -> Vec<LayerWaiter> {
    let LayersState { layers, wakers, .. } = &mut **state;
    let is_final = |waiter: &mut LayerWaiter| layers.get(waiter.index).is_none_or(|l| l.is_final());
    wakers.extract_if(.., is_final).collect()
}

impl fmt::Debug for SharedLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Layers");
        text.field("range", &self.range);
        if !self.is_lost() {
            // A copy, because the writer is foreign code.
            let layers = lock(&self.state).layers.clone();
            text.field("layers", &layers);
        }
        text.finish_non_exhaustive()
    }
}
