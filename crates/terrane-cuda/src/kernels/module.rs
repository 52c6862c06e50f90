//! A loaded module: one PTX text, compiled for the device of a context.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use cudarc::driver::sys::{CUfunction, CUjit_option, CUmodule};

use crate::driver::functions::Functions;
use crate::error::CudaError;
use crate::runtime::context::Context;

/// A module, unloaded with the last of its kernels.
pub(super) struct Module {
    pub(super) context: Context,
    raw: CUmodule,
}

// SAFETY: only the driver interprets the handle, and it accepts it on any thread.
unsafe impl Send for Module {}
// SAFETY: as for `Send`; no field is mutable.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles and loads; `ptx` ends with a zero.
    ///
    /// # Errors
    ///
    /// [`CudaError::KernelsRefused`], [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub(super) fn load(context: &Context, ptx: &str) -> Result<Self, CudaError> {
        let raw = context.bound(|functions| load_module(functions, ptx))?;
        Ok(Self { context: context.clone(), raw })
    }

    /// The kernels of these names.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub(super) fn find(&self, names: [&CStr; 5]) -> Result<[CUfunction; 5], CudaError> {
        let mut found = [ptr::null_mut(); 5];
        self.context.bound(|functions| find_all(functions, self.raw, names, &mut found))?;
        Ok(found)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: the module was loaded here. The callers of its launches guaranteed that the
        // launches have completed.
        self.context.bound_in_drop(|functions| unsafe { functions.cuModuleUnload(self.raw) });
    }
}

/// Compiles and loads; `ptx` ends with a zero.
fn load_module(functions: &Functions, ptx: &str) -> Result<CUmodule, CudaError> {
    let mut raw = ptr::null_mut();
    let mut log: [c_char; LOG_BYTES] = [0; LOG_BYTES];
    let mut options =
        [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The option's value is passed in the bits of a pointer.
    let mut values: [*mut c_void; 2] =
        [log.as_mut_ptr().cast(), ptr::without_provenance_mut(LOG_BYTES)];
    let (image, options, values) = (ptx.as_ptr().cast(), options.as_mut_ptr(), values.as_mut_ptr());
    // SAFETY: the text ends with a zero. There are two options and two values, the buffer has the
    // given length, and one handle is written.
    match unsafe { functions.cuModuleLoadDataEx(&raw mut raw, image, 2, options, values) } {
        Ok(()) => Ok(raw),
        Err(CudaError::Driver { code, .. }) => {
            Err(CudaError::KernelsRefused { code, log: text(&log) })
        }
        Err(error) => Err(error),
    }
}

/// The maximum length of the driver's message about a refusal.
const LOG_BYTES: usize = 4096;

/// The text before the first zero.
fn text(log: &[c_char]) -> String {
    let bytes: Vec<u8> =
        log.iter().take_while(|&&sign| sign != 0).map(|sign| sign.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

fn find_all(
    functions: &Functions,
    module: CUmodule,
    names: [&CStr; 5],
    found: &mut [CUfunction; 5],
) -> Result<(), CudaError> {
    for (name, found) in names.into_iter().zip(found) {
        // SAFETY: the module is loaded, the name ends with a zero, and one handle is written.
        unsafe { functions.cuModuleGetFunction(found, module, name.as_ptr()) }?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_the_text_before_the_first_zero() {
        let log: Vec<c_char> =
            b"ptxas fatal\n\0rest".iter().map(|&sign| c_char::from_ne_bytes([sign])).collect();
        assert_eq!(text(&log), "ptxas fatal");
        assert_eq!(text(&[]), "");
    }
}
