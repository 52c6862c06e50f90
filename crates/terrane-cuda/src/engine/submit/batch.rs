//! Many copies in one driver call, if the driver has such a call.

use std::ffi::c_int;

use terrane_core::ByteCount;

use crate::driver::functions::CopyAttributes;
use crate::driver::functions::Functions;
use crate::error::{CudaError, check};
use crate::runtime::context::Context;
use crate::runtime::stream::Stream;

/// Copies that are submitted together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    sources: Vec<u64>,
    destinations: Vec<u64>,
    sizes: Vec<usize>,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: the sources are read in the order of the stream.
const IN_STREAM_ORDER: u32 = 1;
/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: u32 = 801;

/// Whether the driver copies many runs in one call.
pub(crate) fn is_supported(context: &Context) -> bool {
    let functions = context.driver().functions();
    functions.cuMemcpyBatchAsync.is_some() || functions.cuMemcpyBatchAsync_v2.is_some()
}

impl Batch {
    pub(crate) fn push(&mut self, source: u64, destination: u64, bytes: u64) {
        self.sources.push(source);
        self.destinations.push(destination);
        self.sizes.push(ByteCount::new(bytes).to_usize());
    }

    pub(crate) fn len(&self) -> usize {
        self.sizes.len()
    }

    pub(crate) fn clear(&mut self) {
        self.sources.clear();
        self.destinations.clear();
        self.sizes.clear();
    }

    /// Submits the copies and clears the list. It uses one call if there are several copies and the
    /// driver supports it.
    ///
    /// # Errors
    ///
    /// The errors of the driver. Some of the copies may have been submitted.
    ///
    /// # Safety
    ///
    /// As for [`Stream::copy`], for each copy.
    pub(crate) unsafe fn submit(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let submitted = stream.context().bound(|functions| {
            if self.len() > 1 {
                // SAFETY: the caller guarantees it.
                match unsafe { self.submit_together(functions, stream) } {
                    // A driver may have the function but not support it. Copies that it has already
                    // accepted run again, from the same bytes.
                    Some((_, NOT_SUPPORTED)) | None => {}
                    Some((call, code)) => return check(call, code),
                }
            }
            // SAFETY: the caller guarantees it.
            unsafe { self.submit_each(functions, stream) }
        });
        self.clear();
        submitted
    }

    /// Like [`submit`](Self::submit), with one call for each copy.
    ///
    /// # Errors
    ///
    /// As for [`submit`](Self::submit).
    ///
    /// # Safety
    ///
    /// As for [`submit`](Self::submit).
    pub(crate) unsafe fn submit_one_by_one(&mut self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        let submitted =
            stream.context().bound(|functions| unsafe { self.submit_each(functions, stream) });
        self.clear();
        submitted
    }

    /// Makes the call and returns the driver's code; `None` if the driver has no such call.
    ///
    /// # Safety
    ///
    /// As for [`submit`](Self::submit).
    unsafe fn submit_together(
        &mut self,
        functions: &Functions,
        stream: &Stream,
    ) -> Option<(&'static str, u32)> {
        let mut attributes = CopyAttributes {
            source_access_order: IN_STREAM_ORDER,
            hints: [[0 as c_int; 2]; 2],
            flags: 0,
        };
        // The attributes apply from the first copy on.
        let mut first = 0_usize;
        let (destinations, sources, sizes) =
            (self.destinations.as_mut_ptr(), self.sources.as_mut_ptr(), self.sizes.as_mut_ptr());
        let count = self.sizes.len();
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        if let Some(call) = functions.cuMemcpyBatchAsync_v2 {
            // SAFETY: the lists have equal numbers of elements, the driver has read them when it
            // returns, and the caller guarantees the rest.
            let code = unsafe {
                call(destinations, sources, sizes, count, attributes, first, 1, stream.raw())
            };
            return Some(("cuMemcpyBatchAsync_v2", code));
        }
        let call = functions.cuMemcpyBatchAsync?;
        let mut failed = 0;
        let failed = &raw mut failed;
        // SAFETY: as above; one number is written.
        let code = unsafe {
            call(destinations, sources, sizes, count, attributes, first, 1, failed, stream.raw())
        };
        Some(("cuMemcpyBatchAsync", code))
    }

    /// # Safety
    ///
    /// As for [`submit`](Self::submit).
    unsafe fn submit_each(&self, functions: &Functions, stream: &Stream) -> Result<(), CudaError> {
        let ends = self.sources.iter().zip(&self.destinations);
        for ((&source, &destination), &bytes) in ends.zip(&self.sizes) {
            // SAFETY: the caller guarantees it.
            let code =
                unsafe { (functions.cuMemcpyAsync)(destination, source, bytes, stream.raw()) };
            check("cuMemcpyAsync", code)?;
        }
        Ok(())
    }
}
