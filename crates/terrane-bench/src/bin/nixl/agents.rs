//! The agents of a case: the same settings on both sides, and several sets of agents.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use terrane_bench::Spread;

use crate::processors::Processors;

/// The settings of the agents of both sides, and the number of sets.
///
/// The addresses and processors of agents change the time of a transfer by a few percent. They stay
/// the same as long as the agents live. So each case is measured with several sets of agents. The
/// result is the [median over the sets](over_sets).
#[derive(Debug, Clone, Copy)]
pub struct Agents {
    pub progress: Progress,
    pub sets: u32,
    /// The processors of the threads. `None` leaves the choice to the system.
    pub processors: Option<Processors>,
}

/// The side whose agents of a set are created first and run first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    Terrane,
    Bindings,
}

impl First {
    /// Creates both sides' agents in this order.
    pub fn create<T, U>(
        self,
        terrane: impl FnOnce() -> Result<T>,
        bindings: impl FnOnce() -> Result<U>,
    ) -> Result<(T, U)> {
        match self {
            Self::Terrane => {
                let terrane = terrane()?;
                Ok((terrane, bindings()?))
            }
            Self::Bindings => {
                let bindings = bindings()?;
                Ok((terrane()?, bindings))
            }
        }
    }
}

impl Agents {
    /// The first side of each set. The two sides alternate.
    pub fn sets(self) -> impl Iterator<Item = First> {
        let first = |set| if set % 2 == 0 { First::Terrane } else { First::Bindings };
        (0..self.sets.max(1)).map(first)
    }

    /// Starts agents or engines on the processor of their threads.
    pub fn start<T>(self, agents: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.processors {
            Some(processors) => processors.start(agents),
            None => agents(),
        }
    }

    /// For agents that respond to others. Without a progress thread, the others would wait forever.
    pub fn answering(self) -> Self {
        let rest = self.progress.0.unwrap_or(Duration::from_millis(1));
        Self { progress: Progress(Some(rest)), ..self }
    }

    /// The same settings with a quarter of the sets.
    pub fn fewer(self) -> Self {
        Self { sets: self.sets.div_ceil(4), ..self }
    }
}

/// The medians of one set in seconds: of Terrane, and of each alternative with the bindings.
#[derive(Debug, Clone, Copy)]
pub struct Times<const WAYS: usize> {
    pub terrane: f64,
    pub bindings: [f64; WAYS],
}

/// The time of Terrane over all sets, and the time of each alternative with the bindings. They are
/// computed from the median of the ratios within the sets, because differences between sets affect
/// both sides.
pub fn over_sets<const WAYS: usize>(sets: &[Times<WAYS>]) -> Result<(Spread, [f64; WAYS])> {
    let median = |figures: &[f64]| Spread::of(figures).context("there is a set of agents");
    let terrane = median(&sets.iter().map(|set| set.terrane).collect::<Vec<_>>())?;
    let mut bindings = [f64::NAN; WAYS];
    for (way, beside) in bindings.iter_mut().enumerate() {
        let ratio = |set: &Times<WAYS>| set.bindings.get(way).map(|time| time / set.terrane);
        let ratios: Vec<f64> = sets.iter().filter_map(ratio).collect();
        *beside = terrane.median * median(&ratios)?.median;
    }
    Ok((terrane, bindings))
}

/// The pause of the agents' progress threads. `None` for no such thread in agents that start
/// transfers.
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
