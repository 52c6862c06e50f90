//! The options of NIXL's calls.

/// Options that name only one backend, created once.
pub(crate) struct BackendOptions(pub(super) nixl_sys::OptArgs);

// SAFETY: the options are a C++ value without thread affinity, so any thread may free it. Other
// code gets only shared references, through which the bindings let NIXL only read.
unsafe impl Send for BackendOptions {}
// SAFETY: as above: every operation through a shared reference only reads.
unsafe impl Sync for BackendOptions {}

/// Options that name only these backends.
pub(crate) fn naming<'a>(
    backends: impl IntoIterator<Item = &'a nixl_sys::Backend>,
) -> Result<nixl_sys::OptArgs, nixl_sys::NixlError> {
    let mut options = nixl_sys::OptArgs::new()?;
    for backend in backends {
        options.add_backend(backend)?;
    }
    Ok(options)
}

/// Options that name a backend and send a notification with the request.
pub(crate) fn notifying(
    backend: &nixl_sys::Backend,
    message: &[u8],
) -> Result<nixl_sys::OptArgs, nixl_sys::NixlError> {
    let mut options = naming([backend])?;
    options.set_notification_message(message)?;
    options.set_has_notification(true)?;
    Ok(options)
}

terrane_core::debug_fields!(BackendOptions {});
