//! Parses OpenMetrics text, as `Store::export_metrics` writes it.

/// One line of metrics.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub name: String,
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

impl Sample {
    pub(super) fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
    }
}

/// A text that is not metrics.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} is not a metric: {text:?}; pass a file of `export_metrics`, or an endpoint")]
pub(crate) struct NoMetric {
    line: usize,
    text: String,
}

/// Parses all samples. Comments, timestamps and exemplars are skipped.
pub(super) fn parse(text: &str) -> Result<Vec<Sample>, NoMetric> {
    let mut samples = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let sample = sample(line)
            .ok_or_else(|| NoMetric { line: number + 1, text: line.chars().take(60).collect() })?;
        samples.push(sample);
    }
    Ok(samples)
}

fn sample(line: &str) -> Option<Sample> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let end = line.find(|c: char| !is_name(c))?;
    let (name, rest) = line.split_at_checked(end)?;
    if name.is_empty() {
        return None;
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// The labels up to the closing brace, and the rest of the line.
fn labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, after) = rest.split_once("=\"")?;
        let (mut value, mut characters) = (String::new(), after.char_indices());
        let end = loop {
            match characters.next()? {
                (at, '"') => break at,
                (_, '\\') => match characters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.push((name.trim().to_owned(), value));
        rest = after.get(end + 1..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_labels_and_values() {
        let text = "# TYPE a counter\na_total{tier=\"disk \\\"x\\\"\",group=\"0\"} 12 1700000000\nb 1.5e3\n# EOF\n";
        let samples = parse(text).unwrap();
        assert_eq!(samples.len(), 2);
        assert_eq!((samples[0].name.as_str(), samples[0].value), ("a_total", 12.0));
        assert_eq!(samples[0].label("tier"), Some("disk \"x\""));
        assert_eq!(samples[0].label("group"), Some("0"));
        assert_eq!((samples[1].value, samples[1].label("tier")), (1500.0, None));
    }

    #[test]
    fn other_texts_are_refused_with_the_line() {
        for text in ["a b c", "{} 1", "a{tier=\"x} 1", "a", "a{tier} 1", "<html>"] {
            let error = parse(&format!("a 1\n{text}\n")).unwrap_err();
            assert_eq!(error.line, 2, "{text}");
            assert!(error.to_string().contains("export_metrics"));
        }
    }
}
