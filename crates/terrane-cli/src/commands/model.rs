//! The arguments that several commands share: the model, its ranks and its blocks.

use std::path::Path;

use clap::{Args, ValueEnum};
use terrane_layout::ElementFormat;
use terrane_plan::{Model, PlanRequest};

use crate::commands::files;
use crate::error::Failure;

/// The model, its ranks and its blocks.
#[derive(Args, Debug)]
pub(crate) struct ModelArguments {
    /// The name of a published model (`terrane plan --list`), a config.json, or a folder that
    /// contains one
    pub model: Option<String>,
    /// Tensor-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tp: u32,
    /// The format of K and V, if it is not that of the configuration
    #[arg(long, value_name = "FORMAT")]
    pub kv_dtype: Option<KvFormat>,
    /// Tokens of a block
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    pub block: u32,
}

/// The formats of K and V, with the names of serving engines.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum KvFormat {
    Fp8,
    Bf16,
    Fp16,
    Fp32,
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

impl KvFormat {
    fn element(self) -> ElementFormat {
        match self {
            Self::Fp8 => ElementFormat::Width(1),
            Self::Bf16 | Self::Fp16 => ElementFormat::Width(2),
            Self::Fp32 => ElementFormat::Width(4),
            Self::Mxfp4 => ElementFormat::MXFP4,
            Self::Mxfp8 => ElementFormat::MXFP8,
            Self::Nvfp4 => ElementFormat::NVFP4,
        }
    }
}

impl ModelArguments {
    /// A request with the model, the ranks and the blocks.
    pub(crate) fn request(&self) -> Result<PlanRequest, Failure> {
        let Some(name) = &self.model else {
            let text =
                "no model was named; pass a name from `terrane plan --list`, or a config.json";
            return Err(Failure::Usage(text.to_owned()));
        };
        let mut request = PlanRequest::new(load(name)?);
        request.tensor_parallel = self.tp;
        request.kv_element = self.kv_dtype.map(KvFormat::element);
        request.block_tokens = self.block;
        request.chunk_tokens = 256_u32.next_multiple_of(self.block.clamp(1, 65_536));
        Ok(request)
    }
}

/// Loads a file or a folder if it exists, else a published model. Names of published models do not
/// begin with a slash or a dot.
fn load(name: &str) -> Result<Model, Failure> {
    let path = Path::new(name);
    let is_file = name.to_lowercase().ends_with(".json") || name.starts_with(['.', '/']);
    if path.is_dir() {
        return Ok(Model::from_config(name, files::read(&path.join("config.json"))?));
    }
    if is_file || path.is_file() {
        return Ok(Model::from_config(name, files::read(path)?));
    }
    Ok(Model::published(name)?)
}
