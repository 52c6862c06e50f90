//! `Display` and `Debug` of types whose text is a list of names or fields.

/// Implements [`Display`](std::fmt::Display) for an enum with one text for each pattern.
///
/// ```
/// use terrane_core::display_names;
///
/// enum Side {
///     Left,
///     Right(u32),
/// }
///
/// display_names!(Side {
///     Self::Left => "left",
///     Self::Right(_) => "right",
/// });
///
/// assert_eq!(format!("{:>6}, {}", Side::Left, Side::Right(1)), "  left, right");
/// ```
#[macro_export]
macro_rules! display_names {
    ($type:ident { $($variant:pat => $text:expr),+ $(,)? }) => {
        impl ::core::fmt::Display for $type {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.pad(match self { $($variant => $text),+ })
            }
        }
    };
}

/// Implements [`Debug`](std::fmt::Debug) with some of the fields, or with values that it computes.
/// The parameters of the type need no bounds.
///
/// ```
/// use terrane_core::debug_fields;
///
/// struct Refused<G> {
///     guard: G,
///     code: u32,
/// }
///
/// struct Guard(u32);
///
/// debug_fields!(Refused<G> { code });
/// debug_fields!(Guard, |guard| { number: guard.0 + 1 });
///
/// let refused = Refused { guard: Guard(1), code: 7 };
/// assert_eq!(format!("{refused:?}"), "Refused { code: 7, .. }");
/// assert_eq!(format!("{:?}", refused.guard), "Guard { number: 2, .. }");
/// ```
///
/// In parentheses, the value is that of a tuple:
///
/// ```
/// struct Pair(u32, u32);
///
/// terrane_core::debug_fields!(Pair, |pair| (pair.0 + pair.1));
///
/// assert_eq!(format!("{:?}", Pair(1, 2)), "Pair(3)");
/// ```
#[macro_export]
macro_rules! debug_fields {
    ($type:ident $(<$param:ident $(: $bound:path)?>)? {}) => {
        impl $(<$param $(: $bound)?>)? ::core::fmt::Debug for $type $(<$param>)? {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.debug_struct(stringify!($type)).finish_non_exhaustive()
            }
        }
    };
    ($type:ident $(<$param:ident $(: $bound:path)?>)? { $($field:ident),+ }) => {
        $crate::debug_fields!($type $(<$param $(: $bound)?>)?, |this| { $($field: this.$field),+ });
    };
    ($type:ident $(<$param:ident $(: $bound:path)?>)?, |$this:ident| { $($field:ident: $value:expr),+ }) => {
        impl $(<$param $(: $bound)?>)? ::core::fmt::Debug for $type $(<$param>)? {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($field), &$value))+
                    .finish_non_exhaustive()
            }
        }
    };
    ($type:ident $(<$param:ident $(: $bound:path)?>)?, |$this:ident| ($value:expr)) => {
        impl $(<$param $(: $bound)?>)? ::core::fmt::Debug for $type $(<$param>)? {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                let $this = self;
                f.debug_tuple(stringify!($type)).field(&$value).finish()
            }
        }
    };
}
