//! Arguments that name one layer or several.

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo};

/// One layer or several, numbered as in [`Layers::range`](crate::Layers::range): `3`, `2..5`,
/// `2..=4`, `..5`, `2..` or `..`.
///
/// A range without an end reaches to the last layer of the transfer, and one without a start begins
/// at its first layer.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not name layers",
    label = "a layer is a `u32`; several are a range of `u32`, such as `0..4` or `..`"
)]
pub trait LayerRange: sealed::Sealed {
    /// Returns the layers, as a part of the transfer's layers.
    #[doc(hidden)]
    fn of(self, transferred: Range<u32>) -> Range<u32>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! names_layers {
    ($($type:ty: $this:ident, $all:ident => $range:expr;)*) => {$(
        impl sealed::Sealed for $type {}

        impl LayerRange for $type {
            fn of(self, $all: Range<u32>) -> Range<u32> {
                let $this = self;
                $range
            }
        }
    )*};
}

names_layers! {
    // `u32::MAX` is never a layer, because a layout has at most that many layers.
    u32: this, _all => this..this.saturating_add(1);
    Range<u32>: this, _all => this;
    RangeInclusive<u32>: this, _all => *this.start()..this.end().saturating_add(1);
    RangeFrom<u32>: this, all => this.start..all.end.max(this.start);
    RangeTo<u32>: this, all => all.start.min(this.end)..this.end;
    RangeFull: _this, all => all;
}
