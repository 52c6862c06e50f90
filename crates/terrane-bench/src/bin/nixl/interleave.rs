//! Interleaved calls of the sides that are compared.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use terrane_bench::{Settings, Spread};

use crate::agents::First;

/// A call that returns its measured time. Its other work is not measured.
pub type Turn<'a> = &'a mut dyn FnMut() -> Result<Duration>;

/// Returns the medians of these calls in seconds. Rounds alternate between the order of the calls
/// and the reverse order.
pub fn interleaved<const N: usize>(
    settings: &Settings,
    first: First,
    mut calls: [Turn<'_>; N],
) -> Result<[f64; N]> {
    let mut seconds = [const { Vec::new() }; N];
    for round in 0..settings.warm_up + settings.repeats.max(1) {
        let mut take = |(call, seconds): (&mut Turn<'_>, &mut Vec<f64>)| {
            let taken = call()?.as_secs_f64();
            if round >= settings.warm_up {
                seconds.push(taken);
            }
            Ok::<_, anyhow::Error>(())
        };
        let mut turns = calls.iter_mut().zip(&mut seconds);
        match first {
            First::Terrane => turns.try_for_each(&mut take)?,
            First::Bindings => turns.rev().try_for_each(&mut take)?,
        }
    }
    let mut medians = [f64::NAN; N];
    for (median, seconds) in medians.iter_mut().zip(&seconds) {
        *median = Spread::of(seconds).context("there is a round")?.median;
    }
    Ok(medians)
}

/// The result of a call, and its time.
pub fn timed<T>(call: impl FnOnce() -> Result<T>) -> Result<(Duration, T)> {
    let started = Instant::now();
    let given = call()?;
    Ok((started.elapsed(), given))
}
