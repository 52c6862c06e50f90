//! The common parts of Terrane's benchmark suites: measuring, comparing and reporting.
//!
//! A suite is a binary of this crate (`src/bin/NAME.rs`), run by `cargo xtask bench NAME`. It
//! measures each case and a baseline *in the same run*, because figures from another day or machine
//! are not comparable:
//!
//! ```
//! use terrane_bench::{Direction, Measurement, Reporter, Settings};
//!
//! let settings = Settings { warm_up: 1, repeats: 5, ..Settings::default() };
//! let mut reporter = Reporter::new("sample", &settings, Vec::new());
//!
//! let data = vec![1_u8; 1 << 16];
//! let fold = settings.time(|| data.iter().fold(0_u64, |sum, &byte| sum + u64::from(byte)));
//! let sum = settings.time(|| data.iter().map(|&byte| u64::from(byte)).sum::<u64>());
//!
//! reporter.report(
//!     &Measurement::new("sum of 64 KiB", sum.scaled(1e6), "us", Direction::LowerIsBetter)
//!         .with_baseline("fold", fold.scaled(1e6).median)
//!         .without_target("an example"),
//! )?;
//! let outcome = reporter.finish()?;
//! assert_eq!(outcome.reported, 1);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod measurement;
pub mod recorded;
pub mod replay;
mod reporter;
mod run;
mod settings;
mod timing;

pub use measurement::{Direction, Measurement};
pub use reporter::{Outcome, Record, Reporter};
pub use run::run;
pub use settings::Settings;
pub use timing::Spread;
