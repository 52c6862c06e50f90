//! Methods that return a field.

/// Defines, in an `impl`, a public method for each field, which returns a copy of the field.
///
/// ```
/// /// A version.
/// pub struct Version {
///     major: u32,
///     minor: u32,
/// }
///
/// impl Version {
///     terrane_core::getters! {
///         /// The number of incompatible changes.
///         major: u32,
///         /// The number of other changes.
///         minor: u32,
///     }
/// }
///
/// let version = Version { major: 2, minor: 1 };
/// assert_eq!((version.major(), version.minor()), (2, 1));
/// ```
#[macro_export]
macro_rules! getters {
    ($($(#[$documentation:meta])* $field:ident: $type:ty,)*) => {$(
        $(#[$documentation])*
        #[must_use]
        pub const fn $field(&self) -> $type {
            self.$field
        }
    )*};
}
