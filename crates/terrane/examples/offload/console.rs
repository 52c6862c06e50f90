//! The output for people and programs: notes, the table, JSON lines, errors.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::job::Hop;

/// Standard output and standard error.
pub struct Console {
    json: bool,
    verbose: bool,
}

/// The JSON form of a hop.
#[derive(Serialize)]
struct Line<'a> {
    hop: &'a str,
    path: &'a str,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    limit_gb_per_s: f64,
    verified: bool,
}

impl Console {
    pub const fn new(json: bool, verbose: bool) -> Self {
        Self { json, verbose }
    }

    /// Prints a line for people. With `--json` it is omitted, because standard output is for
    /// programs.
    pub fn note(&self, line: impl Display) -> io::Result<()> {
        if self.json { Ok(()) } else { writeln!(io::stdout().lock(), "{line}") }
    }

    /// Prints a line of `--verbose`. With `--json` it goes to standard error.
    pub fn detail(&self, line: impl Display) -> io::Result<()> {
        match (self.verbose, self.json) {
            (false, _) => Ok(()),
            (true, false) => self.note(line),
            (true, true) => writeln!(io::stderr().lock(), "{line}"),
        }
    }

    /// Prints a line in every mode.
    pub fn warn(&self, line: impl Display) -> io::Result<()> {
        writeln!(io::stderr().lock(), "{line}")
    }

    /// Prints a JSON line as soon as a hop has ended.
    pub fn hop(&self, hop: &Hop) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        let line = Line {
            hop: &hop.name,
            path: &hop.path,
            bytes: hop.bytes.get(),
            seconds: hop.seconds,
            gb_per_s: hop.gb_per_s(),
            limit_gb_per_s: hop.limit_gb_per_s(),
            verified: hop.verified,
        };
        let mut output = io::stdout().lock();
        serde_json::to_writer(&mut output, &line)?;
        writeln!(output)
    }

    /// Prints the table of all hops.
    pub fn table(&self, hops: &[Hop]) -> io::Result<()> {
        let header = ["hop", "path", "bytes", "time", "GB/s", "limit GB/s", "share", "verified"];
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN).set_header(header).add_rows(hops.iter().map(
            |hop| {
                [
                    hop.name.clone(),
                    hop.path.clone(),
                    hop.bytes.to_string(),
                    format!("{:.1} ms", hop.seconds * 1e3),
                    format!("{:.2}", hop.gb_per_s()),
                    format!("{:.2}", hop.limit_gb_per_s()),
                    format!("{:.0} %", hop.share() * 100.0),
                    if hop.verified { "yes" } else { "NO" }.to_owned(),
                ]
            },
        ));
        for column in table.column_iter_mut().skip(2).take(5) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        self.note(format_args!("\n{table}\n"))?;
        self.note(
            "time and limit: medians. The limit is measured in turns with the hop: for memory, as \
             many threads\nas the engine has copy as many contiguous bytes; for the disk, requests \
             of the engine's size and\ndepth go to or from one contiguous buffer, in order, \
             by direct I/O where the file system has it;\nfor the device, one DMA copies one \
             contiguous span.",
        )
    }

    /// Prints the error and its causes.
    pub fn fail(&self, failure: &dyn Error) {
        let mut text = format!("error: {failure}\n");
        let mut cause = failure.source();
        while let Some(error) = cause {
            text.push_str(&format!("  caused by: {error}\n"));
            cause = error.source();
        }
        // Output that cannot be written is ignored.
        let _ = io::stderr().lock().write_all(text.as_bytes());
    }
}
