//! What peers and files are told of layouts: framed, versioned and bounded.
#![forbid(unsafe_code)]

mod descriptor;
mod difference;
mod error;
mod frame;
mod limits;
mod region;
mod v1;

pub use descriptor::LayoutDescriptor;
pub use difference::{
    Difference, FieldValue, GeometryField, GeometryMismatch, first_difference,
    first_shape_difference,
};
pub use error::{Part, WireError};
pub use frame::Content;
pub use limits::{Limited, WireLimits};
pub use region::RegionDescriptor;
