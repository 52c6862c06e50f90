//! The calls of the driver that a program without Terrane would make: the baseline of the suite.
//! Functions are looked up by name, so that a missing function skips a case.

#![allow(non_snake_case, reason = "the names of the driver's documentation")]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;

use anyhow::{Context as _, Result, bail};
use libloading::Library;
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, DeviceId};
use terrane_cuda::{DriverCode, Stream};

macro_rules! calls {
    ($(fn $name:ident($($argument:ty),*);)*) => {
        struct Calls {
            $($name: Option<unsafe extern "C" fn($($argument),*) -> u32>,)*
            /// Keeps the library loaded, because the functions are in it.
            _library: Library,
        }

        impl Calls {
            fn find(library: Library) -> Self {
                $(
                    // SAFETY: this is the declaration of the driver's function of that name, and
                    // the library is stored in the same value.
                    let $name = unsafe { library.get(stringify!($name)) };
                    let $name = $name.ok().map(|symbol| *symbol);
                )*
                Self { $($name,)* _library: library }
            }
        }
    };
}

calls! {
    fn cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int);
    fn cuDevicePrimaryCtxRelease_v2(c_int);
    fn cuCtxSetCurrent(*mut c_void);
    fn cuCtxEnablePeerAccess(*mut c_void, c_uint);
    fn cuEventCreate(*mut *mut c_void, c_uint);
    fn cuEventRecord(*mut c_void, *mut c_void);
    fn cuEventQuery(*mut c_void);
    fn cuEventDestroy_v2(*mut c_void);
    fn cuStreamQuery(*mut c_void);
    fn cuStreamWaitEvent(*mut c_void, *mut c_void, c_uint);
    fn cuMemcpyAsync(u64, u64, usize, *mut c_void);
    fn cuMemcpyBatchAsync(
        *mut u64, *mut u64, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, *mut usize,
        *mut c_void
    );
    fn cuMemcpyBatchAsync_v2(
        *mut u64, *mut u64, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, *mut c_void
    );
    fn cuMemAllocAsync(*mut u64, usize, *mut c_void);
    fn cuMemFreeAsync(u64, *mut c_void);
    fn cuDeviceGetDefaultMemPool(*mut *mut c_void, c_int);
    fn cuMemPoolSetAttribute(*mut c_void, c_int, *mut c_void);
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    fn cuMemFreeHost(*mut c_void);
    fn cuModuleLoadData(*mut *mut c_void, *const c_void);
    fn cuModuleUnload(*mut c_void);
    fn cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const std::ffi::c_char);
    fn cuLaunchKernel(
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void,
        *mut *mut c_void, *mut *mut c_void
    );
}

/// `CUmemcpyAttributes`: the order of reads of the source, location hints and flags.
#[repr(C)]
#[derive(Default)]
struct CopyAttributes {
    source_access_order: c_uint,
    source_hint: [c_uint; 2],
    destination_hint: [c_uint; 2],
    flags: c_uint,
}

/// The driver, with the device's primary context current on the thread that opened it.
pub struct Bindings {
    calls: Calls,
    device: c_int,
    context: *mut c_void,
}

// SAFETY: the context is a handle that the driver accepts on any thread, and nothing changes it.
unsafe impl Sync for Bindings {}

fn need<T>(call: Option<T>, name: &str) -> Result<T> {
    call.with_context(|| format!("the driver has no {name}"))
}

fn check(name: &str, code: u32) -> Result<()> {
    if code != 0 {
        bail!("{name}: {}", DriverCode::new(code));
    }
    Ok(())
}

impl Bindings {
    /// Opens the driver. Terrane has already loaded and initialised it.
    pub fn open(device: DeviceId) -> Result<Self> {
        // SAFETY: the library is already loaded, so no initialiser runs.
        let library = unsafe { Library::new("libcuda.so.1") }
            .or_else(|_| {
                // SAFETY: as above.
                unsafe { Library::new("libcuda.so") }
            })
            .context("the driver's library")?;
        let calls = Calls::find(library);
        let device = c_int::try_from(device.get())?;
        let mut context = ptr::null_mut();
        let retain = need(calls.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")?;
        // SAFETY: one handle is written.
        check("cuDevicePrimaryCtxRetain", unsafe { retain(&raw mut context, device) })?;
        let bindings = Self { calls, device, context };
        bindings.make_current()?;
        Ok(bindings)
    }

    /// Makes the device's context current on this thread.
    pub fn make_current(&self) -> Result<()> {
        let call = need(self.calls.cuCtxSetCurrent, "cuCtxSetCurrent")?;
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { call(self.context) })
    }

    /// Enables access from this device to the memory of another one.
    pub fn enable_peer(&self, other: &Self) -> Result<()> {
        let call = need(self.calls.cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess")?;
        self.make_current()?;
        // SAFETY: the context of the other device is retained.
        match unsafe { call(other.context, 0) } {
            // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
            704 => Ok(()),
            code => check("cuCtxEnablePeerAccess", code),
        }
    }

    /// Submits one contiguous copy.
    ///
    /// # Safety
    ///
    /// See `Stream::copy`.
    pub unsafe fn copy(&self, stream: &Stream, to: u64, from: u64, bytes: u64) -> Result<()> {
        let call = need(self.calls.cuMemcpyAsync, "cuMemcpyAsync")?;
        let bytes = ByteCount::new(bytes).to_usize();
        // SAFETY: the caller promises it.
        check("cuMemcpyAsync", unsafe { call(to, from, bytes, stream.handle()) })
    }

    /// Submits many copies in one call.
    ///
    /// # Safety
    ///
    /// See `Stream::copy`, for each copy.
    pub unsafe fn copy_batch(&self, stream: &Stream, pieces: &mut Pieces) -> Result<()> {
        let count = pieces.to.len();
        // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        let mut attributes = CopyAttributes { source_access_order: 1, ..CopyAttributes::default() };
        let mut first_of_attributes = 0_usize;
        let (to, from) = (pieces.to.as_mut_ptr(), pieces.from.as_mut_ptr());
        let (sizes, attributes) = (pieces.sizes.as_mut_ptr(), &raw mut attributes);
        let (first, stream) = (&raw mut first_of_attributes, stream.handle());
        let code = match (self.calls.cuMemcpyBatchAsync_v2, self.calls.cuMemcpyBatchAsync) {
            (Some(call), _) => {
                // SAFETY: the lists have `count` entries each, and there is one set of attributes.
                // The caller promises that the copies are valid.
                unsafe { call(to, from, sizes, count, attributes, first, 1, stream) }
            }
            (None, Some(call)) => {
                let mut failed = 0_usize;
                let failed = &raw mut failed;
                // SAFETY: as above.
                unsafe { call(to, from, sizes, count, attributes, first, 1, failed, stream) }
            }
            (None, None) => bail!("the driver has no cuMemcpyBatchAsync"),
        };
        check("cuMemcpyBatchAsync", code)
    }

    /// Whether the driver has batched copies.
    pub fn has_batches(&self) -> bool {
        self.calls.cuMemcpyBatchAsync_v2.is_some() || self.calls.cuMemcpyBatchAsync.is_some()
    }

    /// Makes the device's default pool keep all freed memory.
    pub fn keep_default_pool(&self) -> Result<()> {
        let find = need(self.calls.cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool")?;
        let set = need(self.calls.cuMemPoolSetAttribute, "cuMemPoolSetAttribute")?;
        let mut pool = ptr::null_mut();
        // SAFETY: one handle is written.
        check("cuDeviceGetDefaultMemPool", unsafe { find(&raw mut pool, self.device) })?;
        let mut threshold = u64::MAX;
        // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        // SAFETY: the attribute has eight bytes, and the driver only reads them.
        let code = unsafe { set(pool, 4, (&raw mut threshold).cast()) };
        check("cuMemPoolSetAttribute", code)
    }

    /// Allocates on a stream and frees on it at once.
    pub fn allocate_and_free(&self, stream: &Stream, bytes: ByteCount) -> Result<()> {
        let allocate = need(self.calls.cuMemAllocAsync, "cuMemAllocAsync")?;
        let free = need(self.calls.cuMemFreeAsync, "cuMemFreeAsync")?;
        let mut address = 0;
        // SAFETY: one address is written.
        let code = unsafe { allocate(&raw mut address, bytes.to_usize(), stream.handle()) };
        check("cuMemAllocAsync", code)?;
        // SAFETY: this function allocated the memory, and no other code has its address.
        check("cuMemFreeAsync", unsafe { free(address, stream.handle()) })
    }

    /// Allocates pinned memory with the driver and frees it at once. Returns the time of the
    /// allocation in seconds.
    pub fn host_alloc(&self, bytes: ByteCount) -> Result<f64> {
        let allocate = need(self.calls.cuMemHostAlloc, "cuMemHostAlloc")?;
        let free = need(self.calls.cuMemFreeHost, "cuMemFreeHost")?;
        let mut address = ptr::null_mut();
        let begin = std::time::Instant::now();
        // SAFETY: one address is written.
        let code = unsafe { allocate(&raw mut address, bytes.to_usize(), PORTABLE_AND_MAPPED) };
        check("cuMemHostAlloc", code)?;
        let took = begin.elapsed().as_secs_f64();
        // SAFETY: this function allocated the memory, and no other code has its address.
        check("cuMemFreeHost", unsafe { free(address) })?;
        Ok(took)
    }

    /// Creates an event for queries, without blocking waits.
    pub fn event(&self) -> Result<Mark<'_>> {
        /// `CU_EVENT_DISABLE_TIMING`.
        const DISABLE_TIMING: c_uint = 2;
        let create = need(self.calls.cuEventCreate, "cuEventCreate")?;
        let mut event = ptr::null_mut();
        // SAFETY: one handle is written.
        check("cuEventCreate", unsafe { create(&raw mut event, DISABLE_TIMING) })?;
        Ok(Mark { bindings: self, event })
    }

    /// Whether all work of a stream has completed.
    pub fn is_idle(&self, stream: &Stream) -> Result<bool> {
        let query = need(self.calls.cuStreamQuery, "cuStreamQuery")?;
        // SAFETY: the stream is alive.
        is_ready("cuStreamQuery", unsafe { query(stream.handle()) })
    }

    /// Compiles a module and looks up its only kernel.
    pub fn kernel(&self, ptx: &CStr, name: &CStr) -> Result<Kernel<'_>> {
        let load = need(self.calls.cuModuleLoadData, "cuModuleLoadData")?;
        let find = need(self.calls.cuModuleGetFunction, "cuModuleGetFunction")?;
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the text ends with a zero byte; one handle is written.
        check("cuModuleLoadData", unsafe { load(&raw mut module, ptx.as_ptr().cast()) })?;
        // SAFETY: the module is loaded; one handle is written.
        let code = unsafe { find(&raw mut function, module, name.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        Ok(Kernel { bindings: self, module, function })
    }
}

fn is_ready(name: &str, code: u32) -> Result<bool> {
    /// `CUDA_ERROR_NOT_READY`.
    const NOT_READY: u32 = 600;
    if code == NOT_READY {
        return Ok(false);
    }
    check(name, code).map(|()| true)
}

/// An event of the driver.
pub struct Mark<'bindings> {
    bindings: &'bindings Bindings,
    event: *mut c_void,
}

impl Mark<'_> {
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let record = need(self.bindings.calls.cuEventRecord, "cuEventRecord")?;
        // SAFETY: the event and the stream are alive and belong to the current context.
        check("cuEventRecord", unsafe { record(self.event, stream.handle()) })
    }

    /// Delays the later work of a stream until the event has occurred.
    pub fn delay(&self, stream: &Stream) -> Result<()> {
        let wait = need(self.bindings.calls.cuStreamWaitEvent, "cuStreamWaitEvent")?;
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe { wait(stream.handle(), self.event, 0) })
    }

    pub fn is_passed(&self) -> Result<bool> {
        let query = need(self.bindings.calls.cuEventQuery, "cuEventQuery")?;
        // SAFETY: the event is alive.
        is_ready("cuEventQuery", unsafe { query(self.event) })
    }
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        if let Some(destroy) = self.bindings.calls.cuEventDestroy_v2 {
            // SAFETY: this value created the event, and nothing uses it any more.
            unsafe { destroy(self.event) };
        }
    }
}

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;

impl Drop for Bindings {
    fn drop(&mut self) {
        if let Some(release) = self.calls.cuDevicePrimaryCtxRelease_v2 {
            // SAFETY: `open` retained the context once. A failure is ignored, because the process
            // ends soon.
            unsafe { release(self.device) };
        }
    }
}

/// A kernel of the benchmark.
pub struct Kernel<'bindings> {
    bindings: &'bindings Bindings,
    module: *mut c_void,
    function: *mut c_void,
}

// SAFETY: the module and the function are handles that the driver accepts on any thread, and
// nothing changes them.
unsafe impl Sync for Kernel<'_> {}

impl Kernel<'_> {
    /// Submits a launch.
    ///
    /// # Safety
    ///
    /// The parameters match the kernel's. The memory that the kernel reads and writes stays valid
    /// until the launch has completed.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 2],
        block: [u32; 2],
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let launch = need(self.bindings.calls.cuLaunchKernel, "cuLaunchKernel")?;
        let ([gx, gy], [bx, by]) = (grid, block);
        let parameters = parameters.as_mut_ptr();
        let (stream, none) = (stream.handle(), ptr::null_mut());
        // SAFETY: the caller promises it.
        let code =
            unsafe { launch(self.function, gx, gy, 1, bx, by, 1, 0, stream, parameters, none) };
        check("cuLaunchKernel", code)
    }
}

impl Drop for Kernel<'_> {
    fn drop(&mut self) {
        if let Some(unload) = self.bindings.calls.cuModuleUnload {
            // SAFETY: this value loaded the module, and its launches have completed.
            unsafe { unload(self.module) };
        }
    }
}

/// Copies of equal length, as lists of addresses.
#[derive(Clone, Default)]
pub struct Pieces {
    pub to: Vec<u64>,
    pub from: Vec<u64>,
    pub sizes: Vec<usize>,
}

impl Pieces {
    pub fn push(&mut self, to: u64, from: u64, bytes: ByteCount) {
        self.to.push(to);
        self.from.push(from);
        self.sizes.push(bytes.to_usize());
    }

    /// Makes one call of the driver for each copy.
    ///
    /// # Safety
    ///
    /// See [`Bindings::copy`], for each copy.
    pub unsafe fn copy_each(&self, bindings: &Bindings, stream: &Stream) -> Result<()> {
        for ((&to, &from), &size) in self.to.iter().zip(&self.from).zip(&self.sizes) {
            // SAFETY: the caller promises it.
            unsafe { bindings.copy(stream, to, from, to_u64(size)) }?;
        }
        Ok(())
    }
}
