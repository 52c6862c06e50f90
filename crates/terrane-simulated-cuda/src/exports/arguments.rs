//! Pointers from C, through which a function reads its arguments and writes its results.

use std::ffi::{CStr, c_char};

use crate::code::{Code, Outcome};

/// The address for a result. It comes only from a caller in C, who guarantees that it is null or
/// valid.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(pub(super) *mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// # Errors
    ///
    /// An invalid value if the pointer is null.
    pub(super) fn set(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller guarantees that it is valid for a value of the type; not
        // necessarily aligned.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Like [`set`](Self::set), but null means that the result is not needed.
    pub(super) fn set_if_wanted(self, value: T) {
        // Null is not an error here.
        let _ = self.set(value);
    }

    /// The present value, for a function that exchanges it.
    ///
    /// # Errors
    ///
    /// An invalid value if the pointer is null.
    pub(super) fn read(self) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller guarantees a value of the type; not necessarily aligned.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The same pointer with another type, which the caller guarantees.
    pub(super) const fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The address of a result for a caller in Rust. It must stay valid for the call.
    pub fn to(answer: &mut T) -> Self {
        Self(answer)
    }

    /// The address of a result that is not needed.
    #[must_use]
    pub const fn null() -> Self {
        Self(std::ptr::null_mut())
    }
}

impl Out<u8> {
    /// Writes a text and a zero byte, truncated to `length` bytes.
    pub(super) fn set_text(self, text: &str, length: i32) -> Outcome {
        let length = usize::try_from(length).map_err(|_| Code::INVALID_VALUE)?;
        if self.0.is_null() || length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let text = text.as_bytes();
        let text = text.get(..length - 1).unwrap_or(text);
        // SAFETY: the caller guarantees that the buffer has `length` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.0, text.len()) };
        Out(self.0.wrapping_add(text.len())).set(0)
    }
}

/// The address of one or several arguments. It comes only from a caller in C, who guarantees that
/// it is null or valid.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(pub(super) *const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> In<T> {
    /// Arguments from a caller in Rust. They must stay valid for the call.
    #[must_use]
    pub const fn of(arguments: &[T]) -> Self {
        Self(arguments.as_ptr())
    }

    /// The same pointer with another type.
    #[must_use]
    pub const fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// No arguments.
    #[must_use]
    pub const fn none() -> Self {
        Self(std::ptr::null())
    }
}

impl<T: Copy> In<T> {
    /// # Errors
    ///
    /// An invalid value if the pointer is null.
    pub(super) fn get(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let at = self.0.wrapping_add(index);
        // SAFETY: not null, so the caller guarantees this many values; not necessarily aligned.
        Ok(unsafe { at.read_unaligned() })
    }

    pub(super) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Reads this many bytes.
    pub(super) fn bytes(self, length: usize) -> Outcome<Vec<u8>> {
        let bytes = In(self.0.cast::<u8>());
        (0..length).map(|index| bytes.get(index)).collect()
    }
}

impl In<c_char> {
    pub(super) fn text(self) -> Outcome<&'static CStr> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller guarantees a string that ends. It is used only until the
        // call returns.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}
