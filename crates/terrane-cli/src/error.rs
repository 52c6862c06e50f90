//! Failures of commands, and the exit statuses.

use std::path::PathBuf;

use terrane_core::ByteCount;
use terrane_plan::PlanError;
use terrane_storage::StorageError;
use terrane_transfer::TransferError;

/// The exit statuses of the command. They are stable: scripts may rely on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExitStatus {
    /// 0: the command succeeded.
    Success,
    /// 1: the system refused an operation, such as reading a file.
    Failure,
    /// 2: the arguments, or a file that they name, are not valid.
    Usage,
    /// 3: the machine lacks a capability that `doctor --require` lists.
    Missing,
    /// 4: the plan exceeds a limit of the machine, and `plan --check` was given.
    LimitHit,
    /// 5: data is damaged.
    Damaged,
}

impl ExitStatus {
    /// The number.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failure => 1,
            Self::Usage => 2,
            Self::Missing => 3,
            Self::LimitHit => 4,
            Self::Damaged => 5,
        }
    }
}

/// The reason why a command failed. Each message is one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("{}: {source}; {}", .path.display(), remedy(source))]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} cannot be written: {source}; {}", .path.display(), remedy(source))]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "standard output cannot be written: {0}; check the file or the program that receives it"
    )]
    Output(#[from] std::io::Error),
    #[error("{0}")]
    Usage(String),
    #[error("{} is not a report of `{command}`: {source}; pass a file that it wrote with --json", .path.display())]
    Report {
        path: PathBuf,
        command: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("the result cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{}", chain(.0))]
    Storage(#[from] StorageError),
    #[error("{}", chain(.0))]
    Transfer(#[from] TransferError),
    #[error("{}", chain(.0))]
    Cuda(#[from] terrane_cuda::CudaError),
    #[error("{}", chain(.0))]
    Layout(#[from] terrane_layout::LayoutError),
    #[error(transparent)]
    Endpoint(#[from] terrane_transfer::BytesInUse),
    #[error(transparent)]
    Os(#[from] terrane_core::OsError),
    #[error("{size} of {what} are too few for {needed}; pass at least that as --size")]
    TooSmall { what: &'static str, size: ByteCount, needed: ByteCount },
    #[error("{}", chain(.0))]
    Store(#[from] terrane_store::StoreError),
    #[error("{url}: {reason}")]
    Http { url: String, reason: String },
    #[error("a block of the store ended as {0}; check the directory's disk and its free space")]
    Block(String),
    #[error(transparent)]
    Metrics(#[from] crate::commands::top::NoMetric),
    #[error("the plot cannot be drawn: {0}")]
    Plot(String),
}

impl Failure {
    pub(crate) fn status(&self) -> ExitStatus {
        match self {
            Self::Plan(_)
            | Self::Usage(_)
            | Self::Metrics(_)
            | Self::Report { .. }
            | Self::TooSmall { .. } => ExitStatus::Usage,
            _ => ExitStatus::Failure,
        }
    }

    /// Whether the reader of the output has closed the pipe, as `head` does.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe)
    }
}

/// An error with its causes, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::NotFound => "check the path",
        std::io::ErrorKind::PermissionDenied => "request the permission, or use another path",
        std::io::ErrorKind::IsADirectory => "give a file",
        std::io::ErrorKind::NotADirectory => "give a directory",
        std::io::ErrorKind::StorageFull => "free space there, or use another path",
        _ => "check the path and its permissions",
    }
}
