//! What NIXL is told of a span, derived from its location.

use terrane_core::{Location, Span};

use crate::{FileAccess, MemoryType, Refusal};

/// A span in NIXL's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Descriptor {
    pub(crate) memory: MemoryType,
    /// An address, or a position in a file.
    pub(crate) address: usize,
    pub(crate) length: usize,
    /// The ordinal of a device, the descriptor of a file, 0 for host memory.
    pub(crate) device: u64,
}

impl Descriptor {
    pub(crate) fn of(span: &Span, access: FileAccess) -> Result<Self, Refusal> {
        if span.length.is_zero() {
            return Err(Refusal::Empty);
        }
        let (memory, address, device) = match span.location {
            Location::Host(address) => (MemoryType::Host, address.get(), 0),
            Location::Device { device, address } => {
                (MemoryType::Device, address.get(), u64::from(device.get()))
            }
            Location::File(position) => {
                let descriptor = match access {
                    FileAccess::Buffered => position.file.descriptor,
                    FileAccess::Direct => {
                        position.file.direct.ok_or(Refusal::NoDirectDescriptor)?.descriptor
                    }
                };
                let device =
                    u64::try_from(descriptor).map_err(|_| Refusal::Descriptor(descriptor))?;
                (MemoryType::File, position.offset.get(), device)
            }
            _ => return Err(Refusal::Kind { kind: span.kind }),
        };
        let address = terrane_core::ByteCount::new(address).to_usize();
        Ok(Self { memory, address, length: span.length.to_usize(), device })
    }
}

impl nixl_sys::MemoryRegion for Descriptor {
    unsafe fn as_ptr(&self) -> *const u8 {
        std::ptr::without_provenance(self.address)
    }

    fn size(&self) -> usize {
        self.length
    }
}

impl nixl_sys::NixlDescriptor for Descriptor {
    fn mem_type(&self) -> nixl_sys::MemType {
        self.memory.into_raw()
    }

    fn device_id(&self) -> u64 {
        self.device
    }
}
