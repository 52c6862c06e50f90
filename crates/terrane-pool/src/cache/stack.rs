//! A stack of a few values, stored inline.

use std::mem::ManuallyDrop;

/// At most `N` values; the last pushed is the first popped.
#[derive(Debug)]
pub(crate) struct Stack<T, const N: usize> {
    length: usize,
    values: [Option<T>; N],
}

impl<T, const N: usize> Stack<T, N> {
    pub(crate) fn new() -> Self {
        Self { length: 0, values: [const { None }; N] }
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Iterates over the values, the first pushed first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.values.iter().take(self.length).flatten()
    }

    /// Pushes `value`, or returns it if the stack is full.
    #[inline]
    pub(crate) fn push(&mut self, value: T) -> Result<(), T> {
        let Some(place) = self.values.get_mut(self.length) else { return Err(value) };
        // The place is empty, and this stack owns `value`. A drop would read the place first.
        let _ = ManuallyDrop::new(place.replace(value));
        self.length += 1;
        Ok(())
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<T> {
        let top = self.length.checked_sub(1)?;
        self.length = top;
        self.values.get_mut(top)?.take()
    }
}

impl<T, const N: usize> Iterator for Stack<T, N> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.pop()
    }
}
