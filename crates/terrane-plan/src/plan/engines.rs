//! Options of serving engines to paste.

use serde::{Deserialize, Serialize};
use terrane_layout::ElementFormat;

use crate::plan::groups::GroupPlan;
use crate::request::PlanRequest;

/// The options of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineOptions {
    /// The engine, and the version whose options these are.
    pub engine: String,
    /// The command. `MODEL` stands for the path or the name of the weights.
    pub command: String,
    /// What the options do not say.
    pub notes: Vec<String>,
}

const GIB: u64 = 1 << 30;
const GB: u64 = 1_000_000_000;

pub(crate) fn options(request: &PlanRequest, groups: &[GroupPlan]) -> Vec<EngineOptions> {
    vec![vllm(request, groups), sglang(request)]
}

fn is_fp8(request: &PlanRequest) -> bool {
    request.kv_element == Some(ElementFormat::Width(1))
}

fn vllm(request: &PlanRequest, groups: &[GroupPlan]) -> EngineOptions {
    let mut words = vec!["vllm serve MODEL".to_owned()];
    words.push(format!("--tensor-parallel-size {}", request.tensor_parallel));
    words.push(format!("--block-size {}", request.block_tokens));
    words.extend(request.context.map(|tokens| format!("--max-model-len {tokens}")));
    words.extend(request.users.map(|users| format!("--max-num-seqs {users}")));
    words.extend(is_fp8(request).then(|| "--kv-cache-dtype fp8".to_owned()));
    words.extend(request.device.map(|bytes| format!("--kv-cache-memory-bytes {}", bytes.get())));
    let mut notes = Vec::new();
    if let Some(host) = request.host {
        words.push("--kv-offloading-backend native".to_owned());
        words.push(format!("--kv-offloading-size {}", host.get() / GIB));
        notes.push("--kv-offloading-size is in GiB, of all ranks together".to_owned());
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
    words.extend(is_fp8(request).then(|| "--kv-cache-dtype fp8_e4m3".to_owned()));
    let mut notes = Vec::new();
    if let Some(host) = request.host {
        let of_rank = host.get() / u64::from(request.tensor_parallel.max(1));
        words.push("--enable-hierarchical-cache".to_owned());
        words.push(format!("--hicache-size {}", of_rank / GB));
        words.push("--hicache-mem-layout page_first".to_owned());
        notes.push("--hicache-size is in GB, of each rank".to_owned());
    }
    EngineOptions { engine: "SGLang 0.5".to_owned(), command: words.join(" "), notes }
}
