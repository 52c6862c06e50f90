//! The free blocks of a pool: in the magazines of threads, and in the queue of each class.

pub(crate) mod class_queue;
pub(crate) mod descriptor;
pub(crate) mod membarrier;
mod release;
pub(crate) mod shared_cache;
mod stack;
pub(crate) mod sweep;
pub(crate) mod thread_cache;
pub(crate) mod thread_index;
