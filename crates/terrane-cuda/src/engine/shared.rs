//! The state that the threads of an engine share.

use std::sync::Arc;

use terrane_core::{Capability, CapabilityReport, CapabilityStatus, Reason, Requirement};
use terrane_transfer::calibration::Calibration;

use crate::driver::code::DriverCode;
use crate::engine::checksums::factors::FactorCache;
use crate::engine::options::DeviceEngineOptions;
use crate::engine::path::choice::Corrections;
use crate::engine::resources::base_tables::BaseTables;
use crate::engine::resources::block_lists::ListPool;
use crate::engine::resources::device_mapping::MappingCache;
use crate::engine::resources::job_streams::StreamPool;
use crate::engine::resources::peer_contexts::Peers;
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::runtime::context::Context;

/// State shared by the engine's threads.
pub(crate) struct Shared {
    pub(crate) context: Context,
    pub(crate) options: DeviceEngineOptions,
    pub(crate) kernels: Option<Kernels>,
    /// The result of the request for kernels.
    pub(crate) capabilities: Arc<CapabilityReport>,
    pub(crate) mapping: MappingCache,
    pub(crate) tables: BaseTables,
    pub(crate) lists: Arc<ListPool>,
    pub(crate) sum_factors: FactorCache,
    /// The streams that jobs copy on.
    pub(crate) streams: Arc<StreamPool>,
    /// The streams on which unstarted jobs wait, if their order is another library's event. There
    /// is one for each such job.
    pub(crate) order_streams: Arc<StreamPool>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) calibration: Calibration,
    pub(crate) corrections: Arc<Corrections>,
    pub(crate) has_batches: bool,
}

impl Shared {
    /// The thread blocks of a kernel within the device's memory.
    pub(crate) fn relayout_ctas(&self) -> u32 {
        /// A kernel counts its threads in 32 bits.
        const MAX_CTAS: u32 = 1 << 20;
        self.options.relayout_ctas.map_or(MAX_CTAS, |ctas| ctas.get().min(MAX_CTAS))
    }

    /// The capabilities, from all driver requests so far.
    pub(crate) fn capabilities_now(&self) -> CapabilityReport {
        let mut report = CapabilityReport::clone(&self.capabilities);
        if let Some(tried) = self.kernels.as_ref().and_then(Kernels::sums_status) {
            let status = tried.map_or_else(refused, |()| CapabilityStatus::Granted);
            report.record(Capability::ChecksumKernels, self.options.kernels, status);
        }
        report
    }
}

/// Returns the kernels, if they are requested and the driver accepts them, and the result of the
/// request.
pub(crate) fn load_kernels(
    context: &Context,
    requirement: Requirement,
) -> Result<(Option<Kernels>, CapabilityReport), CudaError> {
    let loaded = (requirement != Requirement::Off).then(|| Kernels::load(context));
    let (kernels, status) = match loaded {
        None => (None, CapabilityStatus::NotTried),
        Some(Ok(kernels)) => (Some(kernels), CapabilityStatus::Granted),
        // A temporary lack of memory proves nothing about the driver.
        Some(Err(CudaError::KernelsRefused { code, .. }))
            if requirement == Requirement::Preferred && code != DriverCode::OUT_OF_MEMORY =>
        {
            (None, refused(code))
        }
        Some(Err(error)) => return Err(error),
    };
    let mut capabilities = CapabilityReport::default();
    capabilities.record(Capability::CopyKernels, requirement, status);
    Ok((kernels, capabilities))
}

fn refused(code: DriverCode) -> CapabilityStatus {
    let operation = "cuModuleLoadDataEx";
    CapabilityStatus::Refused(Reason::Driver { operation, code: code.get() })
}
