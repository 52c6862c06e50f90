//! A device's primary context, bound for each call.

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use cudarc::driver::sys::{CUcontext, CUdevice, CUpointer_attribute};
use terrane_core::{ByteCount, DeviceAddress, DeviceId, Location, Span, StorageKind};

use crate::driver::Driver;
use crate::driver::capture::RelaxedCaptureMode;
use crate::driver::code::DriverCode;
use crate::driver::functions::Functions;
use crate::error::{CudaError, check};
use crate::runtime::binding::{Binding, is_bound};
use crate::runtime::device::{self, Device};
use crate::runtime::event::IdleEvents;
use crate::runtime::stream::Stream;
use crate::runtime::usage::{Counters, ResourceUsage};

/// The primary context of one device. The CUDA runtime, `cudarc` and PyTorch use the same context,
/// so their pointers and streams are valid here.
///
/// Each call binds the context on the calling thread, and restores the previous current context
/// afterwards. During the call, the thread's capture mode is relaxed. So the call does not fail
/// because another thread captures a stream into a graph, and does not invalidate that capture. A
/// query of the captured stream, or of an event in the graph, still does both.
///
/// Cloning costs a reference count. Streams, events and memory hold one reference each. The context
/// is released with the last reference.
///
/// In a process that was forked after the driver was loaded, every call fails with
/// [`CudaError::Forked`], and drops free nothing.
///
/// Some driver codes mean that [the context is lost](DriverCode::loses_context). A call that gets
/// such a code returns [`CudaError::ContextLost`], and the context stores the first such code
/// ([`lost`](Self::lost)). A drop cannot return an error: its failure is counted
/// ([`failed_drops`](Self::failed_drops)) and traced. It is never reported to a later caller.
#[derive(Clone)]
pub struct Context(Arc<Shared>);

struct Shared {
    driver: Driver,
    device: Device,
    handle: CUdevice,
    raw: CUcontext,
    idle_events: IdleEvents,
    counters: Counters,
    /// The first code that lost the context, or zero.
    lost: AtomicU32,
    failed_drops: AtomicU64,
}

// SAFETY: only the driver interprets the handle, and it accepts it on any thread.
unsafe impl Send for Shared {}
// SAFETY: as for `Send`; all other fields are synchronised.
unsafe impl Sync for Shared {}

impl Context {
    /// Returns the primary context of a device. Loads the driver if necessary.
    ///
    /// # Errors
    ///
    /// The errors of [`probe`](crate::probe); [`CudaError::UnknownDevice`]; [`CudaError::Driver`]
    /// if the device refuses (in exclusive mode, for example, because another process uses it).
    pub fn primary(device: DeviceId) -> Result<Self, CudaError> {
        let driver = Driver::load()?;
        let device = driver.device(device)?;
        let handle = device::handle(driver, device.id)?;
        let mut raw = ptr::null_mut();
        // The first retain creates the context.
        let _relaxed = RelaxedCaptureMode::new(driver);
        // SAFETY: the function writes one handle, and checks the device.
        unsafe { driver.functions().cuDevicePrimaryCtxRetain(&raw mut raw, handle) }?;
        Ok(Self(Arc::new(Shared {
            driver,
            device,
            handle,
            raw,
            idle_events: IdleEvents::default(),
            counters: Counters::default(),
            lost: AtomicU32::new(0),
            failed_drops: AtomicU64::new(0),
        })))
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> Driver {
        self.0.driver
    }

    /// The kind of the device's memory.
    #[must_use]
    pub fn kind(&self) -> StorageKind {
        StorageKind::Device(self.0.device.id)
    }

    /// The device's free memory, and its total memory.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn memory(&self) -> Result<(ByteCount, ByteCount), CudaError> {
        let (mut free, mut total) = (0, 0);
        self.bound(|functions| {
            // SAFETY: the function writes two numbers.
            unsafe { functions.cuMemGetInfo_v2(&raw mut free, &raw mut total) }
        })?;
        Ok((ByteCount::from_usize(free), ByteCount::from_usize(total)))
    }

    /// The code that lost the context; `None` while it works.
    #[must_use]
    pub fn lost(&self) -> Option<DriverCode> {
        match self.0.lost.load(Ordering::Relaxed) {
            0 => None,
            code => Some(DriverCode::new(code)),
        }
    }

    /// The number of failures that no caller received: drops of streams, events and memory that the
    /// driver refused, failures to restore a thread's current context, and [leaked](Self::leak)
    /// values.
    #[must_use]
    pub fn failed_drops(&self) -> u64 {
        self.0.failed_drops.load(Ordering::Relaxed)
    }

    /// Leaks a value that cannot be freed safely, because the driver did not answer whether its
    /// device still uses it. Counts as one of the [`failed_drops`](Self::failed_drops).
    pub fn leak<T: Send + 'static>(&self, value: T, why: &CudaError) {
        let _kept = ManuallyDrop::new(value);
        self.note_failed_drop(why);
    }

    /// Counts the memory, streams and events that this context and its clones hold. Other contexts
    /// of the same device, from another [`primary`](Self::primary), count separately.
    #[must_use]
    pub fn usage(&self) -> ResourceUsage {
        let counters = &self.0.counters;
        // In a forked process, a thread that no longer exists may have locked the list.
        let is_forked = self.0.driver.is_of_parent();
        let events_idle = if is_forked { 0 } else { self.0.idle_events.count() };
        ResourceUsage {
            device: counters.device.held(),
            pooled: counters.pooled.held(),
            registered: counters.registered.held(),
            host: counters.host.held(),
            streams: counters.streams.held().count,
            events_created: counters.events_created.load(Ordering::Relaxed),
            events: counters.events.held().count,
            events_idle,
            handles: Arc::strong_count(&self.0),
        }
    }

    /// Checks that `length` bytes starting at `address` lie within one live allocation of this
    /// device's memory. Any library may have made the allocation. This is the first step of
    /// adopting it as [`ForeignMemory`](terrane_core::ForeignMemory).
    ///
    /// Memory that was mapped piece by piece into one address range (`cuMemMap`, as in PyTorch's
    /// expandable segments) is several allocations to the driver. It counts as one here. Other
    /// adjacent allocations do not.
    ///
    /// ```
    /// use terrane_core::{ByteCount, DeviceAddress, ForeignMemory, Region};
    /// use terrane_cuda::{Context, CudaError};
    ///
    /// /// A tensor of another library (PyTorch's `data_ptr()` and `nbytes`), for
    /// /// `LayoutBuilder::adopt`, which takes one region a layer, or one for all.
    /// fn adopt<T: Send + Sync + 'static>(
    ///     context: &Context,
    ///     tensor: T,
    ///     address: u64,
    ///     bytes: u64,
    /// ) -> Result<Region, CudaError> {
    ///     let span = context.device_span(DeviceAddress::new(address), ByteCount::new(bytes))?;
    ///     // SAFETY: the tensor keeps the bytes alive, and every user orders its work with the
    ///     // transfers: by streams, events, or holds of blocks.
    ///     Ok(Region::new(unsafe { ForeignMemory::new(span, tensor) }))
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`CudaError::NotDeviceMemory`] if they are not within one allocation;
    /// [`CudaError::ContextLost`].
    pub fn device_span(
        &self,
        address: DeviceAddress,
        length: ByteCount,
    ) -> Result<Span, CudaError> {
        let device = self.device().id;
        let refused = || CudaError::NotDeviceMemory { address: address.get(), length, device };
        let answer = |error: CudaError| if error.is_context_lost() { error } else { refused() };
        let end = address.checked_add(length).ok_or_else(refused)?.get();
        let mut at = address;
        let mut piece_end = self.allocation_end(at).map_err(answer)?;
        while piece_end < end {
            let next = DeviceAddress::new(piece_end);
            if !self.is_mapped(at).map_err(answer)? || !self.is_mapped(next).map_err(answer)? {
                return Err(refused());
            }
            (at, piece_end) = (next, self.allocation_end(next).map_err(answer)?);
        }
        Ok(Span { kind: self.kind(), location: Location::Device { device, address }, length })
    }

    /// The end of the device allocation that contains an address.
    ///
    /// # Errors
    ///
    /// Any error but [`CudaError::ContextLost`] if no allocation contains the address.
    fn allocation_end(&self, address: DeviceAddress) -> Result<u64, CudaError> {
        let device = self.device().id;
        let ask = |attribute| self.pointer_attribute(address, attribute);
        // `CU_MEMORYTYPE_DEVICE`
        let is_device = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? == 2;
        let ordinal = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
        let is_managed = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED)? != 0;
        let start = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
        let size = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
        let is_here = is_device && !is_managed && ordinal == u64::from(device.get());
        let length = ByteCount::new(1);
        start
            .checked_add(size)
            .filter(|end| is_here && (start..*end).contains(&address.get()))
            .ok_or(CudaError::NotDeviceMemory { address: address.get(), length, device })
    }

    /// Whether the device memory at this address was mapped as part of a larger range (`cuMemMap`).
    /// Such memory has neither a legacy IPC handle nor a memory pool. Other memory has one of them.
    fn is_mapped(&self, address: DeviceAddress) -> Result<bool, CudaError> {
        // A driver that does not know an attribute has no such memory.
        let ask = |attribute, otherwise| match self.pointer_attribute(address, attribute) {
            Err(error) if error.is_context_lost() => Err(error),
            answer => Ok(answer.unwrap_or(otherwise)),
        };
        let shared = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        let pool = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
        Ok(ask(shared, 1)? == 0 && ask(pool, 0)? == 0)
    }

    /// Returns an attribute of an address, as a number of at most eight bytes.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`] for an address that the driver does not know;
    /// [`CudaError::ContextLost`].
    pub(crate) fn pointer_attribute(
        &self,
        address: DeviceAddress,
        attribute: CUpointer_attribute,
    ) -> Result<u64, CudaError> {
        // The requested attributes have at most eight bytes. The host is little-endian, so a
        // shorter value is the same number.
        let mut value = 0_u64;
        self.bound(|functions| {
            let to = (&raw mut value).cast();
            // SAFETY: the function writes at most eight bytes, and checks the address.
            unsafe { functions.cuPointerGetAttribute(to, attribute, address.get()) }
        })?;
        Ok(value)
    }

    /// Runs `call` with this context current and in the relaxed capture mode. Then it restores the
    /// previous current context and mode. A call within another one of this context only runs `call`.
    pub(crate) fn bound<T>(
        &self,
        call: impl FnOnce(&'static Functions) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let result = self.0.bound(call);
        if let Err(error) = &result {
            self.note_lost(error);
        }
        result
    }

    /// Stores the code of an error that lost the context. The first one is kept: it is the nearest
    /// to the cause.
    #[cold]
    #[inline(never)]
    fn note_lost(&self, error: &CudaError) {
        if let CudaError::ContextLost { code, .. } = error {
            let _ =
                self.0.lost.compare_exchange(0, code.get(), Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Like [`bound`](Self::bound), for the calls of a drop.
    pub(crate) fn bound_in_drop(
        &self,
        call: impl FnOnce(&'static Functions) -> Result<(), CudaError>,
    ) {
        if let Err(error) = self.bound(call) {
            self.note_failed_drop(&error);
        }
    }

    /// Counts and traces a failure of a drop.
    pub(crate) fn note_failed_drop(&self, error: &CudaError) {
        note_failed_drop(&self.0, error);
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    pub(crate) fn idle_events(&self) -> &IdleEvents {
        &self.0.idle_events
    }

    /// Lets kernels and copies of this context access the memory of another device. The access
    /// stays enabled until the process ends. Returns whether access is enabled.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub(crate) fn reach_peer(&self, peer: &Self) -> Result<bool, CudaError> {
        /// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`: another caller enabled it, with the same
        /// effect.
        const ALREADY: u32 = 704;
        let functions = self.0.driver.functions();
        let (Some(_), Some(enable)) =
            (functions.cuDeviceCanAccessPeer, functions.cuCtxEnablePeerAccess)
        else {
            return Ok(false);
        };
        let mut answer = 0;
        // SAFETY: one number is written, and the devices exist.
        unsafe { functions.cuDeviceCanAccessPeer(&raw mut answer, self.0.handle, peer.0.handle) }?;
        if answer == 0 {
            return Ok(false);
        }
        self.bound(|_| {
            // SAFETY: `peer` retains the peer's context. The access is never disabled.
            match unsafe { enable(peer.0.raw, 0) } {
                ALREADY => Ok(true),
                code => check("cuCtxEnablePeerAccess", code).map(|()| true),
            }
        })
    }

    /// Whether the handle is this context's handle.
    pub(crate) fn is(&self, raw: CUcontext) -> bool {
        self.0.raw == raw
    }

    /// Whether both are the same context.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.0.raw == other.0.raw
    }

    /// Refuses a stream of another context.
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`].
    #[inline]
    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<(), CudaError> {
        if self.same(stream.context()) {
            return Ok(());
        }
        Err(CudaError::WrongContext { what: "stream", device: self.device().id })
    }
}

impl Shared {
    fn bound<T>(
        &self,
        call: impl FnOnce(&'static Functions) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let _binding = if is_bound(self.raw) {
            None
        } else {
            Some(Binding::new(self.driver, self.raw, &self.failed_drops)?)
        };
        call(self.driver.functions())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.driver.is_of_parent() {
            return;
        }
        // The last release destroys the context.
        let _relaxed = RelaxedCaptureMode::new(self.driver);
        let events = self.idle_events.take_all();
        let destroyed = self.bound(|functions| {
            for event in events {
                if let Err(error) = event.destroy(functions) {
                    note_failed_drop(self, &error);
                }
            }
            Ok(())
        });
        if let Err(error) = destroyed {
            note_failed_drop(self, &error);
        }
        // SAFETY: this value retained it once, when it was created.
        let released = unsafe { self.driver.functions().cuDevicePrimaryCtxRelease_v2(self.handle) };
        if let Err(error) = released {
            note_failed_drop(self, &error);
        }
    }
}

fn note_failed_drop(shared: &Shared, error: &CudaError) {
    if matches!(error, CudaError::Forked) {
        // The context belongs to the parent process, which releases it.
        return;
    }
    shared.failed_drops.fetch_add(1, Ordering::Relaxed);
    if error.code() == Some(DriverCode::DEINITIALIZED) {
        // The process is ending; the driver has freed everything.
        return;
    }
    tracing::warn!(device = %shared.device.id, %error, "a driver call of a drop failed");
}

terrane_core::debug_fields!(Context, |it| { device: it.0.device.id, lost: it.lost() });
