//! The launch of the checksum kernels.

use std::ffi::CStr;
use std::ptr;

use crate::error::CudaError;
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

/// The warps of a block of threads, each of which takes one segment at a time.
pub(crate) const BLOCK_WARPS: u32 = BLOCK_THREADS / WARP_THREADS;

impl Kernels {
    /// Submits the checksums of blocks, by at most `thread_blocks` blocks of 512 threads. The
    /// result does not depend on their number.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoThreadBlocks`], [`CudaError::WrongContext`]: nothing is submitted then.
    /// [`CudaError::Driver`], [`CudaError::DeviceLost`].
    ///
    /// # Safety
    ///
    /// Until the stream has passed the launch, these kernels are loaded, and all tables and all
    /// words that they name are memory of the stream's device. Nothing writes the words meanwhile,
    /// and nothing but these kernels accesses the sums. The width divides all addresses.
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
        let function = pick(&self.0.block_sums, width);
        let mut parameters = [ptr::from_ref(launch).cast_mut().cast()];
        // SAFETY: the function takes a `SumLaunch`. The caller guarantees the rest.
        unsafe { self.launch(stream, function, blocks, &mut parameters) }
    }
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
