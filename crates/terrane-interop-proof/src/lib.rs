//! A C interface over `terrane-interop` and `terrane-arrow` for Python tests. It imports tensors
//! and arrays of other libraries, and exports Terrane's. Counters show the number of live
//! resources.
//!
//! Every function returns 0, or −1 after storing the error for `terrane_proof_error`. The caller
//! owns a returned pointer until it calls the matching release function.

mod arrow;
mod calls;
mod capsule;
mod dlpack;
mod live_counts;
