//! KV tensors.
