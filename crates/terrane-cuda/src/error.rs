//! The error type of this crate.

use std::sync::Arc;

use terrane_core::{
    Alignment, AllocateError, ByteCount, CapabilityMissing, DeviceId, Label, OsError, SizeOverflow,
    StorageKind,
};
use terrane_pool::managed::ManagedError;
use terrane_storage::StorageError;
use terrane_transfer::LayerError;

use crate::driver::code::DriverCode;
use crate::driver::version::DriverVersion;

/// The reason why a CUDA operation failed.
///
/// All variants can be displayed without the driver. None has a type of the bindings.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// This machine has no driver library, or it cannot be loaded.
    #[error(
        "the CUDA driver library {library} cannot be loaded; install NVIDIA's driver, or run \
         without a device"
    )]
    LibraryMissing {
        /// The names that were searched for.
        library: String,
        /// The message of the dynamic linker.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The driver lacks a function.
    #[error(
        "the CUDA driver{} has no `{symbol}`; install a newer driver",
        .version.map(|version| format!(" (CUDA {version})")).unwrap_or_default()
    )]
    DriverTooOld {
        /// The missing function.
        symbol: &'static str,
        /// The CUDA version that the driver supports, if it reports one.
        version: Option<DriverVersion>,
    },
    /// The driver works, but reports no device.
    #[error(
        "the CUDA driver reports no device; check the hardware, the permissions of the process, \
         and CUDA_VISIBLE_DEVICES"
    )]
    NoDevice,
    /// No device has this ordinal.
    #[error(
        "there is no CUDA device {device}; the driver reports {count} devices, numbered from 0"
    )]
    UnknownDevice {
        /// The ordinal.
        device: DeviceId,
        /// The number of devices.
        count: u32,
    },
    /// A parent of this process loaded the driver, and this process was forked afterwards.
    #[error(
        "the CUDA driver was loaded before the fork, and does not work in the child; fork before \
         CUDA is first used, or start the child with `exec`"
    )]
    Forked,
    /// The device, or the process's context on it, is lost.
    #[error("the CUDA context is lost ({operation}: {code}); restart the process")]
    ContextLost {
        /// The call that reported the loss. Another call may have caused it.
        operation: &'static str,
        /// The driver's code.
        code: DriverCode,
    },
    /// A driver call failed.
    #[error("the driver call {operation} failed: {code}")]
    Driver {
        /// The call.
        operation: &'static str,
        /// The driver's code.
        code: DriverCode,
    },
    /// Two objects that must share a context belong to different contexts.
    #[error(
        "the {what} belongs to another CUDA context; pass a {what} of the primary context of device \
         {device}"
    )]
    WrongContext {
        /// The object that belongs to another context.
        what: &'static str,
        /// The device whose context was expected.
        device: DeviceId,
    },
    /// The per-thread default stream was passed where the work of several threads must be ordered.
    ///
    /// Its handle, 2, names a different stream on each thread. Records, waits and frees of one
    /// thread on it do not order the work of another.
    #[error(
        "the per-thread default stream (handle 2) is a different stream on each thread; pass another \
         stream, or an event that this thread records with `record_on_thread_stream`"
    )]
    PerThreadStream,
    /// A number that names no stream of this source, or a stream that has been destroyed.
    #[error(
        "no stream has the number {number}; it was destroyed, or belongs to other `CudaStreams`"
    )]
    UnknownStream {
        /// The number.
        number: u64,
    },
    /// A transfer was to run after a stream, or an event, that is being captured into a graph.
    ///
    /// The capture of a stream continues. The capture of an event does not: the driver ends it on
    /// any query of the capture's events.
    #[error(
        "the transfer's order is a {what} that is being captured into a graph, and transfers cannot \
         be captured; submit it before the capture, or afterwards with the order of the stream on \
         which the graph is launched"
    )]
    Captured {
        /// `"stream"` or `"event"`.
        what: &'static str,
    },
    /// The event was never recorded, or its last record failed. Its completion proves nothing.
    #[error("the event is not recorded; record it on a stream first, and check the result")]
    NotRecorded,
    /// A time was requested of an event without timing.
    #[error("the event has no time; create both events with `Timing::On`, and record them")]
    NoTiming,
    /// A span that is not completely in the device's memory.
    #[error(
        "{length} at {address:#x} are not within one allocation of memory of device {device}; pass the \
         address and the length of a live allocation on it"
    )]
    NotDeviceMemory {
        /// The address.
        address: u64,
        /// The length of the span.
        length: ByteCount,
        /// The device.
        device: DeviceId,
    },
    /// A location that this operation cannot access.
    #[error("a stream copies between host and device addresses; {location} is neither")]
    Unreachable {
        /// The location, as displayed.
        location: terrane_core::Location,
    },
    /// A request exceeds the maximum size.
    #[error("{requested} exceed the largest region, {largest}; request several regions")]
    TooLarge {
        /// The requested bytes.
        requested: ByteCount,
        /// The maximum.
        largest: ByteCount,
    },
    /// The alignment is not supported.
    #[error("alignment {requested} is not supported; the maximum is {largest}")]
    TooStrictlyAligned {
        /// The requested alignment.
        requested: Alignment,
        /// The maximum alignment.
        largest: Alignment,
    },
    /// A unit that is larger than one registration.
    #[error(
        "a registration of at most {largest} cannot hold whole pages and whole units of {unit}; \
         choose a smaller unit, or a multiple of the page size"
    )]
    UnitTooLarge {
        /// The unit that must not be split.
        unit: ByteCount,
        /// The maximum number of bytes in one registration.
        largest: ByteCount,
    },
    /// The driver cannot compile the kernels for the device.
    #[error(
        "the driver refused the kernels: {code}; they need compute capability 8.0 and a driver \
         of CUDA 12.0, or newer{}",
        if .log.is_empty() { String::new() } else { format!(" (driver log: {log})") }
    )]
    KernelsRefused {
        /// The driver's code.
        code: DriverCode,
        /// The message of the driver's compiler.
        log: String,
    },
    /// Too little memory is left for the tables of a transfer's checksums.
    #[error(
        "no memory for the checksums of {blocks} blocks: they need {bytes} of pinned memory, and as \
         much of the device's; copy fewer blocks in a transfer, or free memory"
    )]
    NoMemoryForChecksums {
        /// The blocks of the transfer.
        blocks: u32,
        /// The bytes of the tables, at each end.
        bytes: ByteCount,
        /// The driver's error.
        source: Box<CudaError>,
    },
    /// A launch without thread blocks.
    #[error("a kernel needs at least one thread block; 0 were requested")]
    NoThreadBlocks,
    /// More cells than one launch supports.
    #[error(
        "{} cells of {bytes} bytes exceed one launch; the maximum is {most} cells, and {most} tiles of \
         128 words; use several launches with fewer pairs each",
        .counts.map(|count| count.to_string()).join(" * ")
    )]
    TooManyCells {
        /// Pairs, layers, outers, rows and columns.
        counts: [u32; 5],
        /// The length of a cell.
        bytes: u64,
        /// The maximum.
        most: u32,
    },
    /// Block ids that the copy does not carry.
    #[error(
        "{pairs} block ids from index {first} exceed the {most} that a launch carries; put them into \
         device memory (`BlockIds::Listed`)"
    )]
    InlineBlocks {
        /// The first requested id.
        first: u32,
        /// The number of requested ids.
        pairs: u32,
        /// The number of ids that the copy carries.
        most: usize,
    },
    /// A capability that a policy requires was not granted.
    #[error(transparent)]
    Capability(#[from] CapabilityMissing),
    /// A size exceeds the range of 64 bits.
    #[error(transparent)]
    Overflow(#[from] SizeOverflow),
    /// An engine thread could not be started.
    #[error("a thread of the copy engine could not be started; see the cause")]
    Thread {
        /// The reason.
        #[source]
        source: OsError,
    },
    /// A device's copies or kernels cannot access this memory, although the quote assumed it.
    #[error(
        "device {device} cannot access the memory at one end of the transfer; keep host memory \
         pinned, and peer access enabled, until the transfer has ended"
    )]
    NotReached {
        /// The device.
        device: DeviceId,
    },
    /// A path could not be measured.
    #[error("the path `{path}` could not be measured; see the cause")]
    Calibration {
        /// The path.
        path: &'static str,
        /// The reason.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A layer of a transfer failed and will not arrive.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// Managed memory could not be used.
    #[error("a stream cannot use the managed memory; see the cause")]
    Managed {
        /// The reason.
        #[source]
        source: Arc<ManagedError>,
    },
    /// Memory without a manager that keeps it until a stream has run.
    #[error(
        "no manager keeps the memory at {location} until the stream's work completes; allocate it from a \
         `MemoryManager`, or use `read_unmanaged` or `write_unmanaged`"
    )]
    Unmanaged {
        /// The location of the bytes.
        location: terrane_core::Location,
    },
    /// A part that a region does not contain.
    #[error("a kernel argument exceeds its region; see the cause")]
    View(#[from] terrane_core::ViewOutOfBounds),
    /// Host memory could not be allocated.
    #[error("the host memory to be pinned could not be allocated; see the cause")]
    HostMemory {
        /// The reason.
        #[source]
        source: Arc<StorageError>,
    },
}

impl CudaError {
    /// Whether CUDA is unusable on this machine, so that the caller should work without it.
    #[must_use]
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::LibraryMissing { .. } | Self::DriverTooOld { .. } | Self::NoDevice)
    }

    /// Whether the context is lost.
    #[must_use]
    pub const fn is_context_lost(&self) -> bool {
        matches!(self, Self::ContextLost { .. })
    }

    /// The driver's code, if a driver call failed.
    #[must_use]
    pub const fn code(&self) -> Option<DriverCode> {
        match self {
            Self::NoDevice => Some(DriverCode::NO_DEVICE),
            Self::ContextLost { code, .. }
            | Self::Driver { code, .. }
            | Self::KernelsRefused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// The error in the form that all allocators report: of `kind`, for `requested` bytes for
    /// `label`. `available` is the remaining memory, if it is known.
    #[must_use]
    pub fn into_allocate_error(
        self,
        kind: StorageKind,
        requested: ByteCount,
        available: Option<ByteCount>,
        label: Label,
    ) -> AllocateError {
        match self {
            Self::Capability(source) => AllocateError::Capability { kind, label, source },
            Self::TooLarge { requested, largest } => {
                AllocateError::TooLarge { kind, requested, largest, label }
            }
            Self::TooStrictlyAligned { requested, largest } => {
                AllocateError::TooStrictlyAligned { kind, requested, largest, label }
            }
            Self::HostMemory { source } => match Arc::try_unwrap(source) {
                Ok(source) => source.into_allocate_error(kind, requested, label),
                Err(source) => AllocateError::Backend {
                    kind,
                    requested,
                    label,
                    source: Box::new(Self::HostMemory { source }),
                },
            },
            error if error.code() == Some(DriverCode::OUT_OF_MEMORY) => {
                AllocateError::OutOfMemory {
                    kind,
                    requested,
                    available,
                    label,
                    source: Some(Box::new(error)),
                }
            }
            error => AllocateError::Backend { kind, requested, label, source: Box::new(error) },
        }
    }
}

/// The result of a driver call, from its code.
///
/// # Errors
///
/// The error of the code, unless it is zero.
#[inline]
pub(crate) fn check(operation: &'static str, code: u32) -> Result<(), CudaError> {
    match DriverCode::new(code) {
        DriverCode::SUCCESS => Ok(()),
        code => Err(error_of(operation, code)),
    }
}

#[cold]
fn error_of(operation: &'static str, code: DriverCode) -> CudaError {
    if code == DriverCode::NO_DEVICE {
        CudaError::NoDevice
    } else if code.loses_context() {
        CudaError::ContextLost { operation, code }
    } else {
        CudaError::Driver { operation, code }
    }
}

/// The result of a query whether work has ended.
///
/// # Errors
///
/// The error of the code, unless the code means yes or no.
pub(crate) fn check_ready(operation: &'static str, code: u32) -> Result<bool, CudaError> {
    if DriverCode::new(code) == DriverCode::NOT_READY {
        return Ok(false);
    }
    check(operation, code).map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_becomes_its_error() {
        assert!(check("cuInit", 0).is_ok());
        assert!(matches!(check("cuInit", 100), Err(CudaError::NoDevice)));
        assert!(check("cuStreamQuery", 700).unwrap_err().is_context_lost());
        let error = check("cuMemAlloc_v2", 2).unwrap_err();
        assert_eq!(error.code(), Some(DriverCode::OUT_OF_MEMORY));
        assert!(error.to_string().contains("cuMemAlloc_v2"), "{error}");
        // A code of a newer driver.
        let error = check("cuInit", 4_000_000_000).unwrap_err();
        assert!(error.to_string().contains("4000000000"), "{error}");
        assert!(format!("{error:?}").contains("4000000000"));
    }

    #[test]
    fn not_ready_is_no_error() {
        assert_eq!(check_ready("cuEventQuery", 0).ok(), Some(true));
        assert_eq!(check_ready("cuEventQuery", 600).ok(), Some(false));
        assert!(check_ready("cuEventQuery", 719).is_err());
    }

    #[test]
    fn only_a_lack_of_memory_is_reported_as_exhaustion() {
        let kind = StorageKind::Device(DeviceId::new(0));
        for (code, exhausted) in [(2, true), (1, false), (719, false)] {
            let error = check("cuMemAlloc_v2", code).unwrap_err();
            let error = error.into_allocate_error(kind, ByteCount::mib(1), None, "x".into());
            assert_eq!(error.is_exhaustion(), exhausted, "{code}");
        }
    }
}
