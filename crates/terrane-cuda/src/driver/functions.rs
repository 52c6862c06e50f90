//! The functions of the driver's library, found by name when it is loaded.
//!
//! This module does not call the bindings of `cudarc` directly, for two reasons. They panic if the
//! library or a symbol is missing. They also return codes as a Rust `enum`, and a newer driver can
//! return codes outside it.
//!
//! Instead, the library is opened here, and codes are plain numbers. The compiler checks each
//! declaration against the bindings: a wrong argument does not compile.

#![allow(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "the names and the arguments are the driver's, as its documentation has them"
)]

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;
use sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUjit_option, CUmemPool_attribute, CUmemoryPool, CUmodule,
    CUpointer_attribute, CUresult, CUstream,
};
use terrane_core::OwnerProcess;

use crate::driver::version::DriverVersion;
use crate::error::{CudaError, check};

/// The library names for the dynamic linker, in this order.
pub(crate) const LIBRARY_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The functions, once they have been found. The library is never unloaded, because its threads and
/// its memory would remain.
pub(super) static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// The process that loaded the driver. The driver works only in this process.
pub(super) static OWNER: OnceLock<OwnerProcess> = OnceLock::new();

/// Whether a parent of this process loaded the driver.
#[inline]
pub(super) fn is_of_parent() -> bool {
    OWNER.get().is_some_and(|owner| !owner.is_current())
}

/// Returns the functions, if the driver is already loaded in this process.
pub(super) fn loaded() -> Option<&'static Functions> {
    FUNCTIONS.get().filter(|_| !is_of_parent())
}

/// `CUmemPoolProps`, whose fields have different names in `cudarc` for different CUDA versions.
#[repr(C)]
pub(crate) struct PoolProperties {
    pub(crate) allocation_type: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location_type: c_uint,
    pub(crate) location_id: c_int,
    pub(crate) security_attributes: *mut c_void,
    pub(crate) rest: [u8; 64],
}

/// `CUmemcpyAttributes`, which some versions of the bindings lack.
#[repr(C)]
pub(crate) struct CopyAttributes {
    /// When the sources are read.
    pub(crate) source_access_order: c_uint,
    /// `CUmemLocation` of the source and of the destination, a type and an ordinal each: hints for
    /// managed memory.
    pub(crate) hints: [[c_int; 2]; 2],
    pub(crate) flags: c_uint,
}

const _: () = assert!(size_of::<CopyAttributes>() == 24);
const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());
const _: () = assert!(align_of::<PoolProperties>() == align_of::<sys::CUmemPoolProps>());

macro_rules! functions {
    (
        bound { $(fn $bound:ident($($name:ident: $type:ty),*);)* }
        unbound { $($unbound:tt)* }
        optional { $($optional:tt)* }
    ) => {
        $(const _: unsafe fn($($type),*) -> CUresult = sys::$bound;)*

        functions! {
            required { $(fn $bound($($name: $type),*);)* $($unbound)* }
            optional { $($optional)* }
        }
    };
    (
        required { $(fn $required:ident($($name:ident: $type:ty),*);)* }
        optional { $(fn $optional:ident($($optional_name:ident: $optional_type:ty),*);)* }
    ) => {
        /// The driver's functions. A field is the function itself, and the method of the same name
        /// checks the function's code.
        pub(crate) struct Functions {
            $(pub(crate) $required: unsafe extern "C" fn($($type),*) -> u32,)*
            $(pub(crate) $optional: Option<unsafe extern "C" fn($($optional_type),*) -> u32>,)*
            /// The library that contains the functions.
            _library: Library,
        }

        impl Functions {
            /// Finds the functions in a library.
            ///
            /// # Errors
            ///
            /// The library, and the name of the first missing symbol.
            ///
            /// # Safety
            ///
            /// Symbols with these names in the library are functions of the CUDA driver.
            pub(crate) unsafe fn find(library: Library) -> Result<Self, (Library, &'static str)> {
                $(
                    // SAFETY: the caller guarantees that the symbol is the driver's function, which
                    // has this declaration. The library is stored beside it.
                    let $required = match unsafe { library.get(stringify!($required)) } {
                        Ok(symbol) => *symbol,
                        Err(_) => return Err((library, stringify!($required))),
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $optional = unsafe { library.get(stringify!($optional)) };
                    let $optional = $optional.ok().map(|symbol| *symbol);
                )*
                Ok(Self { $($required,)* $($optional,)* _library: library })
            }
        }

        #[allow(dead_code, reason = "the callers of some functions need the code itself")]
        impl Functions {
            $(
                /// # Safety
                ///
                /// The driver's documentation states the conditions.
                #[inline]
                pub(crate) unsafe fn $required(&self, $($name: $type),*) -> Result<(), CudaError> {
                    // SAFETY: the caller guarantees the conditions.
                    check(stringify!($required), unsafe { (self.$required)($($name),*) })
                }
            )*
            $(
                /// # Safety
                ///
                /// The driver's documentation states the conditions.
                pub(crate) unsafe fn $optional(
                    &self,
                    $($optional_name: $optional_type),*
                ) -> Result<(), CudaError> {
                    let function = self.require(self.$optional, stringify!($optional))?;
                    // SAFETY: the caller guarantees the conditions.
                    check(stringify!($optional), unsafe { function($($optional_name),*) })
                }
            )*
        }
    };
}

impl Functions {
    /// A function that the driver may lack.
    pub(crate) fn require<F>(
        &self,
        function: Option<F>,
        symbol: &'static str,
    ) -> Result<F, CudaError> {
        function.ok_or_else(|| {
            let version = version(self.cuDriverGetVersion).ok();
            CudaError::DriverTooOld { symbol, version }
        })
    }
}

pub(super) type GetVersion = unsafe extern "C" fn(*mut c_int) -> u32;

/// The version that a driver reports.
pub(super) fn version(get: GetVersion) -> Result<DriverVersion, CudaError> {
    let mut number = 0;
    // SAFETY: the function writes one number, and does not need an initialised driver.
    check("cuDriverGetVersion", unsafe { get(&raw mut number) })?;
    Ok(DriverVersion::from_number(u32::try_from(number).unwrap_or(0)))
}

functions! {
    // All supported drivers and all versions of the bindings have these.
    bound {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, which: CUdevice_attribute, device: CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        fn cuDeviceGetPCIBusId(address: *mut c_char, bytes: c_int, device: CUdevice);
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        fn cuCtxGetCurrent(context: *mut CUcontext);
        fn cuCtxPushCurrent_v2(context: CUcontext);
        fn cuCtxPopCurrent_v2(context: *mut CUcontext);
        fn cuCtxGetStreamPriorityRange(lowest: *mut c_int, highest: *mut c_int);
        fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
        fn cuStreamDestroy_v2(stream: CUstream);
        fn cuStreamSynchronize(stream: CUstream);
        fn cuStreamQuery(stream: CUstream);
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
        fn cuEventCreate(event: *mut CUevent, flags: c_uint);
        fn cuEventDestroy_v2(event: CUevent);
        fn cuEventRecord(event: CUevent, stream: CUstream);
        fn cuEventQuery(event: CUevent);
        fn cuEventSynchronize(event: CUevent);
        fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        fn cuMemFree_v2(address: CUdeviceptr);
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn cuMemFreeHost(address: *mut c_void);
        fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
        fn cuMemHostUnregister(address: *mut c_void);
        fn cuMemHostGetDevicePointer_v2(
            pointer: *mut CUdeviceptr, address: *mut c_void, flags: c_uint
        );
        fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
        fn cuPointerGetAttribute(
            value: *mut c_void, which: CUpointer_attribute, address: CUdeviceptr
        );
        fn cuModuleLoadDataEx(
            module: *mut CUmodule, image: *const c_void,
            options: c_uint, names: *mut CUjit_option, values: *mut *mut c_void
        );
        fn cuModuleUnload(module: CUmodule);
        fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        fn cuFuncGetAttribute(value: *mut c_int, which: CUfunction_attribute, function: CUfunction);
        fn cuLaunchKernel(
            function: CUfunction,
            blocks_x: c_uint, blocks_y: c_uint, blocks_z: c_uint,
            threads_x: c_uint, threads_y: c_uint, threads_z: c_uint,
            shared_bytes: c_uint, stream: CUstream,
            parameters: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
    // All supported drivers have these, but some versions of the bindings lack them.
    unbound {
        fn cuEventElapsedTime(milliseconds: *mut f32, from: CUevent, to: CUevent);
    }
    // Some drivers lack these. A call that needs one then fails with the function's name.
    optional {
        fn cuGetErrorName(code: u32, name: *mut *const c_char);
        fn cuMemAllocFromPoolAsync(
            address: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream
        );
        fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
        fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const PoolProperties);
        fn cuMemPoolDestroy(pool: CUmemoryPool);
        fn cuMemPoolSetAttribute(
            pool: CUmemoryPool, which: CUmemPool_attribute, value: *mut c_void
        );
        fn cuMemPoolGetAttribute(
            pool: CUmemoryPool, which: CUmemPool_attribute, value: *mut c_void
        );
        fn cuMemPoolTrimTo(pool: CUmemoryPool, bytes: usize);
        fn cuCtxEnablePeerAccess(context: CUcontext, flags: c_uint);
        fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
        // The mode and the status are driver enums, and a newer driver may add values.
        fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
        fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint);
        // CUDA 12.8 has the index of a failed copy as a parameter; CUDA 13 does not.
        fn cuMemcpyBatchAsync(
            to: *mut CUdeviceptr, from: *mut CUdeviceptr, bytes: *mut usize, count: usize,
            attributes: *mut CopyAttributes, firsts: *mut usize, attribute_count: usize,
            failed: *mut usize, stream: CUstream
        );
        fn cuMemcpyBatchAsync_v2(
            to: *mut CUdeviceptr, from: *mut CUdeviceptr, bytes: *mut usize, count: usize,
            attributes: *mut CopyAttributes, firsts: *mut usize, attribute_count: usize,
            stream: CUstream
        );
    }
}
