//! The owner of a directory.
//!
//! The owner holds a record lock (`fcntl`) on the file `lock`. A record lock belongs to one process.
//! A forked child does not have it, so a child that outlives its parent does not keep the directory
//! locked. A lock of `flock` would stay with the child, because both share the open file. Record
//! locks do not exclude a second owner in one process; [`lock`](crate::disk::files::lock) does that.
//!
//! The file `owner` says who the owner is. It is a file of its own: closing any descriptor of `lock`
//! in the owner's process would release the lock.

use std::fmt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::disk::error::CatalogError;
use crate::disk::files::folder::failure;
use crate::disk::files::{DirectoryLock, Files, OpenMode};
use crate::disk::format::names;

/// The most bytes of the file `owner` that are read.
const LONGEST: usize = 512;

/// A process that owns a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOwner {
    /// The name of its host.
    pub host: String,
    /// Its process id on that host.
    pub process: u32,
    /// The time at which it opened the store, in seconds since 1970 (UTC).
    pub since: u64,
}

impl StoreOwner {
    /// This process, now.
    fn current() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let since = since.map(|time| time.as_secs()).unwrap_or(0);
        Self { host, process: std::process::id(), since }
    }

    fn encode(&self) -> String {
        let Self { host, process, since } = self;
        format!("host {host}\nprocess {process}\nsince {since}\n")
    }

    fn decode(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        let host = field("host")?;
        let process = field("process")?.parse().ok()?;
        let since = field("since")?.parse().ok()?;
        let is_printable = !host.is_empty() && !host.chars().any(char::is_control);
        is_printable.then(|| Self { host: host.to_owned(), process, since })
    }
}

impl fmt::Display for StoreOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, process, since } = self;
        let (year, month, day) = date(since / 86_400);
        let (hour, minute, second) = (since / 3600 % 24, since / 60 % 60, since % 60);
        write!(f, "process {process} on host {host} since {year}-{month:02}-{day:02} ")?;
        write!(f, "{hour:02}:{minute:02}:{second:02} UTC")
    }
}

/// The date of a day since 1970-01-01, in the Gregorian calendar (H. Hinnant, `civil_from_days`).
const fn date(days: u64) -> (u64, u64, u64) {
    // A file could state any number. Later days count as one in the year 11761191.
    let shifted = if days > 1 << 32 { 1 << 32 } else { days } + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + if month <= 2 { 1 } else { 0 };
    (year, month, day)
}

/// Locks the directory for this process.
pub(crate) fn acquire(
    files: &dyn Files,
    directory: &Path,
) -> Result<Box<dyn DirectoryLock>, CatalogError> {
    let locked = files.try_lock(names::LOCK);
    let lock = locked.map_err(|error| failure(&directory.join(names::LOCK), error))?;
    let Some(lock) = lock else {
        return Err(CatalogError::Owned { directory: directory.to_owned(), owner: read(files) });
    };
    // A full disk must not keep the store closed.
    if let Err(error) = write(files) {
        tracing::debug!(%error, ?directory, "the owner of the store did not leave its name");
    }
    Ok(lock)
}

pub(crate) fn read(files: &dyn Files) -> Option<StoreOwner> {
    let file = files.open(names::OWNER, OpenMode::Existing).ok()?;
    let mut bytes = vec![0; LONGEST];
    let length = file.read_at(&mut bytes, 0).ok()?;
    StoreOwner::decode(std::str::from_utf8(bytes.get(..length)?).ok()?)
}

/// The text need not survive a crash, so that it is not synced.
fn write(files: &dyn Files) -> Result<(), terrane_core::OsError> {
    let file = files.open(names::OWNER, OpenMode::Create)?;
    file.set_length(0)?;
    file.write_at(StoreOwner::current().encode().as_bytes(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(since: u64) -> StoreOwner {
        StoreOwner { host: "node-7".into(), process: 4711, since }
    }

    #[test]
    fn owners_come_back() {
        let owner = owner(1_700_000_000);
        assert_eq!(StoreOwner::decode(&owner.encode()), Some(owner));
        let current = StoreOwner::current();
        assert_eq!(StoreOwner::decode(&current.encode()), Some(current));
    }

    #[test]
    fn other_texts_are_no_owners() {
        for text in [
            "",
            "host a",
            "host a\nprocess x\nsince 1",
            "host \nprocess 1\nsince 1",
            "host \x1b\nprocess 1\nsince 1",
        ] {
            assert_eq!(StoreOwner::decode(text), None, "{text:?}");
        }
    }

    #[test]
    fn times_are_readable() {
        let text = |since| owner(since).to_string();
        assert_eq!(text(0), "process 4711 on host node-7 since 1970-01-01 00:00:00 UTC");
        assert!(text(951_827_696).ends_with("2000-02-29 12:34:56 UTC"));
        assert!(text(1_700_000_000).ends_with("2023-11-14 22:13:20 UTC"));
        assert!(text(u64::MAX).ends_with(" UTC"));
    }
}
