//! Errors that return a value to the caller.

/// Implements [`Display`](std::fmt::Display) and [`Error`](std::error::Error) for an error that
/// returns a value to the caller. The text and the source are those of its field `cause`.
///
/// ```
/// use terrane_core::{AllocateError, delegate_error};
///
/// /// A refused request: the caller's guard, and the cause.
/// #[derive(Debug)]
/// struct Refused<G> {
///     guard: G,
///     cause: AllocateError,
/// }
///
/// delegate_error!(Refused<G>);
/// ```
///
/// `delegate_error!(Refused<G>, into AllocateError)` also implements [`From`]: the conversion drops
/// the value, and keeps the cause.
#[macro_export]
macro_rules! delegate_error {
    ($error:ident $(<$value:ident>)?, into $cause:ty) => {
        $crate::delegate_error!($error $(<$value>)?);

        impl $(<$value>)? ::core::convert::From<$error $(<$value>)?> for $cause {
            fn from(error: $error $(<$value>)?) -> Self {
                error.cause
            }
        }
    };
    ($error:ident $(<$value:ident>)?) => {
        impl $(<$value>)? ::core::fmt::Display for $error $(<$value>)? {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::fmt::Display::fmt(&self.cause, f)
            }
        }

        impl $(<$value>)? ::core::error::Error for $error $(<$value>)?
        where
            Self: ::core::fmt::Debug,
        {
            fn source(&self) -> ::core::option::Option<&(dyn ::core::error::Error + 'static)> {
                ::core::error::Error::source(&self.cause)
            }
        }
    };
}
