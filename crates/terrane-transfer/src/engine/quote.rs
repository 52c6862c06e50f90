//! Quotes of engines, and the decisions that they carry.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A decision how an engine copies one plan. The transfer manager returns it to the engine with the
/// job ([`CopyJob::decision`](crate::CopyJob::decision)).
///
/// Its texts are formatted only when an [`Explanation`](crate::Explanation) is read.
///
/// Reports keep the decision after the transfer has ended. So it contains plain values, and no
/// memory, endpoint or engine.
pub trait Decision: Any + fmt::Debug + Send + Sync {
    /// The path: `"streaming copy"`, `"direct vectored"`.
    fn path(&self) -> Cow<'_, str>;

    /// A constant name of the path, under which transfers are
    /// [counted](crate::TransferManager::snapshot).
    fn label(&self) -> &'static str {
        "other"
    }

    /// The reason why the engine chose this path.
    fn reason(&self) -> Cow<'_, str>;
}

/// The decision of an engine that has one path only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnlyPath {
    /// The path.
    pub path: &'static str,
    /// The reason why the engine copies by it.
    pub reason: &'static str,
}

impl Decision for OnlyPath {
    fn path(&self) -> Cow<'_, str> {
        self.path.into()
    }

    fn label(&self) -> &'static str {
        self.path
    }

    fn reason(&self) -> Cow<'_, str> {
        self.reason.into()
    }
}

/// The answer of an engine that can copy a plan: its decision, and the predicted time.
#[derive(Clone, Debug, PartialEq)]
pub struct Quote {
    /// The predicted time of the copy, from its start.
    pub predicted: Duration,
    pub(crate) decision: SharedDecision,
}

impl Quote {
    /// A quote with a decision about this plan.
    #[must_use]
    pub fn new(predicted: Duration, decision: impl Decision) -> Self {
        Self { predicted, decision: SharedDecision::Owned(Arc::new(decision)) }
    }

    /// A quote with a constant decision, such as a variant of an enum. It allocates nothing.
    #[must_use]
    pub fn constant(predicted: Duration, decision: &'static dyn Decision) -> Self {
        Self { predicted, decision: SharedDecision::Constant(decision) }
    }

    /// The text of the decision's path.
    #[must_use]
    pub fn path(&self) -> Cow<'_, str> {
        self.decision.get().path()
    }

    /// The text of the reason.
    #[must_use]
    pub fn reason(&self) -> Cow<'_, str> {
        self.decision.get().reason()
    }
}

/// The error for a job whose decision has another type than its engine's. Another engine created
/// the quote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the job carries a decision of another engine ({path}); submit it to the engine whose quote it has"
)]
pub struct ForeignDecision {
    /// The path of that decision.
    pub path: String,
}

/// A decision that the quote, the job and the report of a transfer share.
#[derive(Clone)]
pub(crate) enum SharedDecision {
    Constant(&'static dyn Decision),
    Owned(Arc<dyn Decision>),
}

impl SharedDecision {
    pub(crate) fn get(&self) -> &dyn Decision {
        match self {
            Self::Constant(decision) => *decision,
            Self::Owned(decision) => &**decision,
        }
    }

    /// The decision, if it has this type.
    pub(crate) fn downcast<T: Decision>(&self) -> Result<&T, ForeignDecision> {
        let decision = self.get();
        let any: &dyn Any = decision;
        any.downcast_ref().ok_or_else(|| ForeignDecision { path: decision.path().into_owned() })
    }
}

/// Decisions are equal if their texts are equal.
impl PartialEq for SharedDecision {
    fn eq(&self, other: &Self) -> bool {
        let (one, other) = (self.get(), other.get());
        one.path() == other.path() && one.reason() == other.reason()
    }
}

impl fmt::Debug for SharedDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}
