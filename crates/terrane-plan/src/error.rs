//! Errors of a plan.

use terrane_core::{ByteCount, SizeOverflow};
use terrane_layout::LayoutError;

/// The reason why a plan could not be created. Each message is one line that states the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No published model has this name.
    #[error("there is no model {name:?}{}; list the names with `terrane plan --list`, or pass a config.json", suggestion(.nearest))]
    UnknownModel {
        /// The name.
        name: String,
        /// The nearest known name.
        nearest: Option<String>,
    },
    /// No profile has this name.
    #[error("there is no machine {name:?}{}; the profiles are {}; or pass a file", suggestion(.nearest), .known.join(", "))]
    UnknownMachine {
        /// The name.
        name: String,
        /// The nearest known name.
        nearest: Option<String>,
        /// The known names.
        known: Vec<&'static str>,
    },
    /// A machine's description is not valid.
    #[error(
        "the machine {name:?} cannot be read: {source}; compare with the files of `terrane plan --show-machine h200`"
    )]
    Machine {
        /// The name or the file.
        name: String,
        /// The parser's error, with line and column.
        #[source]
        source: serde_json::Error,
    },
    /// The model's configuration cannot be read, or does not fit the request.
    #[error("{model}: {source}")]
    Model {
        /// The model.
        model: String,
        /// The cause.
        #[source]
        source: LayoutError,
    },
    /// A tier has less memory than one block.
    #[error(
        "the tier {tier} has {given}, and one block of every group takes {needed}; give it at least that"
    )]
    TierTooSmall {
        /// The tier.
        tier: String,
        /// Its bytes on one rank.
        given: ByteCount,
        /// The bytes of one block of every group.
        needed: ByteCount,
    },
    /// A tier has more memory than the largest layout can have blocks for.
    #[error(
        "the tier {tier} has {given}, and the most blocks of a layout take {largest}; give it less, or use several \
         directories"
    )]
    TierTooLarge {
        /// The tier.
        tier: String,
        /// Its bytes on one rank.
        given: ByteCount,
        /// The bytes of the most blocks.
        largest: ByteCount,
    },
    /// A number is out of range.
    #[error("{name} is {value}; pass {expected}")]
    OutOfRange {
        /// The name of the number.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The valid values.
        expected: &'static str,
    },
    /// One of two dependent numbers was passed without the other.
    #[error("{given} was passed without {missing}; pass both, or neither")]
    Incomplete {
        /// The number that was passed.
        given: &'static str,
        /// The missing number.
        missing: &'static str,
    },
    /// A text is not a size.
    #[error(
        "{text:?} is not a size; write a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 256GiB"
    )]
    Size {
        /// The text.
        text: String,
    },
    /// A text is not a number of tokens.
    #[error(
        "{text:?} is not a number; write digits, with k or M for 1,024 or 1,048,576, such as 128k"
    )]
    Count {
        /// The text.
        text: String,
    },
    /// A trace has a line that is not valid.
    #[error(
        "line {line} of the trace is not valid: {reason}; a line has the keys of a request, or is a JSON object with `hash_ids`"
    )]
    Trace {
        /// The line, counted from 1.
        line: usize,
        /// The defect.
        reason: String,
    },
    /// A trace has no key.
    #[error("the trace has no key; a line has the keys of a request, separated by spaces")]
    EmptyTrace,
    /// A size does not fit in 64 bits.
    #[error("{0}; use smaller sizes")]
    Overflow(#[from] SizeOverflow),
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |name| format!("; did you mean {name:?}?"))
}

/// The known name with the most similar spelling, if one is similar.
pub(crate) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    let name = name.to_lowercase();
    let scored =
        known.map(|candidate| (strsim::jaro_winkler(&name, &candidate.to_lowercase()), candidate));
    let (score, best) = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (score >= 0.8).then(|| best.to_owned())
}
