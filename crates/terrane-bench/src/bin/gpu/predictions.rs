//! The predicted times of transfers, compared with the measured times.

use std::cell::RefCell;
use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Spread};

/// The predictions of all cases so far: the case, and predicted time over measured time.
#[derive(Default)]
pub struct Predictions(RefCell<Vec<(String, f64)>>);

impl Predictions {
    /// Reports the predicted time of a case's transfer and the measured time. The prediction is
    /// from the calibration and the learned corrections.
    pub fn report<W: Write>(
        &self,
        case: &str,
        predicted: Duration,
        took: Spread,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let (predicted, took) = (predicted.as_secs_f64() * 1e6, took.median * 1e6);
        self.0.borrow_mut().push((case.to_owned(), predicted / took));
        let case = format!("{case}, predicted");
        let lower = Direction::LowerIsBetter;
        let measured = Measurement::new(case, Spread::single(predicted), "us", lower);
        let measured = measured.with_baseline("took", took);
        Ok(reporter.report(&measured.without_target("it explains which path is taken"))?)
    }

    /// Reports the error factor of the predictions: the median and the maximum. A factor of 2 is a
    /// prediction twice as long or half as long.
    pub fn conclude<W: Write>(&self, reporter: &mut Reporter<W>) -> Result<()> {
        let mut factors: Vec<(String, f64)> = self.0.take();
        factors.iter_mut().for_each(|(_, ratio)| *ratio = ratio.max(1.0 / *ratio));
        factors.sort_by(|(_, one), (_, other)| one.total_cmp(other));
        let half = factors.get(factors.len() / 2).map(|(_, factor)| (String::new(), *factor));
        let worst = factors.pop().map(|(case, factor)| (format!(": {case}"), factor));
        for (name, found) in [("half of them wrong by less than", half), ("the worst", worst)] {
            let Some((case, factor)) = found else { continue };
            let case = format!("predictions, {name}{case}");
            let lower = Direction::LowerIsBetter;
            let measured = Measurement::new(case, Spread::single(factor), "times", lower);
            reporter.report(&measured.without_target("it explains which path is taken"))?;
        }
        Ok(())
    }
}
