//! How long transfers took, beside how long they should have taken.

use std::cell::RefCell;
use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Spread};

/// The predictions of all cases so far: case, and predicted over actual.
#[derive(Default)]
pub struct Predictions(RefCell<Vec<(String, f64)>>);

impl Predictions {
    /// Reports how long the transfer of a case was predicted to take, by the calibration and what
    /// had been learned by then, beside how long it took.
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
        let measured = measured.beside("took", took);
        Ok(reporter.report(&measured.without_target("it explains which path is taken"))?)
    }

    /// Reports by what factor predictions were wrong, too long or too short: half of them, and the
    /// worst.
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
