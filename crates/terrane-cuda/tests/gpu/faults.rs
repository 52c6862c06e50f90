//! Driver calls that fail on demand, on a simulated driver.

use std::ffi::{CString, c_char};

use libloading::{Library, Symbol};
use terrane_cuda::DriverCode;

/// The function for faults, which only a simulated driver has.
type Fail = unsafe extern "C" fn(*const c_char, u64, u32) -> u32;

/// Whether the driver is simulated, so that its times mean nothing.
pub fn is_simulated() -> bool {
    // SAFETY: the library is already loaded, so no initialiser runs.
    let Ok(library) = (unsafe { Library::new("libcuda.so.1") }) else { return false };
    // SAFETY: the function of this name has this type; it is not called.
    let fail: Result<Symbol<'_, Fail>, _> = unsafe { library.get("terraneSimulatedFail") };
    fail.is_ok()
}

/// Makes the call of `function` after `spared` further calls return `code`. With a real driver, it
/// prints the skip and returns false.
pub fn fail(test: &str, function: &str, spared: u64, code: DriverCode) -> bool {
    let function = CString::new(function).unwrap();
    // SAFETY: the library is already loaded, so no initialiser runs.
    let Ok(library) = (unsafe { Library::new("libcuda.so.1") }) else { return false };
    // SAFETY: the function of this name has this type.
    let fail: Result<Symbol<'_, Fail>, _> = unsafe { library.get("terraneSimulatedFail") };
    let Ok(fail) = fail else {
        eprintln!("skipped: {test}: a real driver does not fail on demand");
        return false;
    };
    // SAFETY: the name ends with a zero byte, and is only read.
    assert_eq!(unsafe { fail(function.as_ptr(), spared, code.get()) }, 0);
    true
}
