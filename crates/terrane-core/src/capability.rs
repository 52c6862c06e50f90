//! Requested capabilities and their results, as values.
//!
//! A machine rarely grants everything: huge pages run out, a container forbids NUMA binding, a file
//! system does not support direct I/O. Each such degradation is an entry in a [`CapabilityReport`].
//! For a [`Requirement::Required`] it is an error.

use std::fmt;

use smallvec::SmallVec;

use crate::bytes::byte_count::ByteCount;
use crate::os_error::OsError;
use crate::register::names::BackendName;

/// A capability that a machine may or may not offer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// Explicitly reserved huge pages (hugetlbfs).
    ExplicitHugePages,
    /// Huge pages that the kernel assembles by itself.
    TransparentHugePages,
    /// Memory bound to a NUMA node.
    NumaBinding,
    /// Pages first touched by several threads at once.
    ParallelFirstTouch,
    /// Threads with an affinity to the CPUs of one NUMA node while they touch its pages.
    ThreadAffinity,
    /// Reads and writes that bypass the page cache.
    DirectIo,
    /// Requests queued through io_uring.
    IoUring,
    /// Memory whose pages the kernel pins once for all requests of an io_uring queue.
    RegisteredBuffers,
    /// Disk blocks reserved before they are written.
    Preallocation,
    /// A scratch file that never has a name (`O_TMPFILE`).
    UnnamedFile,
    /// Mapped memory that the driver registers for a device, instead of memory that the driver
    /// allocates.
    HostRegistration,
    /// Kernels that copy on a device. The driver has to compile them.
    CopyKernels,
    /// Kernels that compute checksums on a device, loaded when a transfer first needs them.
    ChecksumKernels,
    /// RDMA libraries that come with a communication library, loaded separately from the machine's.
    SeparateRdmaLibraries,
    /// Metadata of peers checked before a communication library reads it.
    CheckedMetadata,
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
            Self::RegisteredBuffers => "registered buffers",
            Self::Preallocation => "preallocation",
            Self::UnnamedFile => "unnamed file",
            Self::HostRegistration => "registration with the device's driver",
            Self::CopyKernels => "copy kernels",
            Self::ChecksumKernels => "checksum kernels",
            Self::SeparateRdmaLibraries => "RDMA libraries apart from the machine's",
            Self::CheckedMetadata => "checks of peers' metadata",
            Self::Registration(backend) => return write!(f, "registration with {backend}"),
        })
    }
}

/// How strongly a caller requests a capability.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Requirement {
    /// Not requested, and not tried.
    Off,
    /// Used if available. Otherwise the report has the reason.
    #[default]
    Preferred,
    /// Required. If it is not granted, the call fails and frees what it allocated.
    Required,
}

/// The result of a request for a capability.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CapabilityStatus {
    /// Not requested, so not tried.
    NotTried,
    /// Granted in full.
    Granted,
    /// Granted for some of the bytes.
    Partial {
        /// The bytes with the capability.
        granted: ByteCount,
        /// The total number of bytes.
        of: ByteCount,
    },
    /// Not granted.
    Refused(Reason),
}

impl CapabilityStatus {
    /// The status after an attempt; `None` if there was none.
    #[must_use]
    pub const fn of<T>(attempt: Option<&Result<T, Reason>>) -> Self {
        match attempt {
            None => Self::NotTried,
            Some(Ok(_)) => Self::Granted,
            Some(Err(reason)) => Self::Refused(*reason),
        }
    }
}

/// Why a capability was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// A system call failed.
    Os(OsError),
    /// A call of a device driver failed.
    Driver {
        /// The call, as the driver names it.
        operation: &'static str,
        /// The driver's code.
        code: u32,
    },
    /// The kernel, file system or driver does not support it.
    Unsupported {
        /// The part without support: `"the file system"`, `"the kernel"`.
        by: &'static str,
    },
    /// An administrator has disabled it.
    Disabled {
        /// The setting: a path under `/sys` or `/proc`, or a configuration key.
        by: &'static str,
    },
    /// Too little of a resource is left.
    Exhausted {
        /// The bytes that are needed.
        needed: ByteCount,
        /// The bytes that are left.
        available: ByteCount,
    },
    /// The capability needs another capability, which was not requested or not granted.
    Needs(&'static str),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Os(error) => fmt::Display::fmt(error, f),
            Self::Driver { operation, code } => write!(f, "{operation} returned {code}"),
            Self::Unsupported { by } => write!(f, "{by} does not support it"),
            Self::Disabled { by } => write!(f, "it is disabled by {by}"),
            Self::Exhausted { needed, available } => {
                write!(f, "{needed} needed, {available} available")
            }
            Self::Needs(what) => write!(f, "it needs {what}"),
        }
    }
}

/// One request for a capability and its result.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CapabilityOutcome {
    /// The capability.
    pub capability: Capability,
    /// How strongly it was requested.
    pub requirement: Requirement,
    /// The result.
    pub status: CapabilityStatus,
}

impl fmt::Display for CapabilityOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.capability)?;
        match &self.status {
            CapabilityStatus::NotTried => f.write_str("not requested"),
            CapabilityStatus::Granted => f.write_str("granted"),
            CapabilityStatus::Partial { granted, of } => write!(f, "granted for {granted} of {of}"),
            CapabilityStatus::Refused(reason) => write!(f, "refused ({reason})"),
        }
    }
}

/// The results of all capability requests of one operation, in the order in which they were tried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CapabilityReport {
    outcomes: SmallVec<[CapabilityOutcome; 4]>,
}

impl CapabilityReport {
    /// Adds a result.
    pub fn record(
        &mut self,
        capability: Capability,
        requirement: Requirement,
        status: CapabilityStatus,
    ) {
        self.outcomes.push(CapabilityOutcome { capability, requirement, status });
    }

    /// All results.
    #[must_use]
    pub fn outcomes(&self) -> &[CapabilityOutcome] {
        &self.outcomes
    }

    /// The latest result for one capability. `None` if there is no entry.
    #[must_use]
    pub fn status(&self, capability: &Capability) -> Option<&CapabilityStatus> {
        self.outcomes.iter().rev().find(|o| o.capability == *capability).map(|o| &o.status)
    }

    /// The requested capabilities that were not granted in full.
    pub fn degradations(&self) -> impl Iterator<Item = &CapabilityOutcome> {
        self.outcomes.iter().filter(|o| {
            matches!(o.status, CapabilityStatus::Refused(_) | CapabilityStatus::Partial { .. })
        })
    }

    /// Checks that no required capability was refused, or granted for some bytes only.
    ///
    /// # Errors
    ///
    /// Returns [`CapabilityMissing`] with the first requirement that was not met.
    pub fn check(&self) -> Result<(), CapabilityMissing> {
        match self.degradations().find(|o| o.requirement == Requirement::Required) {
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
#[error("a required capability is missing: {outcome}; provide it, or request it as `Preferred`")]
pub struct CapabilityMissing {
    /// The requirement and its result.
    pub outcome: CapabilityOutcome,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requirement_is_an_error_and_a_preference_is_not() {
        let refused = CapabilityStatus::Refused(Reason::Disabled {
            by: "/proc/sys/kernel/io_uring_disabled",
        });
        let mut report = CapabilityReport::default();
        report.record(Capability::IoUring, Requirement::Preferred, refused.clone());
        report.record(Capability::DirectIo, Requirement::Required, CapabilityStatus::Granted);
        assert_eq!(report.check(), Ok(()));
        assert_eq!(report.degradations().count(), 1);

        report.record(Capability::NumaBinding, Requirement::Required, refused);
        let error = report.check().unwrap_err();
        assert_eq!(error.outcome.capability, Capability::NumaBinding);
        assert!(error.to_string().contains("io_uring_disabled"), "{error}");
    }

    #[test]
    fn partial_does_not_satisfy_a_requirement() {
        let mut report = CapabilityReport::default();
        let status =
            CapabilityStatus::Partial { granted: ByteCount::mib(2), of: ByteCount::mib(4) };
        report.record(Capability::TransparentHugePages, Requirement::Required, status);
        assert!(report.check().is_err());
    }
}
