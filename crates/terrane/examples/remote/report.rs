//! The output for people and programs.

use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets};
use serde_json::json;
use terrane::core::ByteCount;

use crate::cli::{Mode, Options};
use crate::moves::Measured;

/// The transfer of one group's blocks.
pub struct Line {
    pub name: String,
    /// The model's name and the rank.
    pub model: String,
    pub blocks: usize,
    pub layers: u32,
    pub measured: Measured,
    pub checked_bytes: u64,
    pub mismatches: u64,
}

impl Line {
    fn gb_per_s(&self) -> f64 {
        self.measured.bytes as f64 / self.measured.seconds / 1e9
    }

    const fn verified(&self) -> bool {
        self.mismatches == 0 && self.checked_bytes > 0
    }
}

/// Prints the table, or a line of JSON for each transfer.
pub fn print(options: &Options, lines: &[Line]) -> io::Result<()> {
    let mut output = io::stdout().lock();
    if options.json {
        for line in lines {
            writeln!(output, "{}", as_json(options, line))?;
        }
        return Ok(());
    }
    let (mover, other) = match options.mode {
        Mode::Write => ("prefill writes to decode", "decode"),
        Mode::Read => ("decode reads from prefill", "prefill"),
    };
    let rounds =
        if options.rounds == 1 { "1 round" } else { &format!("{} rounds", options.rounds) };
    writeln!(output, "{mover}, {} memory; medians of {rounds}", tier(options))?;
    for line in lines {
        writeln!(output, "\n{}, {} blocks, {} layers", line.model, line.blocks, line.layers)?;
        writeln!(output, "\n{}\n", table(line))?;
        writeln!(
            output,
            "{other} was notified of {rounds}; decode looked at {}, {} bytes of them wrong",
            ByteCount::new(line.checked_bytes),
            line.mismatches,
        )?;
    }
    Ok(())
}

fn table(line: &Line) -> Table {
    let Measured { path, bytes, pieces, descriptors, .. } = &line.measured;
    let milliseconds = |seconds: f64| format!("{:.2} ms", seconds * 1e3);
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header([
            "path",
            "bytes",
            "pieces",
            "descriptors",
            "time",
            "GB/s",
            "predicted",
            "NIXL's own",
            "verified",
        ])
        .add_row([
            path.clone(),
            ByteCount::new(*bytes).to_string(),
            pieces.to_string(),
            descriptors.to_string(),
            milliseconds(line.measured.seconds),
            format!("{:.2}", line.gb_per_s()),
            milliseconds(line.measured.predicted_seconds),
            line.measured.nixl_seconds.map_or_else(|| "-".to_owned(), milliseconds),
            if line.verified() { "yes" } else { "NO" }.to_owned(),
        ]);
    for column in table.column_iter_mut().skip(1).take(7) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn as_json(options: &Options, line: &Line) -> serde_json::Value {
    json!({
        "transfer": line.name,
        "mode": match options.mode { Mode::Write => "write", Mode::Read => "read" },
        "tier": tier(options),
        "path": line.measured.path,
        "blocks": line.blocks,
        "layers": line.layers,
        "bytes": line.measured.bytes,
        "pieces": line.measured.pieces,
        "descriptors": line.measured.descriptors,
        "seconds": line.measured.seconds,
        "gb_per_s": line.gb_per_s(),
        "predicted_seconds": line.measured.predicted_seconds,
        "nixl_seconds": line.measured.nixl_seconds,
        "requests": line.measured.requests,
        "notified": options.rounds,
        "verified": line.verified(),
    })
}

fn tier(options: &Options) -> &'static str {
    use crate::cli::MemoryTier as Tier;
    match options.tier {
        Tier::Device => "device",
        Tier::Pinned => "pinned",
        Tier::System => "system",
    }
}
