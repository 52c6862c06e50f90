//! Which agents a case is measured with: set up alike on both sides, and several sets of them.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use terrane_bench::Spread;

/// How the agents of both sides are set up, and how many sets of them there are.
///
/// NIXL's threads share locks with those that transfer, and processors with one another. Where they come
/// to lie decides over a tenth of a transfer's time, for as long as the agents live. So each case is
/// measured with several sets of agents, and of the medians of those the median counts.
#[derive(Debug, Clone, Copy)]
pub struct Agents {
    pub progress: Progress,
    pub sets: u32,
}

/// Whose agents of a set are created first, and whose turn comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    Terrane,
    Bindings,
}

impl First {
    /// Creates both sides' agents in this order.
    pub fn create<T, U>(
        self,
        ours: impl FnOnce() -> Result<T>,
        raw: impl FnOnce() -> Result<U>,
    ) -> Result<(T, U)> {
        match self {
            Self::Terrane => {
                let ours = ours()?;
                Ok((ours, raw()?))
            }
            Self::Bindings => {
                let raw = raw()?;
                Ok((ours()?, raw))
            }
        }
    }
}

impl Agents {
    /// Whose agents of each set come first: in turns.
    pub fn sets(self) -> impl Iterator<Item = First> {
        let first = |set| if set % 2 == 0 { First::Terrane } else { First::Bindings };
        (0..self.sets.max(1)).map(first)
    }

    /// For agents that answer others: without a progress thread these would wait for ever.
    pub fn answering(self) -> Self {
        let rest = self.progress.0.unwrap_or(Duration::from_millis(1));
        Self { progress: Progress(Some(rest)), ..self }
    }

    /// The same with half as many sets.
    pub fn fewer(self) -> Self {
        Self { sets: self.sets.div_ceil(2), ..self }
    }
}

/// What each of several things took, over all sets: of each set, the median of each.
pub fn over_sets<const N: usize>(medians: &[[f64; N]]) -> Result<[Spread; N]> {
    let mut spreads = [Spread::single(f64::NAN); N];
    for (index, spread) in spreads.iter_mut().enumerate() {
        let of_each: Vec<f64> = medians.iter().filter_map(|m| m.get(index).copied()).collect();
        *spread = Spread::of(&of_each).context("there is a set of agents")?;
    }
    Ok(spreads)
}

/// How long agents' progress threads rest; `None` for no such thread where the agent begins transfers.
#[derive(Debug, Clone, Copy)]
pub struct Progress(pub Option<Duration>);

impl FromStr for Progress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        let rest = text.parse().map_err(|_| "expected `off`, or a number of microseconds")?;
        Ok(Self(Some(Duration::from_micros(rest))))
    }
}
