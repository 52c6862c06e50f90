//! `terrane store`: examines a store's directory, whether or not a process has it open.

mod find;
mod wear;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;
use terrane_core::ByteCount;
use terrane_store::KeyName;
use terrane_store::tools::{
    ListedBlock, ScrubReport, StoreStat, UnreadableBlock, clear, list, scrub, stat, verify, why,
};

use crate::commands::sizes::size;
use crate::error::{ExitStatus, Failure, chain};
use crate::output::Output;
use crate::table::{grouped, table, wrap};
use find::directories;

/// The arguments of `terrane store`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists blocks from their records
    Ls {
        #[command(flatten)]
        target: Target,
        /// The most blocks to print
        #[arg(long, value_name = "N", default_value_t = 1000)]
        most: usize,
    },
    /// Prints the numbers of a store, and the bytes written per day
    Stat {
        #[command(flatten)]
        target: Target,
        /// Reads the records twice, this many seconds apart, and prints the bytes written per day
        #[arg(long, value_name = "SECONDS")]
        over: Option<f64>,
        /// The drive's rated endurance in bytes written, such as 600TB
        #[arg(long, value_name = "SIZE", value_parser = size, requires = "over")]
        drive_tbw: Option<ByteCount>,
    },
    /// Prints whether a key is stored, and where
    Why {
        #[command(flatten)]
        target: Target,
        /// The key: text, or 0x and hexadecimal digits
        key: String,
        /// The key's group
        #[arg(long, value_name = "N", default_value_t = 0)]
        group: u16,
    },
    /// Reads all blocks, and compares them with their checksums
    Verify {
        #[command(flatten)]
        target: Target,
        /// The maximum read rate in bytes per second
        #[arg(long, value_name = "SIZE", value_parser = size)]
        rate: Option<ByteCount>,
    },
    /// Like verify, and removes damaged blocks, not unreadable ones; no process may have the store open
    Scrub {
        #[command(flatten)]
        target: Target,
        /// The maximum read rate in bytes per second
        #[arg(long, value_name = "SIZE", value_parser = size)]
        rate: Option<ByteCount>,
    },
    /// Removes all blocks; no process may have the store open
    Clear {
        #[command(flatten)]
        target: Target,
        /// Confirms the removal
        #[arg(long)]
        yes: bool,
    },
}

/// A store.
#[derive(Args, Debug)]
struct Target {
    /// The directory of the disk tier
    directory: PathBuf,
    /// The store's namespace; required if the directory has several
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Further directories of the tier, in the order in which it was created
    #[arg(long, value_name = "DIR")]
    also_in: Vec<PathBuf>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

impl Target {
    fn name(&self) -> Result<String, Failure> {
        find::namespace(&self.directory, self.namespace.as_deref())
    }
}

pub(crate) fn run(arguments: &Arguments, output: &mut Output<'_>) -> Result<ExitStatus, Failure> {
    match &arguments.command {
        Command::Ls { target, most } => print_list(target, *most, output),
        Command::Stat { target, over, drive_tbw } => print_stat(target, *over, *drive_tbw, output),
        Command::Why { target, key, group } => print_why(target, *group, key, output),
        Command::Verify { target, rate } => {
            let report =
                verify(&directories(&target.directory, &target.also_in), &target.name()?, *rate)?;
            print_report("verified", target, &report, output)
        }
        Command::Scrub { target, rate } => {
            let report =
                scrub(&directories(&target.directory, &target.also_in), &target.name()?, *rate)?;
            print_report("scrubbed", target, &report, output)
        }
        Command::Clear { target, yes } => {
            let name = target.name()?;
            if !yes {
                let blocks = list(&target.directory, &name)?.blocks.len();
                let text =
                    format!("{name} has {blocks} blocks, which `clear` removes; repeat with --yes");
                return Err(Failure::Usage(text));
            }
            clear(&target.directory, &name)?;
            if target.json {
                output.json(&json!({"schema": "terrane.store.clear/1", "namespace": name}))?;
            } else {
                output.text(&format!("{name} is empty\n"))?;
            }
            Ok(ExitStatus::Success)
        }
    }
}

fn block_json(block: &ListedBlock) -> serde_json::Value {
    json!({
        "group": block.group,
        "key": block.key.to_string(),
        "is_hash": matches!(block.key, KeyName::Hash(_)),
        "slot": block.slot,
        "bytes": block.length,
        "checksum": format!("{:016x}", block.checksum),
        "sequence": block.sequence,
    })
}

fn unreadable_json(unreadable: &UnreadableBlock) -> serde_json::Value {
    json!({"block": block_json(&unreadable.block), "error": chain(&*unreadable.error)})
}

const BLOCK_HEADER: [&str; 6] = ["KEY", "GROUP", "SLOT", "BYTES", "CRC-64", "RECORD"];

fn block_row(block: &ListedBlock) -> Vec<String> {
    vec![
        shortened(&block.key),
        block.group.to_string(),
        block.slot.to_string(),
        grouped(block.length),
        format!("{:016x}", block.checksum),
        block.sequence.to_string(),
    ]
}

/// Shortens a long key. `--json` prints the whole key.
fn shortened(key: &KeyName) -> String {
    const MOST: usize = 24;
    let text = key.to_string();
    if text.chars().count() <= MOST {
        text
    } else {
        text.chars().take(MOST - 1).chain(['…']).collect()
    }
}

fn print_list(
    target: &Target,
    most: usize,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    let listing = list(&target.directory, &target.name()?)?;
    let listed = listing.blocks.iter().take(most);
    if target.json {
        let blocks: Vec<_> = listed.map(block_json).collect();
        let all = listing.blocks.len();
        output.json(&json!({"schema": "terrane.store.ls/1", "as_of": listing.as_of, "all": all, "blocks": blocks}))?;
        return Ok(ExitStatus::Success);
    }
    let rows: Vec<_> = listed.map(block_row).collect();
    let mut text = table(&BLOCK_HEADER, &rows, &[]);
    let all = listing.blocks.len();
    text.push_str(&format!("{} of {all} blocks, as of record {}\n", rows.len(), listing.as_of));
    output.text(&text)?;
    Ok(ExitStatus::Success)
}

fn print_stat(
    target: &Target,
    over: Option<f64>,
    drive: Option<ByteCount>,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    let name = target.name()?;
    let watched = match over {
        Some(seconds) if !(0.001..=86_400.0).contains(&seconds) => {
            let text = format!("--over {seconds} is out of range; give 0.001 to 86400 seconds");
            return Err(Failure::Usage(text));
        }
        Some(seconds) => {
            Some(wear::watch(&target.directory, &name, Duration::from_secs_f64(seconds))?)
        }
        None => None,
    };
    let found = stat(&target.directory, &name)?;
    let years = watched.as_ref().zip(drive).and_then(|(watched, drive)| watched.years(drive));
    if target.json {
        output.json(&stat_json(&name, &found, watched.as_ref(), years))?;
    } else {
        let mut text = stat_text(&name, &found);
        if let Some(watched) = &watched {
            text.push_str(&wrap(&watched.to_string(), "  "));
        }
        if let Some(years) = years {
            text.push_str(&format!(
                "the drive's {} last {years:.1} years at that rate\n",
                drive.unwrap_or_default()
            ));
        }
        output.text(&text)?;
    }
    Ok(if found.damaged > 0 { ExitStatus::Damaged } else { ExitStatus::Success })
}

fn stat_json(
    name: &str,
    stat: &StoreStat,
    watched: Option<&wear::Watched>,
    years: Option<f64>,
) -> serde_json::Value {
    let groups = stat.groups.iter().map(|group| {
        json!({
            "slot_bytes": group.slot_bytes.get(),
            "slots": group.slots,
            "blocks": group.blocks,
            "bytes": group.bytes.get(),
        })
    });
    let fields: serde_json::Map<String, serde_json::Value> =
        stat.fields.iter().map(|(field, value)| (field.clone(), json!(value))).collect();
    json!({
        "schema": "terrane.store.stat/1",
        "namespace": name,
        "fields": fields,
        "as_of": stat.as_of,
        "is_open": stat.is_open,
        "owner": stat.owner.as_ref().map(ToString::to_string),
        "epoch": stat.epoch,
        "groups": groups.collect::<Vec<_>>(),
        "directories": stat.directories,
        "slot_alignment": stat.slot_alignment.map(ByteCount::get),
        "metadata_bytes": stat.metadata.get(),
        "torn": stat.torn,
        "damaged": stat.damaged,
        "dropped": stat.dropped,
        "bytes_a_day": watched.map(wear::Watched::bytes_a_day),
        "drive_years": years,
    })
}

fn stat_text(name: &str, stat: &StoreStat) -> String {
    let mut text = format!("{name}, as of record {}, epoch {}\n", stat.as_of, stat.epoch);
    match (&stat.owner, stat.is_open) {
        (Some(owner), true) => text.push_str(&wrap(&format!("open in {owner}"), "  ")),
        (_, true) => text.push_str("open in another process\n"),
        (_, false) => text.push_str("not open\n"),
    }
    if let Some(directories) = stat.directories.filter(|&directories| directories > 1) {
        text.push_str(&format!("striped over {directories} directories\n"));
    }
    for (field, value) in &stat.fields {
        text.push_str(&wrap(&format!("  {field}: {value}"), "    "));
    }
    let rows = (0..).zip(&stat.groups).map(|(number, group): (u64, _)| {
        let filled = group.blocks as f64 / f64::from(group.slots.max(1)) * 100.0;
        vec![
            number.to_string(),
            group.slot_bytes.to_string(),
            grouped(group.slots.into()),
            grouped(group.blocks),
            group.bytes.to_string(),
            format!("{filled:.1} %"),
        ]
    });
    let rows: Vec<_> = rows.collect();
    text.push('\n');
    text.push_str(&table(&["GROUP", "SLOT", "SLOTS", "BLOCKS", "BYTES", "FILLED"], &rows, &[]));
    let records = format!(
        "records: {}; {} torn or not yet durable, {} damaged, {} blocks that the next opening drops",
        stat.metadata, stat.torn, stat.damaged, stat.dropped
    );
    text.push_str(&wrap(&records, "  "));
    text
}

fn print_why(
    target: &Target,
    group: u16,
    key: &str,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    let key = key_bytes(key)?;
    let (as_of, block) = why(&target.directory, &target.name()?, group, &key)?;
    if target.json {
        let block = block.as_ref().map(block_json);
        output.json(&json!({"schema": "terrane.store.why/1", "as_of": as_of, "block": block}))?;
        return Ok(ExitStatus::Success);
    }
    let text = match block {
        Some(block) => format!(
            "stored in slot {} of group {group}: {} bytes, CRC-64 {:016x}, by record {}; as of record {as_of}",
            block.slot,
            grouped(block.length),
            block.checksum,
            block.sequence
        ),
        None => format!(
            "not stored in group {group}, as of record {as_of}; the process that has the store open knows whether it was evicted"
        ),
    };
    output.text(&wrap(&text, "  "))?;
    Ok(ExitStatus::Success)
}

/// Uses text directly, and decodes hexadecimal digits after `0x`.
fn key_bytes(key: &str) -> Result<Vec<u8>, Failure> {
    let Some(digits) = key.strip_prefix("0x") else { return Ok(key.as_bytes().to_vec()) };
    let refused = || {
        Failure::Usage(format!(
            "{key:?} is not hexadecimal; give an even number of digits after 0x"
        ))
    };
    if digits.is_empty()
        || digits.len() % 2 != 0
        || !digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    {
        return Err(refused());
    }
    let bytes = (0..digits.len()).step_by(2).map(|at| {
        let pair = digits.get(at..at + 2).unwrap_or_default();
        u8::from_str_radix(pair, 16).map_err(|_| refused())
    });
    bytes.collect()
}

fn print_report(
    word: &str,
    target: &Target,
    report: &ScrubReport,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    if target.json {
        let damaged: Vec<_> = report.damaged.iter().map(block_json).collect();
        let unreadable: Vec<_> = report.unreadable.iter().map(unreadable_json).collect();
        output.json(&json!({
            "schema": "terrane.store.verify/1",
            "as_of": report.as_of,
            "blocks": report.blocks,
            "bytes": report.bytes.get(),
            "damaged": damaged,
            "unreadable": unreadable,
            "changed": report.changed,
            "seconds": report.took.as_secs_f64(),
        }))?;
    } else {
        let mut text = format!(
            "{word} {} blocks, {}, in {:.2} s, as of record {}; {} damaged",
            grouped(report.blocks),
            report.bytes,
            report.took.as_secs_f64(),
            report.as_of,
            report.damaged.len()
        );
        if !report.unreadable.is_empty() {
            text.push_str(&format!("; {} unreadable", report.unreadable.len()));
        }
        if report.changed > 0 {
            text.push_str(&format!("; {} changed meanwhile", report.changed));
        }
        let mut text = wrap(&text, "  ");
        if !report.damaged.is_empty() {
            let rows: Vec<_> = report.damaged.iter().map(block_row).collect();
            text.push_str(&table(&BLOCK_HEADER, &rows, &[]));
        }
        if let Some(first) = report.unreadable.first() {
            let error = chain(&*first.error);
            text.push_str(&wrap(&format!("unreadable: {error}"), "  "));
            let rows: Vec<_> = report.unreadable.iter().map(|it| block_row(&it.block)).collect();
            text.push_str(&table(&BLOCK_HEADER, &rows, &[]));
        }
        output.text(&text)?;
    }
    // A scrub has removed the damaged blocks, and still reports them.
    Ok(match (report.damaged.is_empty(), report.unreadable.is_empty()) {
        (false, _) => ExitStatus::Damaged,
        (true, false) => ExitStatus::Failure,
        (true, true) => ExitStatus::Success,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_text_or_hexadecimal() {
        assert_eq!(key_bytes("prefix 42").unwrap(), b"prefix 42");
        assert_eq!(key_bytes("0x00fF").unwrap(), [0, 255]);
        for wrong in ["0x", "0x1", "0xzz", "0x+1"] {
            assert!(key_bytes(wrong).unwrap_err().to_string().contains("even number"), "{wrong}");
        }
    }
}
