//! Options of NIXL's calls.

use std::fmt;

/// Options that name one backend and nothing else, made once.
pub(crate) struct Options(nixl_sys::OptArgs);

// SAFETY: the options are a value in C++, which no thread owns: it may be freed by any. They are given
// away by shared reference alone, and with that the bindings let NIXL read them, and nothing else.
unsafe impl Send for Options {}
// SAFETY: as above: whatever is done through a shared reference reads.
unsafe impl Sync for Options {}

impl Options {
    pub(super) fn of(backend: &nixl_sys::Backend) -> Result<Self, nixl_sys::NixlError> {
        Ok(Self(naming([backend])?))
    }

    pub(super) fn raw(&self) -> &nixl_sys::OptArgs {
        &self.0
    }
}

/// Options that name some backends and nothing else.
pub(crate) fn naming<'a>(
    backends: impl IntoIterator<Item = &'a nixl_sys::Backend>,
) -> Result<nixl_sys::OptArgs, nixl_sys::NixlError> {
    let mut options = nixl_sys::OptArgs::new()?;
    for backend in backends {
        options.add_backend(backend)?;
    }
    Ok(options)
}

/// Options that name a backend, and carry a message with the request.
pub(super) fn telling(
    backend: &nixl_sys::Backend,
    message: &[u8],
) -> Result<nixl_sys::OptArgs, nixl_sys::NixlError> {
    let mut options = naming([backend])?;
    options.set_notification_message(message)?;
    options.set_has_notification(true)?;
    Ok(options)
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").finish_non_exhaustive()
    }
}
