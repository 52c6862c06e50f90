//! The locks and atomics of the index: the standard library's, or the model checker's under
//! `--cfg loom`. Locks ignore poisoning, as `terrane_core::sync::lock` does.

#[cfg(loom)]
pub(crate) use loom::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, atomic};

#[cfg(not(loom))]
pub(crate) use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, atomic};

use terrane_core::sync::unpoisoned;

pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    unpoisoned(lock.read())
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    unpoisoned(lock.write())
}
