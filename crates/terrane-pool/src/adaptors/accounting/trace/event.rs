//! The rows of a trace.

use std::fmt;
use std::io;
use std::time::SystemTime;

use terrane_core::ByteCount;

/// The columns, in their order.
pub(crate) const COLUMNS: [&str; 6] = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"];

/// One row of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// A number for the thread.
    pub thread: u64,
    /// The time of day.
    pub time: TraceTime,
    /// The action.
    pub action: TraceAction,
    /// The address, or the position in a file; 0 for a failure.
    pub pointer: u64,
    /// The bytes requested.
    pub size: ByteCount,
    /// The stream; 0 is the default one.
    pub stream: u64,
}

/// The action of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TraceAction {
    /// Memory was allocated.
    Allocate,
    /// A request was refused.
    AllocateFailure,
    /// Memory was freed.
    Free,
}

impl TraceAction {
    const ALL: [Self; 3] = [Self::Allocate, Self::AllocateFailure, Self::Free];

    /// Returns the word in the log.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allocate => "allocate",
            Self::AllocateFailure => "allocate failure",
            Self::Free => "free",
        }
    }

    pub(super) fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == word)
    }
}

/// A time of day in UTC, in microseconds since midnight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TraceTime(u64);

impl TraceTime {
    /// Returns the time of day now.
    #[must_use]
    pub fn now() -> Self {
        // A clock before 1970 counts as midnight.
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let microseconds = since.as_secs() % (24 * 60 * 60) * 1_000_000;
        Self(microseconds + u64::from(since.subsec_micros()))
    }

    /// Returns microseconds since midnight.
    #[must_use]
    pub const fn microseconds(self) -> u64 {
        self.0
    }

    /// Parses `15:47:02.841961`, or with a colon before the fraction, as in older logs. Also parses
    /// seconds since 1970, as in RMM's user guide.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if let Some((seconds, fraction)) = text.split_once('.')
            && !text.contains(':')
        {
            let seconds: u64 = seconds.parse().ok()?;
            let time_of_day = seconds % (24 * 60 * 60) * 1_000_000;
            return Some(Self(time_of_day + parse_fraction(fraction)?));
        }
        let mut fields = text.splitn(3, ':');
        let hours: u64 = fields.next()?.parse().ok()?;
        let minutes: u64 = fields.next()?.parse().ok()?;
        let (seconds, fraction) = fields.next()?.split_once(['.', ':'])?;
        let seconds: u64 = seconds.parse().ok()?;
        if hours > 23 || minutes > 59 || seconds > 59 {
            return None;
        }
        let seconds = (hours * 60 + minutes) * 60 + seconds;
        Some(Self(seconds * 1_000_000 + parse_fraction(fraction)?))
    }
}

/// Parses the digits of a fraction of a second, at most six, as microseconds.
fn parse_fraction(digits: &str) -> Option<u64> {
    let is_number = digits.len() <= 6 && digits.bytes().all(|digit| digit.is_ascii_digit());
    is_number.then(|| format!("{digits:0<6}").parse().ok()).flatten()
}

impl fmt::Display for TraceTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, microseconds) = (self.0 / 1_000_000, self.0 % 1_000_000);
        let (minutes, hours) = (seconds / 60 % 60, seconds / 3600);
        write!(f, "{hours:02}:{minutes:02}:{:02}.{microseconds:06}", seconds % 60)
    }
}

/// The error of a trace that could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The writer failed. The rows that it was given in a failed write are lost.
    #[error("the trace could not be written, and {lost_rows} rows are lost; check the disk")]
    Write {
        /// The number of rows lost so far.
        lost_rows: u64,
        /// The writer's error.
        #[source]
        source: io::Error,
    },
    /// The log could not be read, or is not UTF-8, or has rows of different lengths.
    #[error("the trace could not be read; see the cause")]
    Read(#[source] csv::Error),
    /// The log has other columns.
    #[error(
        "the trace has the columns {found:?}; the required columns are {COLUMNS:?}, in this order"
    )]
    Columns {
        /// The columns of the log.
        found: Vec<String>,
    },
    /// A field is not valid.
    #[error(
        "line {line} of the trace: {value:?} is not a valid value for {column}; correct or remove \
         the line"
    )]
    Field {
        /// The line, from 1.
        line: u64,
        /// The column.
        column: &'static str,
        /// The text of the field.
        value: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_read_back() {
        let time = TraceTime::parse("15:47:02.841961").unwrap();
        assert_eq!(time.to_string(), "15:47:02.841961");
        assert_eq!(TraceTime::parse("15:47:02:841961"), Some(time));
        assert_eq!(TraceTime::parse("00:00:01.5").unwrap().microseconds(), 1_500_000);
        for nonsense in ["", "1:2", "24:00:00.0", "12:60:00.0", "12:00:00.1234567", "a:b:c.d"] {
            assert_eq!(TraceTime::parse(nonsense), None, "{nonsense}");
        }
        assert_eq!(TraceTime::parse("86461.25"), TraceTime::parse("00:01:01.25"));
        assert!(TraceTime::now().microseconds() < 24 * 60 * 60 * 1_000_000);
    }
}
