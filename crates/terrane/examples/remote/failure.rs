//! The errors of the program, each with its exit code.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use terrane::core::SizeOverflow;
use terrane::cuda::CudaError;
use terrane::layout::LayoutError;
use terrane::nixl::{ExportError, ImportError, NixlError};
use terrane::transfer::{BytesInUse, Rejected, TransferError};
use terrane_testkit::pattern::PatternError;

/// Why the program ends early, or in the end says that it failed.
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
    #[error("cannot move {asked} layers, as there are {layers}; use fewer `--layers`")]
    TooManyLayers { asked: u32, layers: u32 },
    #[error("{blocks} blocks are too many, because each needs two ids of 32 bits; use fewer")]
    TooManyIds { blocks: u32 },
    #[error(
        "NIXL cannot be used here; in its repository `cargo xtask nixl` fetches it, and docs/nixl.md says more"
    )]
    Nixl(#[source] NixlError),
    #[error("no GPU is available; `--tier system` needs none")]
    NoGpu(#[source] CudaError),
    #[error("the device failed; `--tier system` needs none")]
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
    /// 1: bytes are wrong, or a transfer failed; 2: the options; 3: the machine.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::UnknownModel { .. }
            | Self::ModelFile { .. }
            | Self::Model { .. }
            | Self::TooManyLayers { .. }
            | Self::TooManyIds { .. }
            | Self::Size(_) => 2,
            Self::Nixl(_) | Self::NoGpu(_) | Self::Device(_) | Self::Tier(_) | Self::Start(_) => 3,
            // The exit code of the other process is that of this one.
            Self::PeerEnded(status) => {
                status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1).max(1)
            }
            _ => 1,
        }
    }

    /// Whether the failure has been printed already, or no reader of the output is left.
    pub fn is_said_already(&self) -> bool {
        match self {
            Self::Output(error) => error.kind() == io::ErrorKind::BrokenPipe,
            // It said why on the same terminal, unless it was killed.
            Self::PeerEnded(status) => status.code().is_some(),
            // Then the other process has ended, and says why if it was its own fault.
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
