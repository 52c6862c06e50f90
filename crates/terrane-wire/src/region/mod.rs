//! The description of one region, and its wire form.

pub(crate) mod descriptor;
mod encoding;
