//! Methods that return a field.

/// Defines, in an `impl`, a public method for each field that returns a copy of it.
macro_rules! getters {
    ($($(#[$documentation:meta])* $field:ident: $type:ty,)*) => {$(
        $(#[$documentation])*
        #[must_use]
        pub const fn $field(&self) -> $type {
            self.$field
        }
    )*};
}
pub(crate) use getters;
