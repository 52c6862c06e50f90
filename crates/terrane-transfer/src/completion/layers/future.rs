//! Futures of layers.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::{LayerError, LayerState, LayerWaiter, SharedLayers};
use crate::sync::lock;

/// A future of the completion of layers; from [`Layers::future`](crate::Layers::future).
///
/// It is ready with an error if one of the layers will not arrive. Dropping it has no other effect.
/// A poll after it was ready returns the same result.
#[must_use = "a future does nothing unless it is polled"]
pub struct LayerFuture {
    shared: Arc<SharedLayers>,
    /// The layers that were not done at the last poll.
    layers: Range<u32>,
    /// The number of this future, unique among the futures of this transfer's layers.
    number: u64,
}

impl LayerFuture {
    pub(super) fn new(shared: &Arc<SharedLayers>, layers: Range<u32>) -> Self {
        let number = if shared.is_lost() {
            0
        } else {
            let mut state = lock(&shared.state);
            state.futures += 1;
            state.futures
        };
        Self { shared: Arc::clone(shared), layers, number }
    }
}

impl Future for LayerFuture {
    type Output = Result<(), LayerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.shared.is_lost() {
            self.shared.poll_engine();
        }
        // Cloning a waker runs foreign code, so it does not happen under the lock. The same applies
        // to dropping one: this variable is declared first, so it drops last.
        let waker = context.waker().clone();
        let Self { shared, layers, number } = &mut *self;
        if let Err(error) = shared.check(layers.clone()) {
            return Poll::Ready(Err(error));
        }
        let (index, mut state) = loop {
            let Some(layer) = layers.clone().next() else { return Poll::Ready(Ok(())) };
            let index = match shared.index(layer) {
                Ok(index) => index,
                Err(error) => return Poll::Ready(Err(error)),
            };
            if shared.is_lost() {
                return Poll::Ready(Err(LayerError::Failed { layer }));
            }
            let state = lock(&shared.state);
            match state.layer(index) {
                LayerState::Done => layers.start += 1,
                LayerState::Failed => return Poll::Ready(Err(LayerError::Failed { layer })),
                LayerState::Waiting | LayerState::Submitted(_) => break (index, state),
            }
        };
        let waiter = LayerWaiter { future: *number, index, waker };
        let replaced = match state.wakers.iter_mut().find(|entry| entry.future == *number) {
            Some(entry) => Some(std::mem::replace(entry, waiter)),
            None => {
                state.wakers.push(waiter);
                None
            }
        };
        // A waker may own a task with futures of layers. Their drop needs the lock.
        drop(state);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for LayerFuture {
    fn drop(&mut self) {
        if self.shared.is_lost() {
            return;
        }
        let mut state = lock(&self.shared.state);
        let place = state.wakers.iter().position(|entry| entry.future == self.number);
        let waiter = place.map(|place| state.wakers.swap_remove(place));
        drop(state);
        drop(waiter);
    }
}

terrane_core::debug_fields!(LayerFuture { layers });
