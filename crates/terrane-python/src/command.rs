//! The command `terrane`, plans, and the checksum for the benchmark.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use terrane_cli::Restart;
use terrane_core::ByteCount;
use terrane_layout::ElementFormat;
use terrane_plan::{DiskSpace, Machine, Model, Plan, PlanRequest};

use crate::errors::text;

/// Runs the command with its arguments; the first is its name. `program`, a Python interpreter, and `restart` start
/// the command in a child process. Returns the exit status.
#[pyfunction]
pub(crate) fn run_command(
    py: Python<'_>,
    arguments: Vec<OsString>,
    program: PathBuf,
    restart: Vec<OsString>,
) -> u8 {
    let restart = Restart::new(&program, restart).within_python(program);
    py.detach(|| terrane_cli::run(arguments, &restart).code())
}

/// The checksum of blocks on disk, for these bytes.
#[pyfunction]
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    terrane_core::checksum::crc64(bytes)
}

/// The arguments of Python's `plan`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct PlanArguments {
    /// A published model's name, or the text of a `config.json` with its name.
    model: String,
    config: Option<Vec<u8>>,
    tensor_parallel: u32,
    kv_dtype: Option<String>,
    block_tokens: u32,
    chunk_tokens: Option<u32>,
    gpu_memory: Option<u64>,
    host: Option<u64>,
    disks: Vec<(String, u64)>,
    context: Option<u64>,
    users: Option<u64>,
    machine: Option<String>,
}

/// Plans the memory of a KV cache. Returns JSON.
#[pyfunction]
pub(crate) fn plan_json(arguments: PlanArguments) -> PyResult<String> {
    let invalid = |error: &dyn std::error::Error| PyValueError::new_err(text(error));
    let model = match arguments.config {
        Some(config) => Model::from_config(arguments.model, config),
        None => Model::published(&arguments.model).map_err(|error| invalid(&error))?,
    };
    let mut request = PlanRequest::new(model);
    request.tensor_parallel = arguments.tensor_parallel;
    request.kv_element = arguments.kv_dtype.as_deref().map(element).transpose()?;
    request.block_tokens = arguments.block_tokens;
    let chunk = 256_u32.next_multiple_of(arguments.block_tokens.clamp(1, 65_536));
    request.chunk_tokens = arguments.chunk_tokens.unwrap_or(chunk);
    request.device = arguments.gpu_memory.map(ByteCount::new);
    request.host = arguments.host.map(ByteCount::new);
    let disk = |(directory, bytes)| DiskSpace { directory, bytes: ByteCount::new(bytes) };
    request.disks = arguments.disks.into_iter().map(disk).collect();
    (request.context, request.users) = (arguments.context, arguments.users);
    if let Some(name) = &arguments.machine {
        request.machine = Some(Machine::published(name).map_err(|error| invalid(&error))?);
    }
    let plan = Plan::new(&request).map_err(|error| invalid(&error))?;
    serde_json::to_string(&plan).map_err(|error| invalid(&error))
}

fn element(name: &str) -> PyResult<ElementFormat> {
    Ok(match name {
        "fp8" => ElementFormat::Width(1),
        "bf16" | "fp16" => ElementFormat::Width(2),
        "fp32" => ElementFormat::Width(4),
        "mxfp4" => ElementFormat::MXFP4,
        "mxfp8" => ElementFormat::MXFP8,
        "nvfp4" => ElementFormat::NVFP4,
        _ => {
            return Err(PyValueError::new_err(format!(
                "there is no KV type {name:?}; pass fp8, bf16, fp16, fp32, mxfp4, mxfp8 or nvfp4"
            )));
        }
    })
}
