//! Memory that other code allocated.

use crate::bytes::byte_count::ByteCount;
use crate::location::Location;
use crate::location::storage_kind::StorageKind;
use crate::memory::Memory;
use crate::memory::span::Span;
use crate::register::registration::RegistrationRecord;

/// Adopted memory: a span that other code allocated, with an owner that keeps it alive.
///
/// A serving engine has already allocated its KV tensors. Pass the tensor, or a counted reference
/// to it, as the owner. Every layout, pool and transfer then works on its bytes without a copy. The
/// owner drops with the last user of the memory.
pub struct ForeignMemory<O> {
    span: Span,
    registration: Option<RegistrationRecord>,
    owner: O,
}

impl<O: Send + Sync + 'static> ForeignMemory<O> {
    /// Adopts `span`.
    ///
    /// # Safety
    ///
    /// While `owner` lives, `span` must meet the contract of [`Memory`]. The bytes are valid for
    /// reads and writes and do not move. Host bytes are initialised. Their pages are not discarded,
    /// replaced or unmapped: an engine that has registered the memory with the kernel would read
    /// and write the earlier pages. Every access by other code is synchronised with the users of
    /// this value. The kind is correct and matches the location.
    #[must_use]
    pub unsafe fn new(span: Span, owner: O) -> Self {
        Self { span, registration: None, owner }
    }

    /// States that the owner has already registered the memory.
    ///
    /// # Safety
    ///
    /// The registration must be in force, cover the span, and stay in force while the owner lives.
    #[must_use]
    pub unsafe fn with_registration(self, record: RegistrationRecord) -> Self {
        Self { registration: Some(record), ..self }
    }

    /// The owner.
    pub fn owner(&self) -> &O {
        &self.owner
    }
}

// SAFETY: the caller of `new` guarantees the contract of `Memory` for the span while the owner
// lives. The owner lives as long as this value.
unsafe impl<O: Send + Sync + 'static> Memory for ForeignMemory<O> {
    fn kind(&self) -> StorageKind {
        self.span.kind
    }

    fn location(&self) -> Location {
        self.span.location
    }

    fn length(&self) -> ByteCount {
        self.span.length
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        if let Some(record) = &self.registration {
            visit(record);
        }
    }
}

crate::debug_fields!(ForeignMemory<O>, |it| { span: it.span });
