//! The findings of a probe.

use serde::{Deserialize, Serialize};
use terrane_core::{CapabilityReport, CapabilityStatus};

/// A capability of the machine, or the reason why it is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finding {
    /// A stable name, which `--require` accepts.
    pub key: String,
    /// Its subject: a directory, a device.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub subject: Option<String>,
    pub status: Status,
    /// The figures, or the reason.
    pub detail: String,
    /// The remedy.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub remedy: Option<String>,
}

/// The result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// Granted in full.
    Granted,
    /// Granted in part: the capability works, but is slower or smaller than possible.
    Partial,
    /// Not granted.
    Refused,
}

impl Status {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Partial => "partial",
            Self::Refused => "refused",
        }
    }
}

impl Finding {
    pub(crate) fn granted(key: &str, detail: impl Into<String>) -> Self {
        let (key, detail) = (key.to_owned(), detail.into());
        Self { key, subject: None, status: Status::Granted, detail, remedy: None }
    }

    pub(crate) fn partial(key: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { status: Status::Partial, remedy, ..Self::granted(key, detail) }
    }

    pub(crate) fn refused(key: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Refused, ..Self::partial(key, detail, remedy) }
    }

    pub(crate) fn about(self, subject: impl Into<String>) -> Self {
        Self { subject: Some(subject.into()), ..self }
    }

    /// The findings from a report of capabilities. `name` returns the key and the remedy of a
    /// relevant one.
    pub(crate) fn of_report(
        report: &CapabilityReport,
        name: impl Fn(&terrane_core::Capability) -> Option<(&'static str, &'static str)>,
    ) -> Vec<Self> {
        let outcomes = report.outcomes().iter().filter_map(|outcome| {
            let (key, remedy) = name(&outcome.capability)?;
            Some(match &outcome.status {
                CapabilityStatus::Granted => Self::granted(key, "works"),
                CapabilityStatus::Partial { granted, of } => {
                    Self::partial(key, format!("granted for {granted} of {of}"), remedy)
                }
                CapabilityStatus::Refused(reason) => Self::refused(key, reason.to_string(), remedy),
                _ => return None,
            })
        });
        outcomes.collect()
    }
}
