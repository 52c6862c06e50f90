//! A large matrix product, by cuBLAS if it is installed, otherwise by a plain kernel.

use std::ffi::{CStr, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context as _, Result, bail};
use libloading::Library;
use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
use terrane_cuda::{DeviceAllocator, DeviceMemory, Stream};

use crate::bindings::{Bindings, Kernel};

/// C = A · B in integers, with one thread for each element. The loads of a warp are in one row of
/// B. Two loads per element keep the multiprocessors as busy as a floating-point product would. The
/// simulated driver has no floating-point arithmetic and can run this kernel too.
const PTX: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 size)
{
    .reg .pred %more;
    .reg .b32 %row, %column, %k, %n, %t, %threads, %x, %y, %sum;
    .reg .b64 %a, %b, %c, %offset, %stride;
    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %c, [c];
    ld.param.u32 %n, [size];
    mov.u32 %t, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %column, %tid.x;
    mad.lo.u32 %column, %t, %threads, %column;
    mov.u32 %t, %ctaid.y;
    mov.u32 %threads, %ntid.y;
    mov.u32 %row, %tid.y;
    mad.lo.u32 %row, %t, %threads, %row;
    mul.lo.u32 %t, %row, %n;
    mul.wide.u32 %offset, %t, 4;
    add.u64 %a, %a, %offset;
    mul.wide.u32 %offset, %column, 4;
    add.u64 %b, %b, %offset;
    add.u32 %t, %t, %column;
    mul.wide.u32 %offset, %t, 4;
    add.u64 %c, %c, %offset;
    mul.wide.u32 %stride, %n, 4;
    mov.u32 %sum, 0;
    mov.u32 %k, 0;
LOOP:
    ld.global.u32 %x, [%a];
    ld.global.u32 %y, [%b];
    mad.lo.u32 %sum, %x, %y, %sum;
    add.u64 %a, %a, 4;
    add.u64 %b, %b, %stride;
    add.u32 %k, %k, 1;
    setp.lt.u32 %more, %k, %n;
    @%more bra LOOP;
    st.global.u32 [%c], %sum;
    ret;
}
";

/// Square matrices and the implementation that multiplies them.
pub struct Product<'setup> {
    matrices: [DeviceMemory; 3],
    size: u32,
    by: By<'setup>,
}

enum By<'setup> {
    Cublas(Cublas),
    Kernel(Kernel<'setup>),
}

impl<'setup> Product<'setup> {
    /// Allocates matrices of `size` rows and columns, a multiple of 32, on the device of `raw`, and
    /// makes that device current on this thread. `library` is the path of cuBLAS, if the user gave
    /// one.
    pub fn new(
        bindings: &'setup Bindings,
        device: &DeviceAllocator,
        stream: &Stream,
        library: Option<&Path>,
        size: u32,
    ) -> Result<Self> {
        bindings.make_current()?;
        let by = match (Cublas::open(library), library) {
            (Ok(cublas), _) => By::Cublas(cublas),
            (Err(error), Some(_)) => return Err(error),
            (Err(_), None) => By::Kernel(bindings.kernel(PTX, c"product")?),
        };
        let elements = u64::from(size) * u64::from(size);
        let request = RegionRequest::new(ByteCount::new(elements * 4)).labelled("matrix");
        let matrix = || device.allocate(&request);
        let matrices = [matrix()?, matrix()?, matrix()?];
        for matrix in &matrices {
            // 0x3C3C is a small number in bf16.
            // SAFETY: the memory lives until the stream has completed, and no other code uses it.
            unsafe { stream.fill(matrix.location(), 0x3C, matrix.length()) }?;
        }
        stream.synchronize()?;
        Ok(Self { matrices, size, by })
    }

    /// The name of the implementation.
    pub fn name(&self) -> &'static str {
        match self.by {
            By::Cublas(_) => "cuBLAS, bf16",
            By::Kernel(_) => "a plain kernel, u32",
        }
    }

    /// Submits one product.
    pub fn submit(&self, stream: &Stream) -> Result<()> {
        let [a, b, c] = [0, 1, 2].map(|index| {
            self.matrices.get(index).map_or(0, |matrix: &DeviceMemory| matrix.address().get())
        });
        match &self.by {
            By::Cublas(cublas) => cublas.product(stream, [a, b, c], self.size),
            By::Kernel(kernel) => {
                let (mut a, mut b, mut c, mut size) = (a, b, c, self.size);
                let mut parameters = [
                    (&raw mut a).cast(),
                    (&raw mut b).cast(),
                    (&raw mut c).cast(),
                    (&raw mut size).cast::<c_void>(),
                ];
                let grid = [size.div_ceil(32), size.div_ceil(8)];
                // SAFETY: the parameters are three addresses and a number, as the kernel declares
                // them. This value owns the matrices, and their size is a multiple of the thread
                // block's.
                unsafe { kernel.launch(stream, grid, [32, 8], &mut parameters) }
            }
        }
    }
}

type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type OnHandle = unsafe extern "C" fn(*mut c_void) -> c_int;
type SetStream = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type Gemm = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// `CUDA_R_16BF` and `CUBLAS_COMPUTE_32F`.
const BF16: c_int = 14;
const COMPUTE_F32: c_int = 68;

/// cuBLAS, with a handle on the current context.
struct Cublas {
    handle: *mut c_void,
    set_stream: SetStream,
    gemm: Gemm,
    destroy: OnHandle,
    /// Keeps the library loaded, because the functions are in it.
    _library: Library,
}

impl Cublas {
    fn open(named: Option<&Path>) -> Result<Self> {
        let candidates = named.map_or_else(places, |path| vec![path.to_owned()]);
        let library = candidates.iter().find_map(|path| {
            // SAFETY: this is NVIDIA's library, whose initialisers may run in any process.
            unsafe { Library::new(path) }.ok()
        });
        let library = library.with_context(|| format!("no cuBLAS among {candidates:?}"))?;
        // SAFETY: the declaration is that of cublas_api.h, and the library is stored in the same
        // value.
        let create: Create = *unsafe { library.get("cublasCreate_v2") }?;
        // SAFETY: as above.
        let destroy: OnHandle = *unsafe { library.get("cublasDestroy_v2") }?;
        // SAFETY: as above.
        let set_stream: SetStream = *unsafe { library.get("cublasSetStream_v2") }?;
        // SAFETY: as above.
        let gemm: Gemm = *unsafe { library.get("cublasGemmEx") }?;
        let mut handle = ptr::null_mut();
        // SAFETY: one handle is written.
        check("cublasCreate", unsafe { create(&raw mut handle) })?;
        Ok(Self { handle, set_stream, gemm, destroy, _library: library })
    }

    fn product(&self, stream: &Stream, [a, b, c]: [u64; 3], size: u32) -> Result<()> {
        // SAFETY: handle and stream are alive.
        check("cublasSetStream", unsafe { (self.set_stream)(self.handle, stream.handle()) })?;
        let n = c_int::try_from(size)?;
        let (one, zero) = (1_f32, 0_f32);
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        let matrix = |address: u64| -> *mut c_void {
            ptr::with_exposed_provenance_mut(ByteCount::new(address).to_usize())
        };
        // SAFETY: the three matrices have at least n by n elements of two bytes. The caller keeps
        // their memory until the stream has been waited for. cuBLAS reads the factors before it
        // returns.
        let status = unsafe {
            (self.gemm)(
                self.handle,
                0,
                0,
                n,
                n,
                n,
                one,
                matrix(a),
                BF16,
                n,
                matrix(b),
                BF16,
                n,
                zero,
                matrix(c),
                BF16,
                n,
                COMPUTE_F32,
                -1,
            )
        };
        check("cublasGemmEx", status)
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: `open` created the handle once, and its work has completed.
        unsafe { (self.destroy)(self.handle) };
    }
}

fn check(name: &str, status: c_int) -> Result<()> {
    if status != 0 {
        bail!("{name}: status {status}");
    }
    Ok(())
}

/// The possible paths of cuBLAS: the linker's search path, the directories of the toolkit, and
/// Python's packages.
fn places() -> Vec<PathBuf> {
    const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];
    let mut folders = vec![PathBuf::new(), PathBuf::from("/usr/local/cuda/lib64")];
    let inside = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let mut prefixes = ["/usr/local", "/usr"].map(PathBuf::from).to_vec();
    prefixes.extend(inside(Path::new("/opt")));
    for prefix in prefixes {
        let pythons = inside(&prefix.join("lib")).into_iter();
        for python in pythons.filter(|path| path.to_string_lossy().contains("/python3")) {
            for packages in ["site-packages", "dist-packages"] {
                for part in ["nvidia/cu13/lib", "nvidia/cublas/lib"] {
                    folders.push(python.join(packages).join(part));
                }
            }
        }
    }
    folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name))).collect()
}
