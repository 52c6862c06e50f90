//! The launch of the checksum kernels.

use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys::CUfunction;

use crate::driver::code::DriverCode;
use crate::error::CudaError;
use crate::kernels::module::Module;
use crate::kernels::schedule::{BLOCK_THREADS, WARP_THREADS};
use crate::kernels::sum_arguments::SumLaunch;
use crate::kernels::width::CopyWidth;
use crate::kernels::{Kernels, pick};
use crate::runtime::stream::Stream;

/// The result of `cargo xtask kernels build` for block_sums.cu.
pub(super) const PTX: &str = concat!(include_str!("block_sums.ptx"), "\0");

/// The entry points, in the order of [`CopyWidth::ALL`].
pub(super) const BLOCK_SUMS: [&CStr; 5] = [
    c"terrane_block_sums_1",
    c"terrane_block_sums_2",
    c"terrane_block_sums_4",
    c"terrane_block_sums_8",
    c"terrane_block_sums_16",
];

/// The warps of a thread block. Each warp processes one segment at a time.
pub(crate) const BLOCK_WARPS: u32 = BLOCK_THREADS / WARP_THREADS;

/// The loaded kernels.
pub(super) struct SumKernels {
    /// The module that contains the functions.
    _module: Module,
    pub(super) functions: [CUfunction; 5],
}

// SAFETY: only the driver interprets the handles, and it accepts them on any thread.
unsafe impl Send for SumKernels {}
// SAFETY: as for `Send`; no field is mutable.
unsafe impl Sync for SumKernels {}

impl Kernels {
    /// Loads the checksum kernels, unless they are loaded or were refused.
    ///
    /// # Errors
    ///
    /// [`CudaError::KernelsRefused`], which is stored and returned again. After another error, the
    /// next call tries again.
    pub(super) fn sums(&self) -> Result<&SumKernels, CudaError> {
        let kept = &self.0.sums;
        if let Some(tried) = kept.get() {
            return tried.as_ref().map_err(Clone::clone);
        }
        let tried = match self.load_sums() {
            Err(error) if !is_refusal(&error) => return Err(error),
            tried => tried,
        };
        // If another thread was faster, this thread's module drops.
        kept.get_or_init(|| tried).as_ref().map_err(Clone::clone)
    }

    fn load_sums(&self) -> Result<SumKernels, CudaError> {
        let module = Module::load(self.context(), PTX)?;
        let functions = module.find(BLOCK_SUMS)?;
        // As for the copies: a query loads them onto the device.
        self.figures_of_all(BLOCK_SUMS, &functions)?;
        Ok(SumKernels { _module: module, functions })
    }

    /// Loads the checksum kernels, unless they are loaded or were refused.
    ///
    /// # Errors
    ///
    /// [`CudaError::KernelsRefused`], [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub(crate) fn prepare_sums(&self) -> Result<(), CudaError> {
        self.sums().map(drop)
    }

    /// Whether the driver has compiled the checksum kernels, or the code of its refusal; `None` if
    /// no attempt had either result.
    pub(crate) fn sums_status(&self) -> Option<Result<(), DriverCode>> {
        let tried = self.0.sums.get()?;
        let code = tried.as_ref().err().and_then(CudaError::code);
        Some(code.map_or(Ok(()), Err))
    }

    /// Submits the checksums of blocks, by at most `thread_blocks` blocks of 512 threads. The
    /// result does not depend on their number.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoThreadBlocks`], [`CudaError::WrongContext`], [`CudaError::KernelsRefused`]:
    /// nothing is submitted then. [`CudaError::Driver`], [`CudaError::ContextLost`].
    ///
    /// # Safety
    ///
    /// Until the launch has completed, these kernels are loaded. Until then, all tables,
    /// and all words that the tables name, are memory of the stream's device. Nothing writes these
    /// words, and only these kernels access the sums. The width divides all addresses.
    pub(crate) unsafe fn sum_blocks(
        &self,
        stream: &Stream,
        launch: &SumLaunch,
        width: CopyWidth,
        thread_blocks: u32,
    ) -> Result<(), CudaError> {
        self.check_launch(stream, thread_blocks)?;
        let blocks = thread_blocks.min(launch.units.div_ceil(BLOCK_WARPS));
        if blocks == 0 {
            return Ok(());
        }
        let function = pick(&self.sums()?.functions, width);
        let mut parameters = [ptr::from_ref(launch).cast_mut().cast()];
        // SAFETY: the function takes a `SumLaunch`. The caller guarantees the rest.
        unsafe { self.launch(stream, function, blocks, &mut parameters) }
    }
}

/// Whether the error is the driver's refusal to compile the kernels, rather than a temporary lack
/// of memory.
fn is_refusal(error: &CudaError) -> bool {
    matches!(error, CudaError::KernelsRefused { code, .. } if *code != DriverCode::OUT_OF_MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_take_the_parameter_and_write_only_sums() {
        for name in BLOCK_SUMS {
            let head = format!(".visible .entry {}(", name.to_str().unwrap());
            let (_, rest) = PTX.split_once(&head).expect("an entry point");
            let (body, _) = rest.split_once("\n}").expect("an end");
            assert!(body.contains("_param_0[3800]"), "{name:?}");
            assert!(!body.contains(".local") && !body.contains("st.global"), "{name:?}");
            assert_eq!(body.matches("red.global.xor.b64").count(), 1, "{name:?}");
        }
        assert!(PTX.contains("\n.target sm_80\n"));
    }
}
