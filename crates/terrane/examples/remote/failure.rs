//! What can go wrong, and with which exit code that ends the program.

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
    #[error("{mismatches} of {bytes} bytes that decode looked at are not what they should be")]
    Mismatch { mismatches: u64, bytes: u64 },
    #[error(
        "there is no model {name:?}, and no file of that name; give the path of a model's \
             config.json, or one of {known}"
    )]
    UnknownModel { name: String, known: String },
    #[error("{path:?} could not be read; give the path of a model's config.json")]
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
    #[error("there are {layers} layers, so that {asked} cannot be moved; use fewer `--layers`")]
    TooManyLayers { asked: u32, layers: u32 },
    #[error("{blocks} blocks are more than can be numbered twice over; use fewer")]
    TooManyIds { blocks: u32 },
    #[error(
        "NIXL cannot be used here; in its repository `cargo xtask nixl` fetches it, and docs/nixl.md says more"
    )]
    Nixl(#[source] NixlError),
    #[error("there is no GPU to use here; `--tier system` works without one")]
    NoGpu(#[source] CudaError),
    #[error("the device does not do what is needed of it; `--tier system` works without it")]
    Device(#[source] CudaError),
    #[error("the blocks' memory could not be brought up and registered; use fewer `--blocks`")]
    Tier(#[source] LayoutError),
    #[error("the other process could not be started")]
    Start(#[source] io::Error),
    #[error("the other process has ended: {0}")]
    PeerEnded(ExitStatus),
    #[error("the other process does not answer, or not as it should")]
    Channel(#[source] io::Error),
    #[error("the other process has not said that the blocks have arrived")]
    NoNotification,
    #[error("the layout could not be described for the other process")]
    Export(#[from] ExportError),
    #[error("the other process's layout could not be taken")]
    Import(#[from] ImportError),
    #[error("the memory is in use")]
    InUse(#[from] BytesInUse),
    #[error("a transfer was refused or failed")]
    Transfer(#[from] TransferError),
    #[error("the blocks could not be filled in or looked at")]
    Pattern(#[from] PatternError),
    #[error("the sizes are too large")]
    Size(#[from] SizeOverflow),
    #[error("standard output could not be written")]
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
            // What ended it, ends this.
            Self::PeerEnded(status) => {
                status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1).max(1)
            }
            _ => 1,
        }
    }

    /// Whether somebody has heard of it already, or nobody listens any more.
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
