//! Kernels that copy scattered blocks, and that compute their checksums: loaded once for a context,
//! launched without a look-up.

pub(crate) mod arguments;
mod module;
pub(crate) mod schedule;
pub(crate) mod sum_arguments;
mod sums;
pub(crate) mod transpose;
pub(crate) mod width;

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute};

use crate::error::CudaError;
use crate::kernels::module::Module;
use crate::kernels::schedule::{BLOCK_THREADS, GridSchedule};
use crate::kernels::sums::SumKernels;
use crate::kernels::transpose::TransposeSchedule;
use crate::runtime::context::Context;
use crate::runtime::stream::Stream;

pub(crate) use sums::BLOCK_WARPS;

pub use arguments::{BlockIds, GridLaunch, INLINE_BLOCKS, LaunchEnd};
pub use width::CopyWidth;

/// The result of `cargo xtask kernels build` for copy.cu.
const PTX: &str = concat!(include_str!("copy.ptx"), "\0");

/// The entry points, in the order of [`CopyWidth::ALL`].
const GRID_COPIES: [&CStr; 5] = [
    c"terrane_grid_copy_1",
    c"terrane_grid_copy_2",
    c"terrane_grid_copy_4",
    c"terrane_grid_copy_8",
    c"terrane_grid_copy_16",
];

/// The entry points, in the order of [`CopyWidth::ALL`].
const TRANSPOSED_COPIES: [&CStr; 5] = [
    c"terrane_transposed_copy_1",
    c"terrane_transposed_copy_2",
    c"terrane_transposed_copy_4",
    c"terrane_transposed_copy_8",
    c"terrane_transposed_copy_16",
];

/// The kernels, loaded into one context. Cloning costs a reference count. The last clone
/// unloads them.
///
/// Loading compiles them for the device. The driver caches the result on disk across processes; the
/// first time takes a good fraction of a second. A launch is one driver call: it allocates nothing,
/// looks up nothing and waits for nothing.
#[derive(Clone)]
pub struct Kernels(Arc<Loaded>);

struct Loaded {
    module: Module,
    grid_copies: [CUfunction; 5],
    transposed_copies: [CUfunction; 5],
    /// The checksum kernels, or the reason why the driver does not compile them. Empty after any
    /// other error, such as a lack of memory.
    sums: OnceLock<Result<SumKernels, CudaError>>,
}

// SAFETY: only the driver interprets the handles, and it accepts them on any thread.
unsafe impl Send for Loaded {}
// SAFETY: as for `Send`; only the lock is mutable.
unsafe impl Sync for Loaded {}

/// The driver's figures for one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelFigures {
    /// The entry point.
    pub name: &'static str,
    /// The registers per thread.
    pub registers: u32,
    /// The bytes per thread that did not fit into registers.
    pub local_bytes: u32,
    /// The maximum threads per block.
    pub most_threads: u32,
}

impl Kernels {
    /// Loads the kernels.
    ///
    /// # Errors
    ///
    /// [`CudaError::KernelsRefused`] if the driver cannot compile them for the device,
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let module = Module::load(context, PTX)?;
        let grid_copies = module.find(GRID_COPIES)?;
        let transposed_copies = module.find(TRANSPOSED_COPIES)?;
        let sums = OnceLock::new();
        let loaded = Loaded { module, grid_copies, transposed_copies, sums };
        let kernels = Self(Arc::new(loaded));
        // With lazy loading, a query of its figures loads a kernel onto the device. Without this
        // query, the first launch would load it and wait for the device.
        kernels.figures_of_copies()?;
        // The checksum kernels are loaded now for the same reason. Copies do not need them.
        if let Err(error) = kernels.prepare_sums() {
            tracing::debug!(%error, "no kernels for checksums");
        }
        Ok(kernels)
    }

    /// The context that the kernels are loaded into.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.module.context
    }

    /// Submits the copy of every cell of a grid, with at most `thread_blocks` blocks of 512
    /// threads. Two blocks share a multiprocessor. Less work uses fewer blocks. The result does not
    /// depend on their number.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoThreadBlocks`], [`CudaError::WrongContext`] for a stream of another context,
    /// [`CudaError::InlineBlocks`], [`CudaError::TooManyCells`]: nothing is submitted then.
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    ///
    /// # Safety
    ///
    /// Until the copy has completed, these kernels are loaded. Until then, all cells at
    /// both ends, all tables and all lists are memory that the stream's device can access at the
    /// given address. Nothing writes the bytes that are read, and nothing else reads or writes the
    /// destination. No destination cell overlaps another or a source cell. [`LaunchEnd::bases_bits`]
    /// matches its description.
    pub unsafe fn copy(
        &self,
        stream: &Stream,
        grid: &GridLaunch,
        thread_blocks: u32,
    ) -> Result<(), CudaError> {
        let width = grid.width();
        let schedule = GridSchedule::of(grid, width)?;
        self.check_launch(stream, thread_blocks)?;
        let Some(schedule) = schedule else { return Ok(()) };
        let transposed = TransposeSchedule::of(grid, width);
        let (functions, blocks, schedule): (_, _, *mut c_void) = match &transposed {
            Some(transposed) => (
                &self.0.transposed_copies,
                transposed.blocks(thread_blocks),
                ptr::from_ref(transposed).cast_mut().cast(),
            ),
            None => (
                &self.0.grid_copies,
                schedule.blocks(thread_blocks),
                ptr::from_ref(&schedule).cast_mut().cast(),
            ),
        };
        let mut parameters = [ptr::from_ref(grid).cast_mut().cast(), schedule];
        // SAFETY: the function takes a `GridLaunch` and this schedule. The caller guarantees that the
        // copy they describe is allowed. The width divides it, and each cell of a transposition is
        // one word.
        unsafe { self.launch(stream, pick(functions, width), blocks, &mut parameters) }
    }

    /// The driver's figures for each kernel. Loads the checksum kernels, if they are not loaded.
    ///
    /// # Errors
    ///
    /// [`CudaError::KernelsRefused`], [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn figures(&self) -> Result<Vec<KernelFigures>, CudaError> {
        let mut figures = self.figures_of_copies()?;
        figures.extend(self.figures_of_all(sums::BLOCK_SUMS, &self.sums()?.functions)?);
        Ok(figures)
    }

    fn figures_of_copies(&self) -> Result<Vec<KernelFigures>, CudaError> {
        let Loaded { grid_copies, transposed_copies, .. } = &*self.0;
        let mut figures = self.figures_of_all(GRID_COPIES, grid_copies)?;
        figures.extend(self.figures_of_all(TRANSPOSED_COPIES, transposed_copies)?);
        Ok(figures)
    }

    fn figures_of_all(
        &self,
        names: [&'static CStr; 5],
        functions: &[CUfunction; 5],
    ) -> Result<Vec<KernelFigures>, CudaError> {
        use CUfunction_attribute::*;
        let figures_of = |(name, &function): (&'static CStr, &CUfunction)| {
            let ask = |attribute| {
                let mut value: c_int = 0;
                self.context().bound(|functions| {
                    // SAFETY: the function belongs to a loaded module, and one number is written.
                    unsafe { functions.cuFuncGetAttribute(&raw mut value, attribute, function) }
                })?;
                Ok::<u32, CudaError>(u32::try_from(value).unwrap_or(0))
            };
            Ok(KernelFigures {
                name: name.to_str().unwrap_or_default(),
                registers: ask(CU_FUNC_ATTRIBUTE_NUM_REGS)?,
                local_bytes: ask(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
                most_threads: ask(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            })
        };
        names.into_iter().zip(functions).map(figures_of).collect()
    }

    fn check_launch(&self, stream: &Stream, thread_blocks: u32) -> Result<(), CudaError> {
        self.context().check_stream(stream)?;
        if thread_blocks == 0 {
            return Err(CudaError::NoThreadBlocks);
        }
        Ok(())
    }

    /// # Safety
    ///
    /// The function takes these parameters, and its effects are allowed.
    unsafe fn launch(
        &self,
        stream: &Stream,
        function: CUfunction,
        blocks: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let parameters = parameters.as_mut_ptr();
        self.context().bound(|functions| {
            // SAFETY: function and stream belong to this context. The driver copies the parameters
            // before it returns. The caller guarantees the rest.
            unsafe {
                functions.cuLaunchKernel(
                    function,
                    blocks,
                    1,
                    1,
                    BLOCK_THREADS,
                    1,
                    1,
                    0,
                    stream.raw(),
                    parameters,
                    ptr::null_mut(),
                )
            }
        })
    }
}

fn pick(functions: &[CUfunction; 5], width: CopyWidth) -> CUfunction {
    let [one, two, four, eight, sixteen] = *functions;
    match width {
        CopyWidth::One => one,
        CopyWidth::Two => two,
        CopyWidth::Four => four,
        CopyWidth::Eight => eight,
        CopyWidth::Sixteen => sixteen,
    }
}

terrane_core::debug_fields!(Kernels, |it| { device: it.context().device().id });

#[cfg(test)]
mod tests {
    use super::*;

    /// The body of an entry point in the PTX.
    fn body(name: &CStr) -> &'static str {
        let head = format!(".visible .entry {}(", name.to_str().unwrap());
        let (_, rest) = PTX.split_once(&head).expect("an entry point");
        rest.split_once("\n}").expect("an end").0
    }

    #[test]
    fn every_entry_point_moves_words_of_its_width() {
        let words = ["u8", "u16", "u32", "v2.u32", "v4.u32"];
        for (name, word) in GRID_COPIES.into_iter().zip(words) {
            let body = body(name);
            for access in ["ld.global.cg", "st.global.cs"] {
                let wide = format!("{access}.{word}");
                assert!(body.contains(&wide), "{name:?} has no {wide}");
            }
            let others = words.iter().filter(|&&other| other != word);
            for other in others {
                let store = format!("st.global.cs.{other} ");
                assert!(!body.contains(&store), "{name:?} has {store}");
            }
            // A kernel stores only the copied words, and spills no register.
            assert!(!body.contains(".local"), "{name:?}");
            assert_eq!(body.matches("st.").count(), body.matches("st.global.cs.").count());
            for parameter in ["_param_0[1216]", "_param_1[104]"] {
                assert!(body.contains(parameter), "{name:?} does not take {parameter}");
            }
        }
    }

    #[test]
    fn the_kernels_target_the_oldest_supported_device() {
        assert!(PTX.contains("\n.target sm_80\n"));
        assert!(PTX.ends_with('\0') && !PTX.trim_end_matches('\0').contains('\0'));
    }
}
