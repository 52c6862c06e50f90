//! One measured case: its value, baseline and target.

use crate::timing::Spread;

/// The direction in which a value improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Rates: GB/s, operations per second.
    HigherIsBetter,
    /// Times and sizes.
    LowerIsBetter,
}

/// A measured case of a suite.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    pub(crate) case: String,
    pub(crate) value: Spread,
    pub(crate) unit: String,
    pub(crate) direction: Direction,
    pub(crate) baseline: Option<(String, f64)>,
    pub(crate) target: Option<f64>,
    pub(crate) reason: Option<&'static str>,
}

impl Measurement {
    /// Creates a measurement of a value, without a baseline. The unit is such as `ns`, `us`, `GB/s`
    /// or `%`, and the median counts.
    pub fn new(
        case: impl Into<String>,
        value: Spread,
        unit: impl Into<String>,
        direction: Direction,
    ) -> Self {
        let (case, unit) = (case.into(), unit.into());
        Self { case, value, unit, direction, baseline: None, target: None, reason: None }
    }

    /// Compares with the baseline `name`, measured in the same run and the same unit.
    #[must_use]
    pub fn with_baseline(mut self, name: impl Into<String>, value: f64) -> Self {
        self.baseline = Some((name.into(), value));
        self
    }

    /// Requires a ratio to the baseline of at least `ratio`. A ratio of 0.9 is 90 % of the
    /// baseline.
    #[must_use]
    pub fn at_least(mut self, ratio: f64) -> Self {
        self.target = Some(ratio);
        self
    }

    /// Requires a value no worse than `limit`, in the measurement's unit: at most the limit, or at
    /// least the limit if higher is better.
    ///
    /// The limit replaces the baseline, under the name `limit`, and the target is a ratio of 1. So
    /// `ok` always means `ratio >= target`. To show a measured baseline too, report the case twice.
    #[must_use]
    pub fn within(self, limit: f64) -> Self {
        self.with_baseline("limit", limit).at_least(1.0)
    }

    /// States why this row has no target: it is a baseline, for example, or a figure that only
    /// explains another row. Every reported row has a target or such a reason.
    #[must_use]
    pub fn without_target(mut self, reason: &'static str) -> Self {
        self.reason = Some(reason);
        self
    }

    /// Whether the row has a target or a reason for having none.
    pub(crate) fn is_accounted_for(&self) -> bool {
        self.target.is_some() || self.reason.is_some()
    }

    /// The ratio of the value to the baseline; a larger ratio is better.
    ///
    /// `None` without a baseline, and if either value is not finite or not above zero, which means
    /// that it was not measured.
    pub fn ratio(&self) -> Option<f64> {
        let (_, baseline) = self.baseline.as_ref()?;
        let value = self.value.median;
        let measured = |number: f64| number.is_finite() && number > 0.0;
        if !measured(value) || !measured(*baseline) {
            return None;
        }
        Some(match self.direction {
            Direction::HigherIsBetter => value / baseline,
            Direction::LowerIsBetter => baseline / value,
        })
    }

    /// Whether the target is reached. True without a target. False with a target but no ratio.
    pub fn is_ok(&self) -> bool {
        let Some(target) = self.target else {
            return true;
        };
        self.ratio().is_some_and(|ratio| ratio >= target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(value: f64, direction: Direction) -> Measurement {
        Measurement::new("case", Spread::single(value), "unit", direction)
    }

    #[test]
    fn a_ratio_is_better_when_larger_in_both_directions() {
        let rate = measured(9.0, Direction::HigherIsBetter).with_baseline("memcpy", 10.0);
        assert_eq!(rate.ratio(), Some(0.9));
        let time = measured(10.0, Direction::LowerIsBetter).with_baseline("naive", 40.0);
        assert_eq!(time.ratio(), Some(4.0));
    }

    #[test]
    fn a_target_is_the_least_ratio() {
        let rate = measured(9.0, Direction::HigherIsBetter).with_baseline("memcpy", 10.0);
        assert!(rate.clone().at_least(0.9).is_ok());
        assert!(!rate.at_least(0.95).is_ok());
    }

    #[test]
    fn a_limit_holds_in_both_directions() {
        assert!(measured(1.9, Direction::LowerIsBetter).within(2.0).is_ok());
        assert!(!measured(2.1, Direction::LowerIsBetter).within(2.0).is_ok());
        assert!(measured(1.7, Direction::HigherIsBetter).within(1.6).is_ok());
        assert!(!measured(1.5, Direction::HigherIsBetter).within(1.6).is_ok());
    }

    #[test]
    fn an_unmeasured_value_reaches_no_target() {
        for value in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            let broken = measured(value, Direction::LowerIsBetter).within(2.0);
            assert_eq!((broken.ratio(), broken.is_ok()), (None, false), "{value}");
        }
    }
}
