//! Describes this machine in the form that plans use.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use terrane_plan::{DiskFacts, Machine};

use super::host;
use super::probe::probe_in_child;
use crate::restart::Restart;

/// The facts about this machine. The free space of directories that do not exist is unknown.
pub(crate) fn facts(restart: &Restart, directories: &[PathBuf]) -> Machine {
    let gpu = probe_in_child(restart, "gpu-facts");
    Machine {
        name: "here".to_owned(),
        title: "this machine".to_owned(),
        device: gpu.device,
        host: Some(host::facts()),
        disks: directories.iter().filter_map(|directory| disk(directory)).collect(),
        rates: None,
        sources: vec!["/proc, /sys, the driver and the file systems of this machine".to_owned()],
        date: today(),
    }
}

fn disk(directory: &Path) -> Option<DiskFacts> {
    let free_bytes = host::free_bytes(directory)?;
    let file_system = fs::metadata(directory).ok().map(|metadata| metadata.dev());
    Some(DiskFacts { directory: directory.display().to_string(), free_bytes, file_system })
}

/// The date of today in UTC.
fn today() -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    date(since.as_secs() / 86_400)
}

/// The date of a day since 1970-01-01, counted year by year and month by month.
fn date(mut days: u64) -> String {
    let mut year = 1970_u64;
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    loop {
        let length = if is_leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year:04}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        let days = [0, 59, 789, 11_016, 20_780];
        let dates = ["1970-01-01", "1970-03-01", "1972-02-29", "2000-02-29", "2026-11-23"];
        assert_eq!(days.map(date), dates);
    }
}
