//! Memory that somebody else allocated.

use std::fmt;

use crate::{ByteCount, DeviceAddress, Location, Memory, RegistrationRecord, Span, StorageKind};

/// Adopted memory: a span of somebody else's, with the owner that is kept alive.
///
/// A serving engine has its KV tensors already. With the tensor, or a counted reference to it, as
/// the owner, every layout, pool and transfer works over its bytes without a copy. The owner
/// drops when the last user of the memory has gone.
pub struct ForeignMemory<O> {
    span: Span,
    device_alias: Option<DeviceAddress>,
    registration: Option<RegistrationRecord>,
    owner: O,
}

impl<O: Send + Sync + 'static> ForeignMemory<O> {
    /// Adopts `span`.
    ///
    /// # Safety
    ///
    /// For as long as `owner` lives, all that [`Memory`] promises holds of `span`: the bytes are
    /// valid for reads and writes, stay where they are, are initialised if they are the host's,
    /// and nobody accesses them without synchronising with the users of this value. The kind is
    /// the true one, and fits the location.
    #[must_use]
    pub unsafe fn new(span: Span, owner: O) -> Self {
        Self { span, device_alias: None, registration: None, owner }
    }

    /// Says by which address a device reaches these host bytes.
    ///
    /// # Safety
    ///
    /// For as long as the owner lives, the device reaches the whole span from `alias` on.
    #[must_use]
    pub unsafe fn with_device_alias(self, alias: DeviceAddress) -> Self {
        Self { device_alias: Some(alias), ..self }
    }

    /// Says that the owner has registered the memory already.
    ///
    /// # Safety
    ///
    /// The registration is in force, covers the span, and stays so for as long as the owner
    /// lives.
    #[must_use]
    pub unsafe fn with_registration(self, record: RegistrationRecord) -> Self {
        Self { registration: Some(record), ..self }
    }

    /// The owner.
    pub fn owner(&self) -> &O {
        &self.owner
    }

    /// Gives the owner back.
    pub fn into_owner(self) -> O {
        self.owner
    }
}

// SAFETY: whoever called `new` promised it of the span, for as long as the owner lives, which is
// as long as this value.
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

    fn device_alias(&self) -> Option<DeviceAddress> {
        self.device_alias
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        if let Some(record) = &self.registration {
            visit(record);
        }
    }
}

impl<O> fmt::Debug for ForeignMemory<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignMemory").field("span", &self.span).finish_non_exhaustive()
    }
}
