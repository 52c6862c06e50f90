//! The text format of OpenMetrics, which Prometheus reads.

use std::fmt::{self, Write};

use super::histogram::HistogramSnapshot;

/// Writes metrics as text: one family after another, and the end mark.
///
/// The caller passes the names of metrics and labels: letters, digits and underscores. The values
/// of labels may be any text.
#[derive(Debug)]
pub struct OpenMetrics<'a, W> {
    to: &'a mut W,
}

/// The unit of a metric. It is the suffix of the metric's name, and values are converted to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unit {
    /// Plain numbers.
    None,
    /// Bytes.
    Bytes,
    /// Seconds. Callers pass nanoseconds.
    Seconds,
}

/// A metric with all its samples, one for each set of labels.
#[derive(Debug)]
pub struct MetricFamily<'a, W> {
    to: &'a mut W,
    name: &'a str,
    unit: Unit,
    suffix: &'static str,
}

/// The exponents of two at which buckets end in the text: for times, about 1 µs and 69 s.
const FIRST_TIME: u32 = 10;
const LAST_TIME: u32 = 36;
/// The same for bytes (1 KiB and 1 TiB), and for numbers (4 and 2^24).
const BYTES: [u32; 2] = [10, 40];
const NUMBERS: [u32; 2] = [2, 24];

impl<'a, W: Write> OpenMetrics<'a, W> {
    /// Writes to `to`.
    pub fn new(to: &'a mut W) -> Self {
        Self { to }
    }

    /// Begins a counter. The unit and `_total` are appended to the name.
    ///
    /// # Errors
    ///
    /// The errors of the writer.
    pub fn counter<'b>(
        &'b mut self,
        name: &'b str,
        unit: Unit,
        help: &str,
    ) -> Result<MetricFamily<'b, W>, fmt::Error> {
        self.family(name, unit, "counter", help, "_total")
    }

    /// Begins a gauge: a value that may rise and fall.
    ///
    /// # Errors
    ///
    /// As for [`counter`](Self::counter).
    pub fn gauge<'b>(
        &'b mut self,
        name: &'b str,
        unit: Unit,
        help: &str,
    ) -> Result<MetricFamily<'b, W>, fmt::Error> {
        self.family(name, unit, "gauge", help, "")
    }

    /// Begins a histogram. Its samples are [distributions](MetricFamily::distribution).
    ///
    /// # Errors
    ///
    /// As for [`counter`](Self::counter).
    pub fn histogram<'b>(
        &'b mut self,
        name: &'b str,
        unit: Unit,
        help: &str,
    ) -> Result<MetricFamily<'b, W>, fmt::Error> {
        self.family(name, unit, "histogram", help, "")
    }

    /// Writes the end mark. Nothing may follow it.
    ///
    /// # Errors
    ///
    /// As for [`counter`](Self::counter).
    pub fn finish(self) -> fmt::Result {
        self.to.write_str("# EOF\n")
    }

    fn family<'b>(
        &'b mut self,
        name: &'b str,
        unit: Unit,
        kind: &str,
        help: &str,
        suffix: &'static str,
    ) -> Result<MetricFamily<'b, W>, fmt::Error> {
        let ending = unit.ending();
        writeln!(self.to, "# TYPE {name}{ending} {kind}")?;
        if let Some(unit) = ending.strip_prefix('_') {
            writeln!(self.to, "# UNIT {name}{ending} {unit}")?;
        }
        write!(self.to, "# HELP {name}{ending} ")?;
        escaped(self.to, help)?;
        self.to.write_char('\n')?;
        Ok(MetricFamily { to: self.to, name, unit, suffix })
    }
}

impl<W: Write> MetricFamily<'_, W> {
    /// Writes a value.
    ///
    /// # Errors
    ///
    /// As for [`OpenMetrics::counter`].
    pub fn sample(&mut self, labels: &[(&str, &str)], value: u64) -> fmt::Result {
        self.start(self.suffix, labels, None)?;
        self.unit.write(self.to, value)?;
        self.to.write_char('\n')
    }

    /// Writes a histogram. Its buckets end just below powers of two.
    ///
    /// # Errors
    ///
    /// As for [`OpenMetrics::counter`].
    pub fn distribution(
        &mut self,
        labels: &[(&str, &str)],
        values: &HistogramSnapshot,
    ) -> fmt::Result {
        let [first, last] = match self.unit {
            Unit::Seconds => [FIRST_TIME, LAST_TIME],
            Unit::Bytes => BYTES,
            Unit::None => NUMBERS,
        };
        for exponent in first..=last {
            // All values are integers, so the largest value of these buckets is exact.
            let largest = (1 << exponent) - 1;
            self.start("_bucket", labels, Some(largest))?;
            writeln!(self.to, "{}", values.below_power(exponent))?;
        }
        self.start("_bucket", labels, Some(u64::MAX))?;
        writeln!(self.to, "{}", values.count())?;
        self.start("_sum", labels, None)?;
        self.unit.write(self.to, values.sum())?;
        self.to.write_char('\n')?;
        self.start("_count", labels, None)?;
        writeln!(self.to, "{}", values.count())
    }

    /// Writes a line up to its value. `bound` is the upper bound of a bucket.
    fn start(&mut self, suffix: &str, labels: &[(&str, &str)], bound: Option<u64>) -> fmt::Result {
        let (to, ending) = (&mut *self.to, self.unit.ending());
        write!(to, "{}{ending}{suffix}", self.name)?;
        let mut separator = '{';
        for (name, value) in labels {
            write!(to, "{separator}{name}=\"")?;
            escaped(to, value)?;
            to.write_char('"')?;
            separator = ',';
        }
        if let Some(bound) = bound {
            write!(to, "{separator}le=\"")?;
            match bound {
                u64::MAX => to.write_str("+Inf")?,
                bound => self.unit.write(to, bound)?,
            }
            to.write_char('"')?;
            separator = ',';
        }
        to.write_str(if separator == ',' { "} " } else { " " })
    }
}

impl Unit {
    fn ending(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Bytes => "_bytes",
            Self::Seconds => "_seconds",
        }
    }

    /// Writes a value exactly.
    fn write(self, to: &mut impl Write, value: u64) -> fmt::Result {
        const NANOS: u64 = 1_000_000_000;
        match self {
            Self::None | Self::Bytes => write!(to, "{value}"),
            Self::Seconds => write!(to, "{}.{:09}", value / NANOS, value % NANOS),
        }
    }
}

fn escaped(to: &mut impl Write, text: &str) -> fmt::Result {
    text.chars().try_for_each(|each| match each {
        '\\' => to.write_str("\\\\"),
        '"' => to.write_str("\\\""),
        '\n' => to.write_str("\\n"),
        each => to.write_char(each),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{HISTOGRAM_CELLS, ShardedCounters};
    use super::*;

    #[test]
    fn families_are_written_as_the_format_demands() {
        let mut text = String::new();
        let mut out = OpenMetrics::new(&mut text);
        let mut family = out.counter("copied", Unit::Bytes, "Bytes\nthat \"moved\".").unwrap();
        family.sample(&[("from", "disk"), ("path", "a\\b")], 12).unwrap();
        family.sample(&[], u64::MAX).unwrap();
        out.gauge("busy", Unit::Seconds, "Time.").unwrap().sample(&[], 1_000_000_001).unwrap();
        out.finish().unwrap();
        let expected = "# TYPE copied_bytes counter\n# UNIT copied_bytes bytes\n\
             # HELP copied_bytes Bytes\\nthat \\\"moved\\\".\n\
             copied_bytes_total{from=\"disk\",path=\"a\\\\b\"} 12\n\
             copied_bytes_total 18446744073709551615\n\
             # TYPE busy_seconds gauge\n# UNIT busy_seconds seconds\n# HELP busy_seconds Time.\n\
             busy_seconds 1.000000001\n# EOF\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn buckets_are_cumulative_and_end_at_infinity() {
        let counters = ShardedCounters::new(HISTOGRAM_CELLS);
        for value in [3, 1023, 1024, 1 << 50] {
            counters.update(|shard| shard.record(0, value));
        }
        let mut text = String::new();
        let mut out = OpenMetrics::new(&mut text);
        let mut family = out.histogram("time", Unit::Seconds, "Time.").unwrap();
        family.distribution(&[("to", "host")], &counters.histogram(0)).unwrap();
        let line =
            |bound, count| format!("time_seconds_bucket{{to=\"host\",le=\"{bound}\"}} {count}\n");
        assert!(text.contains(&line("0.000001023", 2)), "{text}");
        assert!(text.contains(&line("0.000002047", 3)));
        assert!(text.contains(&line("68.719476735", 3)));
        assert!(text.contains(&line("+Inf", 4)));
        assert!(text.contains("time_seconds_sum{to=\"host\"} 1125899.906844674\n"));
        assert!(text.ends_with("time_seconds_count{to=\"host\"} 4\n"));
    }
}
