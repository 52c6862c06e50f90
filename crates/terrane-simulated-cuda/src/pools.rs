//! The driver's memory pools: their memory, and when they free it.

use crate::code::{Code, Outcome};
use crate::state::State;

/// The unit in which a pool allocates memory of its device.
const STEP: u64 = 2 << 20;

/// The first attribute with 64 bits. Lower numbers have 32 bits.
const RELEASE_THRESHOLD: u32 = 4;

#[derive(Debug)]
pub struct Pool {
    pub device: u32,
    /// The number of bytes that it keeps when a stream, an event or a context is waited for.
    threshold: u64,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
    /// The memory that it may reuse: followed events, opportunistic, internal dependencies.
    reuse: [u64; 3],
    is_destroyed: bool,
}

impl Pool {
    pub const fn new(device: u32) -> Self {
        Self {
            device,
            threshold: 0,
            used: 0,
            used_high: 0,
            reserved: 0,
            reserved_high: 0,
            reuse: [1; 3],
            is_destroyed: false,
        }
    }

    /// The value of an attribute, and whether it has only 32 bits.
    pub fn attribute(&self, attribute: u32) -> Outcome<(u64, bool)> {
        let [events, luck, own] = self.reuse;
        let value = match attribute {
            1 => events,
            2 => luck,
            3 => own,
            RELEASE_THRESHOLD => self.threshold,
            5 => self.reserved,
            6 => self.reserved_high,
            7 => self.used,
            8 => self.used_high,
            _ => return Err(Code::INVALID_VALUE),
        };
        Ok((value, attribute < RELEASE_THRESHOLD))
    }

    /// Whether an allocation may wait for frees of other streams.
    pub const fn may_depend(&self) -> bool {
        let [_, _, own] = self.reuse;
        own != 0
    }

    /// Whether an attribute has only 32 bits.
    pub const fn is_narrow(attribute: u32) -> bool {
        attribute < RELEASE_THRESHOLD
    }

    pub fn set_attribute(&mut self, attribute: u32, value: u64) -> Outcome {
        let [events, luck, own] = &mut self.reuse;
        match (attribute, value) {
            (1, value) => *events = value,
            (2, value) => *luck = value,
            (3, value) => *own = value,
            (RELEASE_THRESHOLD, value) => self.threshold = value,
            // A high-water mark can only be reset.
            (6, 0) => self.reserved_high = self.reserved,
            (8, 0) => self.used_high = self.used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    /// Frees memory beyond the used bytes and `keep`, and returns its bytes.
    fn shrink(&mut self, keep: u64) -> u64 {
        let floor = self.used.max(keep.min(self.reserved)).next_multiple_of(STEP);
        let freed = self.reserved.saturating_sub(floor);
        self.reserved -= freed;
        freed
    }
}

impl State {
    /// The pool, if it is alive.
    pub fn pool(&mut self, pool: u64) -> Outcome<&mut Pool> {
        let alive = self.pools.get_mut(&pool).filter(|pool| !pool.is_destroyed);
        alive.ok_or(Code::INVALID_VALUE)
    }

    /// Takes bytes of a pool, which allocates memory of its device if it has too few.
    ///
    /// # Errors
    ///
    /// Out of memory.
    pub fn take_from_pool(&mut self, pool: u64, bytes: u64) -> Outcome {
        let memory = self.config.memory;
        let state = self.pool(pool)?;
        let unused = state.reserved - state.used;
        let missing = bytes.saturating_sub(unused).next_multiple_of(STEP);
        let device = state.device;
        let device = self.device(device)?;
        if device.used.checked_add(missing).is_none_or(|used| used > memory) {
            return Err(Code::OUT_OF_MEMORY);
        }
        device.used += missing;
        let state = self.pool(pool)?;
        state.reserved += missing;
        state.used += bytes;
        state.used_high = state.used_high.max(state.used);
        state.reserved_high = state.reserved_high.max(state.reserved);
        Ok(())
    }

    /// Returns bytes to a pool, which keeps them.
    pub fn return_to_pool(&mut self, pool: u64, bytes: u64) {
        let Some(state) = self.pools.get_mut(&pool) else { return };
        state.used = state.used.saturating_sub(bytes);
        if state.is_destroyed && state.used == 0 {
            self.trim_pool(pool, 0);
            self.pools.remove(&pool);
        }
    }

    /// Frees unused bytes beyond `keep`.
    pub fn trim_pool(&mut self, pool: u64, keep: u64) {
        let Some(state) = self.pools.get_mut(&pool) else { return };
        let (device, freed) = (state.device, state.shrink(keep));
        if let Ok(device) = self.device(device) {
            device.used = device.used.saturating_sub(freed);
        }
    }

    /// Frees memory of all pools beyond their thresholds, as every wait does.
    pub fn release_beyond_thresholds(&mut self) {
        let pools: Vec<(u64, u64)> =
            self.pools.iter().map(|(&pool, state)| (pool, state.threshold)).collect();
        for (pool, threshold) in pools {
            self.trim_pool(pool, threshold);
        }
    }

    /// Destroys a pool once none of its memory is in use.
    pub fn destroy_pool(&mut self, pool: u64) -> Outcome {
        if self.devices.iter().any(|device| device.default_pool == pool) {
            return Err(Code::INVALID_VALUE);
        }
        let state = self.pool(pool)?;
        state.is_destroyed = true;
        let is_unused = state.used == 0;
        for device in self.devices.iter_mut().filter(|device| device.current_pool == pool) {
            device.current_pool = device.default_pool;
        }
        if is_unused {
            self.return_to_pool(pool, 0);
        }
        Ok(())
    }
}
