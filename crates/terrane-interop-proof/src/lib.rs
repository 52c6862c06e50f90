//! A C interface over `terrane-interop` and `terrane-arrow`, which Python tests load: tensors and arrays
//! of other libraries go in, Terrane's come out, and the accounts say what is still alive.
//!
//! Every function answers 0, or −1 after having noted why for `terrane_proof_error`. What
//! is handed out by pointer is owned by the caller until it calls what takes it back.

mod accounts;
mod arrow;
mod calls;
mod capsule;
mod dlpack;
mod kv;
