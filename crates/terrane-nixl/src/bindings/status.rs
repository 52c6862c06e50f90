//! The statuses of NIXL's calls.

/// The status of a NIXL call, as far as its bindings forward it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// An argument was refused.
    InvalidParameter,
    /// A backend or NIXL itself failed.
    Backend,
    /// No item has that name, or no item can execute the request.
    NotFound,
    /// NIXL refused to create a request, and its bindings do not forward the reason.
    Refused,
    /// There is no telemetry of a transfer.
    NoTelemetry,
    /// The bindings failed before or after the call.
    Bindings,
}

impl Status {
    pub(crate) fn of(error: &nixl_sys::NixlError) -> Self {
        use nixl_sys::NixlError as E;
        match error {
            E::InvalidParam => Self::InvalidParameter,
            E::BackendError => Self::Backend,
            E::NotFound => Self::NotFound,
            E::FailedToCreateXferRequest => Self::Refused,
            E::NoTelemetry => Self::NoTelemetry,
            _ => Self::Bindings,
        }
    }
}

terrane_core::display_names!(Status {
    Self::InvalidParameter => "an argument was refused",
    Self::Backend => "the backend failed",
    Self::NotFound => "not found",
    Self::Refused => "NIXL refused",
    Self::NoTelemetry => "no telemetry",
    Self::Bindings => "the bindings failed",
});

impl std::error::Error for Status {}
