//! What UCX lacks when it takes the memory of a device for the host's.
//!
//! UCX does without modules that it cannot load, and NIXL then answers a registration with a mere
//! failure. Which modules are loaded stands in the map of the process.

use std::fs;

use terrane_core::{BackendName, StorageKind};

use crate::Refusal;

/// The backend that this is about.
const UCX: &str = "UCX";

/// The modules without which UCX does not see device memory, and what each needs.
const MODULES: [(&str, &str); 2] = [
    ("libuct_cuda", "NVIDIA's driver with libcuda.so.1 and libnvidia-ml.so.1"),
    (
        "libucm_cuda",
        "libcudart.so.12 (.13 for a NIXL of CUDA 13) in LD_LIBRARY_PATH; without that, set \
         UCX_MEMTYPE_CACHE=n",
    ),
];

/// Says more of a failure, where UCX refused memory of a device and lacks a module for it.
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

/// The first of the modules that is not in a process's map.
fn missing(map: &str) -> Option<(&'static str, &'static str)> {
    MODULES.into_iter().find(|(module, _)| !map.contains(module))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_that_is_missing_is_named() {
        let uct = "7f00-7f01 r--p 00000000 fe:00 7 /nixl_cu12.libs/ucx/libuct_cuda.so.0.0.0\n";
        let ucm = "7f02-7f03 r--p 00000000 fe:00 8 /nixl_cu12.libs/ucx/libucm_cuda.so.0.0.0\n";
        let name = |map: &str| missing(map).map(|(module, _)| module);
        assert_eq!(name(""), Some("libuct_cuda"));
        assert_eq!(name(uct), Some("libucm_cuda"));
        assert_eq!(name(&[uct, ucm].concat()), None);
    }
}
