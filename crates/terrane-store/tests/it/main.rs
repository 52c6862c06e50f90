//! Tests of the public interface.

mod eviction;
mod index;
mod queue;
