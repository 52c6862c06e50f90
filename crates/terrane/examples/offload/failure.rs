//! The errors of the example, each with its exit code.

use std::io;
use std::path::PathBuf;

use terrane::core::{ByteCount, OsError, SizeOverflow};
use terrane::cuda::CudaError;
use terrane::layout::LayoutError;
use terrane::storage::StorageError;
use terrane::transfer::{BytesInUse, Rejected, TransferError};
use terrane_testkit::pattern::PatternError;

/// The reason why the example ends early or reports a failure at its end.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{failed} of {hops} hops produced wrong bytes; see the notes above")]
    Mismatch { failed: usize, hops: usize },
    #[error(
        "there is no model {name:?}, and no file of that name; give the path of a model's \
             config.json, or one of {known}"
    )]
    UnknownModel { name: String, known: String },
    #[error("cannot read {path:?}; pass the path of a model's config.json")]
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
    #[error(
        "{needed} of memory are needed over all tiers to move {blocks} blocks, and {available} are \
         available; {}", advice(*.fitting)
    )]
    TooManyBlocks { blocks: u32, needed: ByteCount, available: ByteCount, fitting: u64 },
    #[error("{blocks} blocks are too many, because each needs two ids of 32 bits; use fewer")]
    TooManyIds { blocks: u32 },
    #[error("the directory {directory:?} cannot hold the disk tier")]
    Disk {
        directory: PathBuf,
        #[source]
        source: Box<StorageError>,
    },
    #[error("cannot allocate the {tier} tier")]
    Tier {
        tier: &'static str,
        #[source]
        source: LayoutError,
    },
    #[error("cannot run the copies for comparison")]
    Limit(#[source] StorageError),
    #[error("cannot start the engine for {what}")]
    Engine {
        what: &'static str,
        #[source]
        source: StorageError,
    },
    #[error("a GPU is required, but none can be used")]
    NoGpu(#[source] CudaError),
    #[error("the device failed; use `--without gpu` to run without a device")]
    Device(#[source] CudaError),
    #[error("cannot start the copy threads")]
    Threads(#[source] OsError),
    #[error("the memory of a tier is in use")]
    InUse(#[from] BytesInUse),
    #[error("a transfer was refused or failed")]
    Transfer(#[from] TransferError),
    #[error("cannot write or read the blocks")]
    Pattern(#[from] PatternError),
    #[error("the sizes are too large")]
    Size(#[from] SizeOverflow),
    #[error("cannot write to standard output")]
    Output(#[from] io::Error),
}

impl Failure {
    /// 1: bytes are wrong, or a transfer failed; 2: invalid options; 3: a missing resource of the
    /// machine.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::UnknownModel { .. } | Self::ModelFile { .. } | Self::Model { .. } => 2,
            Self::TooManyIds { .. } | Self::Size(_) => 2,
            Self::TooManyBlocks { .. }
            | Self::Disk { .. }
            | Self::Tier { .. }
            | Self::Limit(_)
            | Self::Engine { .. }
            | Self::NoGpu(_)
            | Self::Device(_)
            | Self::Threads(_) => 3,
            Self::Mismatch { .. }
            | Self::InUse(_)
            | Self::Transfer(_)
            | Self::Pattern(_)
            | Self::Output(_) => 1,
        }
    }

    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl<G> From<Rejected<G>> for Failure {
    fn from(rejected: Rejected<G>) -> Self {
        Self::Transfer(rejected.cause)
    }
}

fn advice(fitting: u64) -> String {
    match fitting {
        0 => "not one block fits: use a smaller `--page-size`, or more ranks".to_owned(),
        blocks => format!("`--blocks {blocks}` would fit"),
    }
}
