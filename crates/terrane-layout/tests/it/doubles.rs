//! An allocator and a registrar that record their requests. Their memory is only a number, because
//! a layout never accesses a byte.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use terrane_core::{
    AgentName, Alignment, Allocate, AllocateError, BackendName, BackendOutcome, ByteCount,
    Capability, CapabilityReport, CapabilityStatus, DeviceAddress, DeviceId, FileHandle,
    FileIdentity, FilePosition, Limits, Location, Memory, RegionRequest, Register, RegisterError,
    Registration, RegistrationRecord, Requirement, Span, StorageKind,
};
use terrane_layout::{ElementFormat, LayoutConfig};

/// 5 blocks, 3 layers, K and V, pieces of 6 · 8 · 2 = 96 bytes: regions of 960 bytes per layer.
pub fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(5)
        .num_layers(3)
        .outer_dim(2)
        .page_size(6)
        .inner_dim(8)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Vec<String>>>);

impl Journal {
    pub fn write(&self, entry: impl Into<String>) {
        self.0.lock().unwrap().push(entry.into());
    }

    pub fn entries(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

/// Records its entry when it drops.
#[derive(Debug)]
pub struct AtDrop(pub Journal, pub String);

impl Drop for AtDrop {
    fn drop(&mut self) {
        self.0.write(std::mem::take(&mut self.1));
    }
}

#[derive(Debug)]
pub struct NumberedMemory {
    span: Span,
    _release: AtDrop,
}

impl NumberedMemory {
    pub fn new(span: Span, journal: &Journal, name: &str) -> Self {
        Self { span, _release: AtDrop(journal.clone(), format!("release {name}")) }
    }
}

// SAFETY: no test reads or writes the span, and every method always returns the same value.
unsafe impl Memory for NumberedMemory {
    fn kind(&self) -> StorageKind {
        self.span.kind
    }

    fn location(&self) -> Location {
        self.span.location
    }

    fn length(&self) -> ByteCount {
        self.span.length
    }

    fn capabilities(&self) -> CapabilityReport {
        let mut report = CapabilityReport::default();
        report.record(Capability::NumaBinding, Requirement::Preferred, CapabilityStatus::Granted);
        report
    }
}

pub fn device_span(address: u64, length: u64) -> Span {
    let device = DeviceId::new(0);
    Span {
        kind: StorageKind::Device(device),
        location: Location::Device { device, address: DeviceAddress::new(address) },
        length: ByteCount::new(length),
    }
}

pub fn file_span(offset: u64, length: u64) -> Span {
    let identity = FileIdentity { file_system: 1, inode: 2 };
    let file = FileHandle { descriptor: 7, direct: None, identity, durability: Default::default() };
    Span {
        kind: StorageKind::Disk,
        location: Location::File(FilePosition { file, offset: ByteCount::new(offset) }),
        length: ByteCount::new(length),
    }
}

/// Returns the same address for every request, and fails as configured.
pub struct Allocator {
    pub journal: Journal,
    pub limits: Limits,
    pub kind: StorageKind,
    pub address: u64,
    /// The returned memory is this many bytes shorter than requested.
    pub short_by: u64,
    pub refuses: bool,
    pub latest: Cell<Option<ByteCount>>,
}

impl Allocator {
    pub fn new(journal: &Journal) -> Self {
        Self {
            journal: journal.clone(),
            limits: Limits::NONE,
            kind: StorageKind::Device(DeviceId::new(0)),
            address: 1 << 30,
            short_by: 0,
            refuses: false,
            latest: Cell::new(None),
        }
    }
}

// SAFETY: only the test uses the memory.
unsafe impl Allocate for Allocator {
    type Memory = NumberedMemory;

    fn kind(&self) -> StorageKind {
        self.kind
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn allocate(&self, request: &RegionRequest) -> Result<NumberedMemory, AllocateError> {
        self.journal.write("allocate");
        self.latest.set(Some(request.bytes));
        if self.refuses {
            return Err(AllocateError::OutOfMemory {
                kind: self.kind,
                requested: request.bytes,
                available: None,
                label: request.label.clone(),
                source: None,
            });
        }
        let length = request.bytes.get() - self.short_by;
        let span = match self.kind {
            StorageKind::Disk => file_span(self.address, length),
            _ => device_span(self.address, length),
        };
        Ok(NumberedMemory::new(span, &self.journal, "base"))
    }
}

/// Accepts every registration until the configured call, which it refuses.
pub struct Registrar {
    pub agent: AgentName,
    pub journal: Journal,
    pub limits: Limits,
    pub refuses_call: Option<u32>,
    pub calls: Cell<u32>,
}

impl Registrar {
    pub fn new(journal: &Journal) -> Self {
        Self {
            agent: "agent".into(),
            journal: journal.clone(),
            limits: Limits::NONE,
            refuses_call: None,
            calls: Cell::new(0),
        }
    }

    pub fn refusing(journal: &Journal, call: u32) -> Self {
        Self { refuses_call: Some(call), ..Self::new(journal) }
    }
}

impl Register for Registrar {
    fn agent(&self) -> &AgentName {
        &self.agent
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
        let call = self.calls.replace(self.calls.get() + 1);
        if self.refuses_call == Some(call) {
            self.journal.write(format!("refuse {call}"));
            let (agent, kind) = (self.agent.clone(), memory.kind());
            return Err(RegisterError::UnsupportedKind { agent, kind });
        }
        self.journal.write(format!("register {call}"));
        let backend = BackendOutcome { backend: BackendName::from("UCX"), refusal: None };
        let record = RegistrationRecord {
            agent: self.agent.clone(),
            span: Span::of(memory),
            backends: vec![backend],
        };
        let handle = AtDrop(self.journal.clone(), format!("deregister {call}"));
        Ok(Registration::new(record, handle))
    }
}

pub fn aligned(bytes: u64) -> Limits {
    Limits { alignment: Alignment::new(bytes).unwrap(), ..Limits::NONE }
}

pub fn at_most(bytes: u64) -> Limits {
    Limits { largest_region: Some(ByteCount::new(bytes)), ..Limits::NONE }
}
