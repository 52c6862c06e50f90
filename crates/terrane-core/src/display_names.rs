//! `Display` of enums whose variants have names.

/// Implements [`Display`](std::fmt::Display) for an enum, with a name for each variant.
///
/// ```
/// use terrane_core::display_names;
///
/// enum End {
///     Near,
///     Far,
/// }
///
/// display_names!(End { Near => "near", Far => "far" });
/// assert_eq!(format!("{:>5}, {}", End::Near, End::Far), " near, far");
/// ```
#[macro_export]
macro_rules! display_names {
    ($type:ident { $($variant:ident => $name:expr),+ $(,)? }) => {
        impl ::core::fmt::Display for $type {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.pad(match self {
                    $(Self::$variant => $name),+
                })
            }
        }
    };
}
