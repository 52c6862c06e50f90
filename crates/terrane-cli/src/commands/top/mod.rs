//! `terrane top`: a live view of a store's metrics.

mod draw;
mod metrics;
mod source;
mod view;

use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::error::{ExitStatus, Failure};
use crate::output::Output;
pub(crate) use metrics::NoMetric;
use source::Source;
use view::Readings;

/// The arguments of `terrane top`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// A file that `export_metrics` writes, or an http endpoint
    source: String,
    /// Seconds between two readings
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// Prints one view as text and exits; with --interval, the rates cover that time
    #[arg(long)]
    once: bool,
    /// Prints totals, not rates, with --once
    #[arg(long, requires = "once")]
    totals: bool,
}

pub(crate) fn run(arguments: &Arguments, output: &mut Output<'_>) -> Result<ExitStatus, Failure> {
    let source = Source::parse(&arguments.source)?;
    if !(0.05..=3600.0).contains(&arguments.interval) {
        let text =
            format!("--interval {} is out of range; give 0.05 to 3600 seconds", arguments.interval);
        return Err(Failure::Usage(text));
    }
    let interval = Duration::from_secs_f64(arguments.interval);
    let mut readings = Readings::default();
    read(&source, &mut readings)?;
    if arguments.once {
        if !arguments.totals {
            std::thread::sleep(interval);
            read(&source, &mut readings)?;
        }
        output.text(&draw::text(&title(&arguments.source, &readings), &readings)?)?;
        return Ok(ExitStatus::Success);
    }
    let mut terminal = ratatui::try_init().map_err(|error| {
        Failure::Usage(format!("standard output is not a terminal: {error}; use --once for text"))
    })?;
    let ended = live(arguments, &source, readings, &mut terminal, interval);
    ratatui::restore();
    ended
}

/// Draws until the user quits. If a reading fails, shows the error and tries again.
fn live(
    arguments: &Arguments,
    source: &Source,
    mut readings: Readings,
    terminal: &mut ratatui::DefaultTerminal,
    interval: Duration,
) -> Result<ExitStatus, Failure> {
    let mut title = title(&arguments.source, &readings);
    loop {
        terminal.draw(|frame| draw::frame(frame, &title, &readings))?;
        let next = Instant::now() + interval;
        while let Some(remaining) = next.checked_duration_since(Instant::now()) {
            if event::poll(remaining)? && is_end(&event::read()?) {
                return Ok(ExitStatus::Success);
            }
        }
        title = match read(source, &mut readings) {
            Ok(()) => self::title(&arguments.source, &readings),
            Err(failure) => failure.to_string(),
        };
    }
}

fn is_end(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let is_control_c =
        key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press
        && (matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) || is_control_c)
}

fn read(source: &Source, readings: &mut Readings) -> Result<(), Failure> {
    let samples = metrics::parse(&source.read()?)?;
    readings.add(samples, Instant::now());
    Ok(())
}

fn title(source: &str, readings: &Readings) -> String {
    let what = if readings.has_rates() { "rates" } else { "totals" };
    let source: String =
        source.chars().rev().take(50).collect::<Vec<_>>().into_iter().rev().collect();
    format!("terrane top: {source}, {what}; q ends")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_after_a_failed_reading_are_of_the_time_since_the_last_good_one() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("metrics.txt");
        let source = Source::parse(file.to_str().unwrap()).unwrap();
        let write = |hits: u32| {
            let text = format!("terrane_store_tier_hits_total{{tier=\"host\"}} {hits}\n");
            std::fs::write(&file, text).unwrap();
        };
        let mut readings = Readings::default();
        write(0);
        read(&source, &mut readings).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        std::fs::remove_file(&file).unwrap();
        assert!(read(&source, &mut readings).is_err());
        write(1000);
        read(&source, &mut readings).unwrap();
        let rate: f64 = readings.sections()[0].rows[0][2].parse().unwrap();
        // 1,000 hits in 200 ms or slightly more. If measured since the failed attempt, the rate
        // would be a million per second.
        assert!(rate > 0.0 && rate <= 1000.0 / 0.2, "{rate}");
    }
}
