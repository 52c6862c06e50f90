//! The output of the command.

use std::io::{self, Write};

use serde::Serialize;

use crate::error::Failure;

/// Standard output and standard error, or a test's buffers.
pub(crate) struct Output<'a> {
    out: Box<dyn Write + 'a>,
    error: Box<dyn Write + 'a>,
    has_progress: bool,
}

impl<'a> Output<'a> {
    pub(crate) fn standard() -> Self {
        Self::new(io::stdout(), io::stderr(), true)
    }

    /// With progress, a bar may be drawn on the process's standard error.
    pub(crate) fn new(out: impl Write + 'a, error: impl Write + 'a, has_progress: bool) -> Self {
        Self { out: Box::new(out), error: Box::new(error), has_progress }
    }

    /// Prints text that ends with a line break.
    ///
    /// If the reader has closed the pipe, as `head` does, the text is dropped. The exit status
    /// still has the verdict.
    pub(crate) fn text(&mut self, text: &str) -> Result<(), Failure> {
        let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        match written {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => Ok(written?),
        }
    }

    /// Prints a value as JSON.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(value)?;
        self.text(&format!("{text}\n"))
    }

    /// Prints a line to standard error. If this fails, the error cannot be reported.
    pub(crate) fn error_line(&mut self, line: &str) {
        let _ = writeln!(self.error, "{line}");
    }

    pub(crate) fn has_progress(&self) -> bool {
        self.has_progress
    }
}
