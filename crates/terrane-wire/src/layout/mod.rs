//! The description of a layout, and its wire form.

pub(crate) mod descriptor;
mod encoding;
