//! Registered memory implements no trait that gives mutable access.

use std::borrow::BorrowMut;
use std::ops::DerefMut;

use terrane_core::{Memory, Registered};

fn dereferenced<M: Memory>(_: impl DerefMut<Target = M>) {}
fn converted<M: Memory>(_: impl AsMut<M>) {}
fn borrowed<M: Memory>(_: impl BorrowMut<M>) {}

fn wrong<M: Memory>(first: Registered<M>, second: Registered<M>, third: Registered<M>) {
    dereferenced::<M>(first);
    converted::<M>(second);
    borrowed::<M>(third);
}

fn main() {}
