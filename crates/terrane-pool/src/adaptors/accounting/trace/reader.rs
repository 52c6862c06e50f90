//! Reads a trace.

use std::io::Read;

use terrane_core::ByteCount;

use super::event::{COLUMNS, TraceAction, TraceError, TraceEvent, TraceTime};

/// An iterator over the events of a log.
///
/// It reads the logs of [`Trace`](super::Trace) and of RMM. Addresses and streams are hexadecimal
/// after `0x`, plain decimal, or the `(nil)` of C.
pub struct TraceReader<R> {
    rows: csv::Reader<R>,
    row: csv::StringRecord,
}

impl<R: Read> TraceReader<R> {
    /// Reads the first line of `log`.
    ///
    /// # Errors
    ///
    /// [`TraceError::Columns`] if it is not the line of columns, [`TraceError::Read`] if it
    /// cannot be read.
    pub fn new(log: R) -> Result<Self, TraceError> {
        let mut rows = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(log);
        let found = rows.headers().map_err(TraceError::Read)?;
        if *found != COLUMNS[..] {
            let found = found.iter().map(str::to_owned).collect();
            return Err(TraceError::Columns { found });
        }
        Ok(Self { rows, row: csv::StringRecord::new() })
    }

    fn event(&self) -> Result<TraceEvent, TraceError> {
        Ok(TraceEvent {
            thread: self.field(0, number)?,
            time: self.field(1, TraceTime::parse)?,
            action: self.field(2, TraceAction::parse)?,
            pointer: self.field(3, number)?,
            size: self.field(4, |text| text.parse().ok().map(ByteCount::new))?,
            stream: self.field(5, number)?,
        })
    }

    fn field<T>(&self, index: usize, parse: impl Fn(&str) -> Option<T>) -> Result<T, TraceError> {
        // The CSV reader refuses rows that are shorter than the first.
        let text = self.row.get(index).unwrap_or_default();
        parse(text).ok_or_else(|| TraceError::Field {
            line: self.row.position().map_or(0, csv::Position::line),
            column: COLUMNS.get(index).copied().unwrap_or_default(),
            value: text.to_owned(),
        })
    }
}

impl<R: Read> Iterator for TraceReader<R> {
    type Item = Result<TraceEvent, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.rows.read_record(&mut self.row) {
            Ok(true) => Some(self.event()),
            Ok(false) => None,
            Err(error) => Some(Err(TraceError::Read(error))),
        }
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if text == "(nil)" => Some(0),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_rmm_are_read() {
        let log = "Thread,Time,Action,Pointer,Size,Stream\n\
                   2342727,15:47:02.841961,allocate,0x10012400000,1048576,0x7f8a38001020\n\
                   2342727,15:47:02.841970,allocate failure,(nil),99,0\n\
                   2342727,15:47:02.841977,free,0x10012400000,1048576,0\n";
        let events: Vec<_> =
            TraceReader::new(log.as_bytes()).unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!(events.len(), 3);
        assert_eq!((events[0].thread, events[0].stream), (2_342_727, 0x7f8a_3800_1020));
        assert_eq!((events[1].action, events[1].pointer), (TraceAction::AllocateFailure, 0));
        assert_eq!(events[2].pointer, events[0].pointer);
    }

    #[test]
    fn errors_name_the_line_and_the_column() {
        let header = "Thread,Time,Action,Pointer,Size,Stream\n";
        let log = format!("{header}1,00:00:00.0,allocate,0x10,1,0\n1,00:00:00.0,grow,0x10,1,0\n");
        let error = TraceReader::new(log.as_bytes()).unwrap().nth(1).unwrap().unwrap_err();
        let TraceError::Field { line: 3, column: "Action", value } = &error else {
            panic!("{error}");
        };
        assert_eq!(value, "grow");

        let short = format!("{header}1,00:00:00.0,allocate\n");
        let error = TraceReader::new(short.as_bytes()).unwrap().next().unwrap().unwrap_err();
        assert!(matches!(error, TraceError::Read(_)), "{error}");
        let other = TraceReader::new("Time,Thread\n".as_bytes()).err().unwrap();
        assert!(matches!(other, TraceError::Columns { .. }), "{other}");
    }
}
