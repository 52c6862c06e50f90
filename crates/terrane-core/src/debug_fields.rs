//! `Debug` of values that show few of their fields.

/// Implements [`Debug`](std::fmt::Debug) for a type with the named values, and states that there is more.
///
/// ```
/// use terrane_core::debug_fields;
///
/// struct Queue<T> {
///     values: Vec<T>,
/// }
///
/// struct Place;
///
/// struct Sum<T: Copy>(T);
///
/// debug_fields!(Queue<T>, |it| length: it.values.len());
/// debug_fields!(Place);
/// debug_fields!(Sum<T: Copy>);
/// assert_eq!(format!("{:?}", Queue { values: vec![7] }), "Queue { length: 1, .. }");
/// assert_eq!(format!("{Place:?}"), "Place { .. }");
/// ```
#[macro_export]
macro_rules! debug_fields {
    (
        $type:ident $(<$value:ident $(: $bound:path)?>)? $(, |$it:ident| $($name:ident: $field:expr),+)?
    ) => {
        impl $(<$value $(: $bound)?>)? ::core::fmt::Debug for $type $(<$value>)? {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                let mut fields = f.debug_struct(::core::stringify!($type));
                $(
                    let $it = self;
                    $(fields.field(::core::stringify!($name), &$field);)+
                )?
                fields.finish_non_exhaustive()
            }
        }
    };
}
