//! Read-write locks that ignore poisoning, as `terrane_core::sync::lock` does.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use terrane_core::sync::unpoisoned;

pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    unpoisoned(lock.read())
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    unpoisoned(lock.write())
}
