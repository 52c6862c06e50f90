//! The driver: loaded at run time, once, and never unloaded.

pub(crate) mod capture;
pub(crate) mod code;
pub(crate) mod functions;
pub(crate) mod version;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use libloading::Library;
use terrane_core::OwnerProcess;
use terrane_core::sync::lock;

use crate::driver::functions::{FUNCTIONS, Functions, OWNER};
use crate::driver::version::DriverVersion;
use crate::error::CudaError;

/// The driver of this process, loaded and initialised. A copy costs nothing.
#[derive(Clone, Copy)]
pub struct Driver(&'static Functions);

impl Driver {
    /// Loads and initialises the driver, or returns the loaded one.
    ///
    /// # Errors
    ///
    /// As for [`probe`](crate::probe). Failures are not cached.
    pub fn load() -> Result<Self, CudaError> {
        static LOADING: Mutex<()> = Mutex::new(());
        let functions = match FUNCTIONS.get() {
            Some(functions) => functions,
            None => {
                // A thread that panicked here leaves no partial state.
                let _one = lock(&LOADING);
                match FUNCTIONS.get() {
                    Some(functions) => functions,
                    None => {
                        let found = find(&functions::LIBRARY_NAMES.map(Path::new))?;
                        OWNER.get_or_init(OwnerProcess::current);
                        FUNCTIONS.get_or_init(|| found)
                    }
                }
            }
        };
        Self(functions).check_process()?;
        // SAFETY: the function has no pointer parameter, and may be called any number of times.
        unsafe { functions.cuInit(0) }?;
        Ok(Self(functions))
    }

    /// Fails in a process that was forked from the one that loaded the driver. A driver call there
    /// may fail, hang or crash: the driver's threads and the device's mappings exist only in the
    /// parent.
    ///
    /// # Errors
    ///
    /// [`CudaError::Forked`].
    #[inline]
    pub(crate) fn check_process(self) -> Result<(), CudaError> {
        if self.is_of_parent() { Err(CudaError::Forked) } else { Ok(()) }
    }

    /// Whether a parent of this process loaded the driver. Values dropped here then belong to the
    /// parent as well: nothing is freed, no lock is taken, and no thread is waited for.
    #[inline]
    pub(crate) fn is_of_parent(self) -> bool {
        functions::is_of_parent()
    }

    pub(crate) const fn functions(self) -> &'static Functions {
        self.0
    }

    /// The newest CUDA version that the driver supports.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::Forked`].
    pub fn version(self) -> Result<DriverVersion, CudaError> {
        self.check_process()?;
        functions::version(self.0.cuDriverGetVersion)
    }

    /// The number of devices; at least one.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoDevice`], [`CudaError::Driver`], [`CudaError::Forked`].
    pub fn device_count(self) -> Result<u32, CudaError> {
        self.check_process()?;
        let mut count = 0;
        // SAFETY: the function writes one number.
        unsafe { self.0.cuDeviceGetCount(&raw mut count) }?;
        match u32::try_from(count) {
            Ok(0) | Err(_) => Err(CudaError::NoDevice),
            Ok(count) => Ok(count),
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

/// Finds the driver's functions in the first library that can be loaded.
fn find(names: &[&Path]) -> Result<Functions, CudaError> {
    let mut refusal = None;
    for name in names {
        // SAFETY: the initialisers are those of NVIDIA's driver; only its library has this name.
        match unsafe { Library::new(*name) } {
            Ok(library) => {
                // SAFETY: the library is the driver's.
                let found = unsafe { Functions::find(library) };
                return found.map_err(|(library, symbol)| CudaError::DriverTooOld {
                    symbol,
                    version: version_of(&library),
                });
            }
            // A driver installs the first name.
            Err(error) => refusal = refusal.or(Some((name, error))),
        }
    }
    let (library, source): (String, Arc<dyn std::error::Error + Send + Sync>) = match refusal {
        Some((name, error)) => (name.display().to_string(), Arc::new(error)),
        None => (String::new(), Arc::new(std::io::Error::from(std::io::ErrorKind::NotFound))),
    };
    Err(CudaError::LibraryMissing { library, source })
}

/// The version that a library reports, if it can report one.
fn version_of(library: &Library) -> Option<DriverVersion> {
    // SAFETY: a function of this name has this type.
    let get: libloading::Symbol<'_, functions::GetVersion> =
        unsafe { library.get("cuDriverGetVersion") }.ok()?;
    functions::version(*get).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[test]
    fn a_library_that_does_not_exist_is_reported_as_missing() {
        let error = find(&[Path::new("libterrane-none.so.1"), Path::new("/nonexistent.so")]).err();
        let Some(CudaError::LibraryMissing { library, .. }) = &error else {
            panic!("{error:?}");
        };
        assert_eq!(library, "libterrane-none.so.1");
        let error = error.unwrap();
        assert!(error.is_unavailable());
        let mut causes = String::new();
        let mut next = error.source();
        while let Some(cause) = next {
            causes.push_str(&cause.to_string());
            next = cause.source();
        }
        assert!(causes.contains("libterrane-none"), "{causes}");
    }

    #[test]
    fn a_library_without_a_function_is_reported_as_too_old_with_the_functions_name() {
        // Every Linux program with the C library has loaded this library.
        let error = find(&[Path::new("libc.so.6")]).err();
        let Some(CudaError::DriverTooOld { symbol, version }) = error else {
            panic!("{error:?}");
        };
        assert_eq!((symbol, version), ("cuInit", None));
    }

    #[test]
    fn versions_are_read_from_the_drivers_number() {
        assert_eq!(DriverVersion::from_number(13000).to_string(), "13.0");
        assert_eq!(DriverVersion::from_number(12080).to_string(), "12.8");
        assert_eq!(DriverVersion::from_number(11040).to_string(), "11.4");
    }
}
