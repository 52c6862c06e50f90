//! The driver's codes, as printable numbers.

use std::ffi::CStr;
use std::{fmt, ptr};

use crate::driver::functions;

/// A code of the CUDA driver. Zero is success.
///
/// Displaying a code needs no driver. The driver's name for the code is shown if the driver is
/// loaded and knows the code. Otherwise only the number is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverCode(u32);

impl DriverCode {
    /// `CUDA_SUCCESS`.
    pub const SUCCESS: Self = Self(0);
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_DEINITIALIZED`: the process is ending, and the driver has shut down first.
    pub const DEINITIALIZED: Self = Self(4);
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: Self = Self(100);
    /// `CUDA_ERROR_NOT_READY`: not a failure, but the result "not yet complete".
    pub const NOT_READY: Self = Self(600);

    /// Returns the code with this number.
    #[must_use]
    pub const fn new(code: u32) -> Self {
        Self(code)
    }

    /// Whether the code means that a stream or an event is part of a graph capture, or that a
    /// capture prevents the call.
    #[must_use]
    pub const fn is_of_capture(self) -> bool {
        matches!(self.0, 900..=908)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Whether the code means that the context is lost, so that every later call on it fails. For
    /// each of these codes, the driver's documentation requires that the process is terminated and
    /// relaunched, or states that the device is lost.
    #[must_use]
    pub const fn loses_context(self) -> bool {
        matches!(
            self.0,
            // DEINITIALIZED, ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED
            4 | 214 | 220 | 226
            // ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED, ASSERT
            | 700 | 702 | 709 | 710
            // HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK
            | 714
                ..=719 | 721
            // MPS_CLIENT_TERMINATED, EXTERNAL_DEVICE
            | 810 | 911
        )
    }

    /// The driver's name for the code, if the driver is loaded and knows it.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        let look_up = functions::loaded()?.cuGetErrorName?;
        let mut name = ptr::null();
        // SAFETY: the function only writes a pointer to a constant of the driver, or null.
        let code = unsafe { look_up(self.0, &raw mut name) };
        if code != 0 || name.is_null() {
            return None;
        }
        // SAFETY: the pointer is a string constant of the driver, which is never unloaded.
        unsafe { CStr::from_ptr(name) }.to_str().ok()
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUDA driver code {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_shown_with_their_number_with_and_without_a_driver() {
        for code in [0, 2, 700, 999, u32::MAX] {
            let code = DriverCode::new(code);
            assert!(code.to_string().contains(&code.get().to_string()), "{code}");
            assert_eq!(format!("{code:?}"), format!("DriverCode({})", code.get()));
        }
    }

    #[test]
    fn codes_of_failures_that_can_be_retried_lose_no_context() {
        for code in [DriverCode::SUCCESS, DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY] {
            assert!(!code.loses_context(), "{code}");
        }
        assert!(DriverCode::new(700).loses_context());
        assert!(DriverCode::new(719).loses_context());
    }

    #[test]
    fn a_terminated_mps_client_loses_its_context_and_an_unavailable_device_does_not() {
        assert!(DriverCode::new(810).loses_context());
        assert!(!DriverCode::new(46).loses_context());
    }
}
