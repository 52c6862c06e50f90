//! The errors of the example, each with its exit code.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use terrane::core::SizeOverflow;
use terrane::cuda::CudaError;
use terrane::layout::LayoutError;
use terrane::nixl::{ExportError, ImportError, NixlError};
use terrane::transfer::{BytesInUse, Rejected, TransferError};
use terrane_testkit::pattern::PatternError;

/// The reason why the example ends early or reports a failure at its end.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{mismatches} of {bytes} bytes that decode checked are wrong")]
    Mismatch { mismatches: u64, bytes: u64 },
    #[error(
        "there is no model {name:?}, and no file of that name; give the path of a model's \
             config.json, or one of {known}"
    )]
    UnknownModel { name: String, known: String },
    #[error("cannot read {path:?}; give the path of a model's config.json")]
    ModelFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the cache of {name} cannot be laid out like this")]
    Model {
        name: String,
        #[source]
        source: LayoutError,
    },
    #[error("cannot move {requested} layers, because the model has {layers}; use fewer `--layers`")]
    TooManyLayers { requested: u32, layers: u32 },
    #[error("{blocks} blocks are too many, because each needs two ids of 32 bits; use fewer")]
    TooManyIds { blocks: u32 },
    #[error(
        "NIXL cannot be loaded; in the repository, `cargo xtask nixl` downloads it (see docs/nixl.md)"
    )]
    Nixl(#[source] NixlError),
    #[error("no GPU is available; use `--tier system`")]
    NoGpu(#[source] CudaError),
    #[error("the device failed; use `--tier system` to run without a device")]
    Device(#[source] CudaError),
    #[error("cannot allocate and register the memory of the blocks; use fewer `--blocks`")]
    Tier(#[source] LayoutError),
    #[error("cannot start the other process")]
    Start(#[source] io::Error),
    #[error("the other process has ended: {0}")]
    PeerEnded(ExitStatus),
    #[error("the other process did not answer as expected")]
    Channel(#[source] io::Error),
    #[error("the other process did not report that the blocks arrived")]
    NoNotification,
    #[error("cannot describe the layout for the other process")]
    Export(#[from] ExportError),
    #[error("cannot import the layout of the other process")]
    Import(#[from] ImportError),
    #[error("the memory is in use")]
    InUse(#[from] BytesInUse),
    #[error("a transfer was refused or failed")]
    Transfer(#[from] TransferError),
    #[error("cannot write or read the blocks")]
    Pattern(#[from] PatternError),
    #[error("the sizes are too large")]
    Size(#[from] SizeOverflow),
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
}

impl Failure {
    /// 1: bytes are wrong, or a transfer failed; 2: invalid options; 3: a missing resource of the
    /// machine.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::UnknownModel { .. }
            | Self::ModelFile { .. }
            | Self::Model { .. }
            | Self::TooManyLayers { .. }
            | Self::TooManyIds { .. }
            | Self::Size(_) => 2,
            Self::Nixl(_) | Self::NoGpu(_) | Self::Device(_) | Self::Tier(_) | Self::Start(_) => 3,
            // The exit code of the other process becomes the exit code of this one.
            Self::PeerEnded(status) => {
                status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1).max(1)
            }
            _ => 1,
        }
    }

    /// Whether the other process has printed the failure already, or the output has no reader.
    pub fn is_already_printed(&self) -> bool {
        match self {
            Self::Output(error) => error.kind() == io::ErrorKind::BrokenPipe,
            // The other process printed the reason to the same terminal, unless it was killed.
            Self::PeerEnded(status) => status.code().is_some(),
            // The other process has ended, and printed the reason if it failed.
            Self::Channel(error) => error.kind() == io::ErrorKind::UnexpectedEof,
            _ => false,
        }
    }
}

impl From<NixlError> for Failure {
    fn from(error: NixlError) -> Self {
        Self::Nixl(error)
    }
}

impl<G> From<Rejected<G>> for Failure {
    fn from(rejected: Rejected<G>) -> Self {
        Self::Transfer(rejected.cause)
    }
}
