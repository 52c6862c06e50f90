//! What peers and files are told of layouts: framed, versioned and bounded.
#![forbid(unsafe_code)]
