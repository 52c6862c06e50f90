//! What was wished for and what was granted, as values.
//!
//! A machine rarely grants everything: huge pages run out, a container forbids NUMA binding, a
//! file system knows no direct I/O. Each such degradation is an entry in a
//! [`CapabilityReport`], and a [`Wish::Required`] turns it into an error.

use std::fmt;

use smallvec::SmallVec;

use crate::{BackendName, ByteCount, OsError};

/// Something that a machine may or may not offer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// Explicitly reserved huge pages (hugetlbfs).
    ExplicitHugePages,
    /// Huge pages that the kernel assembles by itself.
    TransparentHugePages,
    /// Memory bound to a NUMA node.
    NumaBinding,
    /// Pages touched by several threads at once.
    ParallelFirstTouch,
    /// Threads kept on the CPUs of one NUMA node while they touch its pages.
    ThreadAffinity,
    /// Reads and writes around the page cache.
    DirectIo,
    /// Requests queued through io_uring.
    IoUring,
    /// Disk blocks reserved before they are written.
    Preallocation,
    /// A scratch file that has no name at any time (`O_TMPFILE`).
    UnnamedFile,
    /// Mapped memory locked for a device by its driver, in place of memory from the driver.
    HostRegistration,
    /// Kernels that copy on a device, which its driver has to compile.
    CopyKernels,
    /// RDMA libraries that come with a communication library, kept apart from the machine's.
    SeparateRdmaLibraries,
    /// Registration with one backend of an agent.
    Registration(BackendName),
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::ExplicitHugePages => "explicit huge pages",
            Self::TransparentHugePages => "transparent huge pages",
            Self::NumaBinding => "NUMA binding",
            Self::ParallelFirstTouch => "parallel first touch",
            Self::ThreadAffinity => "thread affinity",
            Self::DirectIo => "direct I/O",
            Self::IoUring => "io_uring",
            Self::Preallocation => "preallocation",
            Self::UnnamedFile => "unnamed file",
            Self::HostRegistration => "registration with the device's driver",
            Self::CopyKernels => "copy kernels",
            Self::SeparateRdmaLibraries => "RDMA libraries apart from the machine's",
            Self::Registration(backend) => return write!(f, "registration with {backend}"),
        })
    }
}

/// How much a caller wants something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wish {
    /// Not at all: it is not even tried.
    Off,
    /// If it can be had; otherwise the report says why not.
    #[default]
    Preferred,
    /// It must be had; otherwise the call fails and gives back what it took.
    Required,
}

/// What became of a wish.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Grant {
    /// Not wished for, so not tried.
    NotTried,
    /// Granted in full.
    Granted,
    /// Granted for some of the bytes.
    Partial {
        /// The bytes for which it was granted.
        granted: ByteCount,
        /// All the bytes.
        of: ByteCount,
    },
    /// Not granted.
    Refused(Reason),
}

/// Why something was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// A system call failed.
    Os(OsError),
    /// A call of a device's driver failed.
    Driver {
        /// The call, as the driver names it.
        operation: &'static str,
        /// The driver's code.
        code: u32,
    },
    /// The kernel, file system or driver does not offer it.
    Unsupported {
        /// What does not offer it: `"the file system"`, `"the kernel"`.
        by: &'static str,
    },
    /// It is there, but switched off by an administrator.
    Disabled {
        /// The switch: a path under `/sys` or `/proc`, a configuration key.
        by: &'static str,
    },
    /// Too little is left of it.
    Exhausted {
        /// What would be needed.
        needed: ByteCount,
        /// What is left.
        available: ByteCount,
    },
    /// It needs something that was itself not wished for or not granted.
    Needs(&'static str),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Os(error) => fmt::Display::fmt(error, f),
            Self::Driver { operation, code } => write!(f, "{operation}: the driver's code {code}"),
            Self::Unsupported { by } => write!(f, "{by} does not offer it"),
            Self::Disabled { by } => write!(f, "it is switched off by {by}"),
            Self::Exhausted { needed, available } => {
                write!(f, "{needed} needed, {available} available")
            }
            Self::Needs(what) => write!(f, "it needs {what}"),
        }
    }
}

/// One wish and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CapabilityOutcome {
    /// What was wished for.
    pub capability: Capability,
    /// How much.
    pub wish: Wish,
    /// What became of it.
    pub grant: Grant,
}

impl fmt::Display for CapabilityOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.capability)?;
        match &self.grant {
            Grant::NotTried => f.write_str("not asked for"),
            Grant::Granted => f.write_str("granted"),
            Grant::Partial { granted, of } => write!(f, "granted for {granted} of {of}"),
            Grant::Refused(reason) => write!(f, "refused ({reason})"),
        }
    }
}

/// Every wish of one operation with what became of it, in the order in which they were tried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CapabilityReport {
    outcomes: SmallVec<[CapabilityOutcome; 4]>,
}

impl CapabilityReport {
    /// Enters an outcome.
    pub fn record(&mut self, capability: Capability, wish: Wish, grant: Grant) {
        self.outcomes.push(CapabilityOutcome { capability, wish, grant });
    }

    /// Every outcome.
    #[must_use]
    pub fn outcomes(&self) -> &[CapabilityOutcome] {
        &self.outcomes
    }

    /// What became of one wish; the latest entry counts. `None` if it was never entered.
    #[must_use]
    pub fn grant(&self, capability: &Capability) -> Option<&Grant> {
        self.outcomes.iter().rev().find(|o| o.capability == *capability).map(|o| &o.grant)
    }

    /// The wishes that were not, or not fully, granted.
    pub fn degradations(&self) -> impl Iterator<Item = &CapabilityOutcome> {
        self.outcomes
            .iter()
            .filter(|o| matches!(o.grant, Grant::Refused(_) | Grant::Partial { .. }))
    }

    /// Checks that everything required was granted in full.
    ///
    /// # Errors
    ///
    /// [`CapabilityMissing`] with the first requirement that was not met.
    pub fn check(&self) -> Result<(), CapabilityMissing> {
        match self.degradations().find(|o| o.wish == Wish::Required) {
            Some(outcome) => Err(CapabilityMissing { outcome: outcome.clone() }),
            None => Ok(()),
        }
    }
}

impl fmt::Display for CapabilityReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for outcome in &self.outcomes {
            write!(f, "{separator}{outcome}")?;
            separator = "; ";
        }
        Ok(())
    }
}

impl Extend<CapabilityOutcome> for CapabilityReport {
    fn extend<I: IntoIterator<Item = CapabilityOutcome>>(&mut self, outcomes: I) {
        self.outcomes.extend(outcomes);
    }
}

/// A requirement that was not met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("required but not available: {outcome}; provide it, or prefer it instead of requiring it")]
pub struct CapabilityMissing {
    /// The requirement and what became of it.
    pub outcome: CapabilityOutcome,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requirement_is_an_error_and_a_preference_is_not() {
        let refused = Grant::Refused(Reason::Disabled { by: "/proc/sys/kernel/io_uring_disabled" });
        let mut report = CapabilityReport::default();
        report.record(Capability::IoUring, Wish::Preferred, refused.clone());
        report.record(Capability::DirectIo, Wish::Required, Grant::Granted);
        assert_eq!(report.check(), Ok(()));
        assert_eq!(report.degradations().count(), 1);

        report.record(Capability::NumaBinding, Wish::Required, refused);
        let error = report.check().unwrap_err();
        assert_eq!(error.outcome.capability, Capability::NumaBinding);
        assert!(error.to_string().contains("io_uring_disabled"), "{error}");
    }

    #[test]
    fn partial_does_not_satisfy_a_requirement() {
        let mut report = CapabilityReport::default();
        let grant = Grant::Partial { granted: ByteCount::mib(2), of: ByteCount::mib(4) };
        report.record(Capability::TransparentHugePages, Wish::Required, grant);
        assert!(report.check().is_err());
    }
}
