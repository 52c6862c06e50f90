//! Detects the modules that UCX lacks when it treats device memory as host memory.
//!
//! UCX skips modules that it cannot load, and NIXL then reports only a failure. The process's
//! memory map lists the loaded modules.

use std::fs;

use terrane_core::{BackendName, StorageKind};

use super::refusal::Refusal;

/// The backend that this module checks.
const UCX: &str = "UCX";

/// The modules that UCX needs to recognize device memory, and the dependency of each.
const MODULES: [(&str, &str); 2] = [
    ("libuct_cuda", "NVIDIA's driver with libcuda.so.1 and libnvidia-ml.so.1"),
    (
        "libucm_cuda",
        "libcudart.so.12 (.13 for CUDA 13) in LD_LIBRARY_PATH, or set UCX_MEMTYPE_CACHE=n",
    ),
];

/// Adds the missing module to a failure, if UCX refused device memory for lack of it.
pub(super) fn explain(refusal: Refusal, backend: &BackendName, kind: StorageKind) -> Refusal {
    let (Refusal::Status(status), StorageKind::Device(_)) = (refusal, kind) else {
        return refusal;
    };
    if backend.as_str() != UCX {
        return refusal;
    }
    let Ok(map) = fs::read_to_string("/proc/self/maps") else { return refusal };
    match missing(&map) {
        Some((module, needs)) => Refusal::UcxModule { status, module, needs },
        None => refusal,
    }
}

/// The first of the modules that is missing in a process's memory map.
fn missing(map: &str) -> Option<(&'static str, &'static str)> {
    MODULES.into_iter().find(|(module, _)| !map.contains(module))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_module_is_named() {
        let uct = "7f00-7f01 r--p 00000000 fe:00 7 /nixl_cu12.libs/ucx/libuct_cuda.so.0.0.0\n";
        let ucm = "7f02-7f03 r--p 00000000 fe:00 8 /nixl_cu12.libs/ucx/libucm_cuda.so.0.0.0\n";
        let name = |map: &str| missing(map).map(|(module, _)| module);
        assert_eq!(name(""), Some("libuct_cuda"));
        assert_eq!(name(uct), Some("libucm_cuda"));
        assert_eq!(name(&[uct, ucm].concat()), None);
    }
}
