//! The functions of the driver's library, found by name when it is loaded.
//!
//! This module does not call the bindings of `cudarc` directly, for two reasons. They panic if the
//! library or a symbol is missing. They also return codes as a Rust `enum`, and a newer driver can
//! return codes outside it.
//!
//! Instead, the library is opened here, and codes are plain numbers. The compiler checks each
//! declaration against the bindings: a wrong argument does not compile.

#![allow(non_snake_case, reason = "the names are the driver's, as its documentation has them")]

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

use cudarc::driver::sys;
use libloading::Library;
use sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUjit_option, CUmemPool_attribute, CUmemoryPool, CUmodule,
    CUpointer_attribute, CUresult, CUstream,
};

/// The library names for the dynamic linker, in this order.
pub(crate) const LIBRARY_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

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
        bound { $(fn $bound:ident($($bound_argument:ty),*);)* }
        unbound { $(fn $unbound:ident($($unbound_argument:ty),*);)* }
        optional { $(fn $optional:ident($($optional_argument:ty),*);)* }
    ) => {
        /// The driver's functions. The driver's documentation states the safety conditions of each.
        pub(crate) struct Functions {
            $(pub(crate) $bound: unsafe extern "C" fn($($bound_argument),*) -> u32,)*
            $(pub(crate) $unbound: unsafe extern "C" fn($($unbound_argument),*) -> u32,)*
            $(pub(crate) $optional:
                Option<unsafe extern "C" fn($($optional_argument),*) -> u32>,)*
            /// The library that contains the functions.
            _library: Library,
        }

        $(const _: unsafe fn($($bound_argument),*) -> CUresult = sys::$bound;)*

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
                    let $bound = match unsafe { library.get(stringify!($bound)) } {
                        Ok(symbol) => *symbol,
                        Err(_) => return Err((library, stringify!($bound))),
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $unbound = match unsafe { library.get(stringify!($unbound)) } {
                        Ok(symbol) => *symbol,
                        Err(_) => return Err((library, stringify!($unbound))),
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $optional = unsafe { library.get(stringify!($optional)) };
                    let $optional = $optional.ok().map(|symbol| *symbol);
                )*
                Ok(Self {
                    $($bound,)* $($unbound,)* $($optional,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    // All supported drivers and all versions of the bindings have these.
    bound {
        fn cuInit(c_uint);
        fn cuDriverGetVersion(*mut c_int);
        fn cuDeviceGetCount(*mut c_int);
        fn cuDeviceGet(*mut CUdevice, c_int);
        fn cuDeviceGetName(*mut c_char, c_int, CUdevice);
        fn cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        fn cuDeviceTotalMem_v2(*mut usize, CUdevice);
        fn cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
        fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(CUdevice);
        fn cuCtxGetCurrent(*mut CUcontext);
        fn cuCtxPushCurrent_v2(CUcontext);
        fn cuCtxPopCurrent_v2(*mut CUcontext);
        fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        fn cuStreamDestroy_v2(CUstream);
        fn cuStreamSynchronize(CUstream);
        fn cuStreamQuery(CUstream);
        fn cuStreamWaitEvent(CUstream, CUevent, c_uint);
        fn cuStreamGetCtx(CUstream, *mut CUcontext);
        fn cuEventCreate(*mut CUevent, c_uint);
        fn cuEventDestroy_v2(CUevent);
        fn cuEventRecord(CUevent, CUstream);
        fn cuEventQuery(CUevent);
        fn cuEventSynchronize(CUevent);
        fn cuMemAlloc_v2(*mut CUdeviceptr, usize);
        fn cuMemFree_v2(CUdeviceptr);
        fn cuMemGetInfo_v2(*mut usize, *mut usize);
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        fn cuMemFreeHost(*mut c_void);
        fn cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        fn cuMemHostUnregister(*mut c_void);
        fn cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
        fn cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
        fn cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        fn cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
        fn cuModuleLoadDataEx(
            *mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void
        );
        fn cuModuleUnload(CUmodule);
        fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        fn cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        fn cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void
        );
    }
    // All supported drivers have these, but some versions of the bindings lack them.
    unbound {
        fn cuEventElapsedTime(*mut f32, CUevent, CUevent);
    }
    // Some drivers lack these. A call that needs one then fails with the function's name.
    optional {
        fn cuGetErrorName(u32, *mut *const c_char);
        fn cuMemAllocFromPoolAsync(*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
        fn cuMemFreeAsync(CUdeviceptr, CUstream);
        fn cuMemPoolCreate(*mut CUmemoryPool, *const PoolProperties);
        fn cuMemPoolDestroy(CUmemoryPool);
        fn cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        fn cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        fn cuMemPoolTrimTo(CUmemoryPool, usize);
        fn cuCtxEnablePeerAccess(CUcontext, c_uint);
        fn cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
        // The mode and the status are driver enums, and a newer driver may add values.
        fn cuThreadExchangeStreamCaptureMode(*mut c_uint);
        fn cuStreamIsCapturing(CUstream, *mut c_uint);
        // CUDA 12.8 has the index of a failed copy as a parameter; CUDA 13 does not.
        fn cuMemcpyBatchAsync(
            *mut CUdeviceptr,
            *mut CUdeviceptr,
            *mut usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            *mut usize,
            CUstream
        );
        fn cuMemcpyBatchAsync_v2(
            *mut CUdeviceptr,
            *mut CUdeviceptr,
            *mut usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            CUstream
        );
    }
}
