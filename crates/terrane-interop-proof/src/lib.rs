//! A C interface over `terrane-interop` and `terrane-arrow`, which Python tests load. Tensors and
//! arrays of other libraries are imported, and Terrane's are exported. Counters show what is still
//! alive.
//!
//! Every function returns 0, or −1 after storing the error for `terrane_proof_error`. The caller
//! owns a returned pointer until it calls the matching release function.

mod arrow;
mod calls;
mod capsule;
mod dlpack;
mod live_counts;
