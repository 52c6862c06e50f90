//! An upstream with exact accounts: addresses without memory, a capacity, and faults on demand.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use terrane_core::{
    Allocate, AllocateError, ByteCount, DeviceAddress, DeviceId, ForeignMemory, Limits, Location,
    Memory, RegionRequest, Span, StorageKind,
};

/// Clones share the account. When the last clone drops, it checks that all memory has been freed.
#[derive(Clone, Debug)]
pub struct Counted {
    account: Shared,
    _audit: Arc<Audit>,
}

#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<Account>>);

/// Checks the account when the last handle drops.
#[derive(Debug)]
struct Audit(Shared);

impl Drop for Audit {
    fn drop(&mut self) {
        let leaks = !comes_true(|| self.0.with(|account| account.live.len() <= account.leaks));
        assert!(!leaks || std::thread::panicking(), "memory outlived its upstream: {:?}", self.0);
    }
}

#[derive(Debug, Default)]
struct Account {
    /// Live regions: address to length.
    live: BTreeMap<u64, u64>,
    bytes: u64,
    capacity: u64,
    next: u64,
    faults: u32,
    allocations: u64,
    /// The number of regions that may be live at the end.
    leaks: usize,
}

#[derive(Debug)]
pub struct Token {
    account: Shared,
    address: u64,
}

pub type Block = terrane_pool::PoolBlock<ForeignMemory<Token>>;

impl Counted {
    pub fn new(capacity: ByteCount) -> Self {
        let account = Account { capacity: capacity.get(), next: 1 << 20, ..Account::default() };
        let account = Shared(Arc::new(Mutex::new(account)));
        Self { account: account.clone(), _audit: Arc::new(Audit(account)) }
    }

    /// Allows this many live regions when the last handle drops.
    pub fn expect_leaks(&self, count: usize) {
        self.with(|account| account.leaks = count);
    }

    pub fn unlimited() -> Self {
        Self::new(ByteCount::new(u64::MAX))
    }

    fn with<R>(&self, work: impl FnOnce(&mut Account) -> R) -> R {
        self.account.with(work)
    }

    /// Live bytes.
    pub fn bytes(&self) -> ByteCount {
        ByteCount::new(self.with(|account| account.bytes))
    }

    pub fn regions(&self) -> usize {
        self.with(|account| account.live.len())
    }

    pub fn allocations(&self) -> u64 {
        self.with(|account| account.allocations)
    }

    pub fn set_capacity(&self, capacity: ByteCount) {
        self.with(|account| account.capacity = capacity.get());
    }

    /// Makes the next `count` requests fail with a backend error.
    pub fn fail_next(&self, count: u32) {
        self.with(|account| account.faults = count);
    }

    /// Panics unless all memory has been freed.
    pub fn assert_empty(&self) {
        comes_true(|| self.regions() == 0);
        let (regions, bytes) = (self.regions(), self.bytes());
        assert!(regions == 0 && bytes.is_zero(), "{regions} regions of {bytes} leaked");
    }
}

/// Waits for `condition`, and returns whether it holds. A thread may free memory after the end of
/// its scope. Only a failure waits for the whole time.
pub fn comes_true(condition: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

impl Shared {
    fn with<R>(&self, work: impl FnOnce(&mut Account) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.account.with(|account| {
            let length = account.live.remove(&self.address).expect("freed twice");
            account.bytes -= length;
        });
    }
}

// SAFETY: the returned memory belongs to the test alone.
unsafe impl Allocate for Counted {
    type Memory = ForeignMemory<Token>;

    fn kind(&self) -> StorageKind {
        StorageKind::Device(DeviceId::new(0))
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let (kind, bytes) = (self.kind(), request.bytes.get());
        let address = self.with(|account| {
            if account.faults > 0 {
                account.faults -= 1;
                return Err(AllocateError::Backend {
                    kind,
                    requested: request.bytes,
                    label: request.label.clone(),
                    source: "a fault on demand".into(),
                });
            }
            let available = account.capacity - account.bytes;
            if bytes > available {
                return Err(AllocateError::OutOfMemory {
                    kind,
                    requested: request.bytes,
                    available: Some(ByteCount::new(available)),
                    label: request.label.clone(),
                    source: None,
                });
            }
            let address = account.next.next_multiple_of(request.alignment.get().max(512));
            account.next = address + bytes.max(1);
            account.live.insert(address, bytes);
            account.bytes += bytes;
            account.allocations += 1;
            Ok(address)
        })?;
        let device = DeviceId::new(0);
        let location = Location::Device { device, address: DeviceAddress::new(address) };
        let span = Span { kind, location, length: request.bytes };
        // SAFETY: no code accesses memory of a device that does not exist.
        Ok(unsafe { ForeignMemory::new(span, Token { account: self.account.clone(), address }) })
    }
}

pub fn address(block: &impl Memory) -> u64 {
    let Location::Device { address, .. } = block.location() else { panic!("not on a device") };
    address.get()
}
