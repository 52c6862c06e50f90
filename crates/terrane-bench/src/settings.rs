//! The arguments of every suite.

/// The arguments of every suite. A suite with more arguments flattens these into its own.
#[derive(Debug, Clone, clap::Args)]
pub struct Settings {
    /// Prints one JSON object per line on standard output, and nothing else there
    #[arg(long)]
    pub json: bool,
    /// Fails if a target is missed
    #[arg(long)]
    pub check: bool,
    /// Runs only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Calls before the measured ones, to fault pages in, fill caches and raise the clock
    #[arg(long, value_name = "N", default_value_t = Settings::default().warm_up)]
    pub warm_up: u32,
    /// The number of measured calls; the median counts
    #[arg(long, value_name = "N", default_value_t = Settings::default().repeats)]
    pub repeats: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { json: false, check: false, filter: None, warm_up: 2, repeats: 9 }
    }
}
