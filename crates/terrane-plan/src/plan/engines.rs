//! Options of serving engines to paste.

use serde::{Deserialize, Serialize};
use terrane_core::ByteCount;
use terrane_layout::ElementFormat;

use crate::plan::groups::GroupPlan;
use crate::request::PlanRequest;
use crate::sizes::option_size;

/// The options of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineOptions {
    /// The engine, and the version whose options these are.
    pub engine: String,
    /// The command. `MODEL` stands for the path or the name of the weights.
    pub command: String,
    /// Remarks on the options.
    pub notes: Vec<String>,
}

const GIB: f64 = 1_073_741_824.0;
const GB: u64 = 1_000_000_000;

pub(crate) fn options(request: &PlanRequest, groups: &[GroupPlan]) -> Vec<EngineOptions> {
    vec![vllm(request, groups), sglang(request)]
}

/// The values of `--kv-cache-dtype` of an engine, by the format that it stores.
type CacheFormats = &'static [(ElementFormat, &'static str)];

const VLLM_FORMATS: CacheFormats =
    &[(ElementFormat::Width(1), "fp8"), (ElementFormat::NVFP4, "nvfp4")];
const SGLANG_FORMATS: CacheFormats = &[
    (ElementFormat::Width(1), "fp8_e4m3"),
    (ElementFormat::MXFP8, "mxfp8"),
    (ElementFormat::NVFP4, "nvfp4"),
];

/// The option for the planned format of K and V. A format that the engine lacks is a note, so that it is not lost.
fn cache_format(
    element: ElementFormat,
    engine: &str,
    formats: CacheFormats,
) -> Result<String, String> {
    if let Some((_, value)) = formats.iter().find(|(format, _)| *format == element) {
        return Ok(format!("--kv-cache-dtype {value}"));
    }
    if element == ElementFormat::Width(2) {
        return Err("without --kv-cache-dtype, the engine stores the model's dtype; if its elements do not have \
                    2 bytes, add --kv-cache-dtype bfloat16"
            .to_owned());
    }
    let name = match element {
        ElementFormat::Width(4) => "fp32",
        ElementFormat::MXFP4 => "mxfp4",
        ElementFormat::MXFP8 => "mxfp8",
        ElementFormat::NVFP4 => "nvfp4",
        _ => "this format",
    };
    Err(format!(
        "{engine} has no option for caches in {name} ({element}): this command stores the model's dtype, whose bytes \
         are not those of the plan"
    ))
}

fn vllm(request: &PlanRequest, groups: &[GroupPlan]) -> EngineOptions {
    let mut words = vec!["vllm serve MODEL".to_owned()];
    words.push(format!("--tensor-parallel-size {}", request.tensor_parallel));
    words.push(format!("--block-size {}", request.block_tokens));
    words.extend(request.context.map(|tokens| format!("--max-model-len {tokens}")));
    words.extend(request.users.map(|users| format!("--max-num-seqs {users}")));
    let format = request.kv_element.map(|format| cache_format(format, "vLLM", VLLM_FORMATS));
    words.extend(format.iter().flatten().cloned());
    words.extend(request.device.map(|bytes| format!("--kv-cache-memory-bytes {}", bytes.get())));
    let mut notes: Vec<String> = format.and_then(Result::err).into_iter().collect();
    if let Some(host) = request.host {
        words.push("--kv-offloading-backend native".to_owned());
        // A number of 64 bits divided by 2^30: vLLM computes the same bytes from the decimals.
        words.push(format!("--kv-offloading-size {}", host.get() as f64 / GIB));
        notes.push("--kv-offloading-size is in GiB, of all ranks together".to_owned());
        notes.push(format!(
            "native offloading maps a file of this size in /dev/shm: docker run --shm-size={} at least",
            option_size(host.get())
        ));
    }
    if groups.len() > 1 {
        notes.push(
            "vLLM may choose another block size for models with several groups of caches"
                .to_owned(),
        );
    }
    EngineOptions { engine: "vLLM 0.33".to_owned(), command: words.join(" "), notes }
}

fn sglang(request: &PlanRequest) -> EngineOptions {
    let mut words = vec!["python3 -m sglang.launch_server --model-path MODEL".to_owned()];
    words.push(format!("--tp-size {}", request.tensor_parallel));
    words.push(format!("--page-size {}", request.block_tokens));
    words.extend(request.context.map(|tokens| format!("--context-length {tokens}")));
    words.extend(request.users.map(|users| format!("--max-running-requests {users}")));
    let format = request.kv_element.map(|format| cache_format(format, "SGLang", SGLANG_FORMATS));
    words.extend(format.iter().flatten().cloned());
    let mut notes: Vec<String> = format.and_then(Result::err).into_iter().collect();
    if let Some(host) = request.host {
        let of_rank = host.get() / u64::from(request.tensor_parallel.max(1));
        if of_rank < GB {
            // SGLang reads 0 as not set, and then takes twice the device's cache.
            notes.push(format!(
                "no hierarchical cache: --hicache-size is in whole GB of each rank, and a rank has {}; plan with \
                 --host {}GB or more",
                ByteCount::new(of_rank),
                request.tensor_parallel
            ));
        } else {
            words.push("--enable-hierarchical-cache".to_owned());
            words.push(format!("--hicache-size {}", of_rank / GB));
            words.push("--hicache-mem-layout page_first".to_owned());
            notes.push("--hicache-size is in whole GB of each rank, rounded down".to_owned());
        }
    }
    EngineOptions { engine: "SGLang 0.5".to_owned(), command: words.join(" "), notes }
}
