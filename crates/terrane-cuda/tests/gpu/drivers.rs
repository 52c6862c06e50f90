//! Drivers without a device, without some functions, and lost ones: the error of each entry point.
//! The test's process loads a simulated driver from which functions were removed.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use terrane_core::{ByteCount, DeviceId};
use terrane_cuda::{
    CalibrationOptions, Context, CopyPath, CudaError, DeviceEngine, DeviceEngineOptions,
    DevicePool, Direction, Driver, DriverCode, probe,
};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::copy_engine::{check_transfer, ordered};
use terrane_testkit::conformance::{EngineFixture, check_copy_engine};
use terrane_testkit::process::{in_child_with, is_child};
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{CopyEngine, Declined, Transfer, TransferError, TransferManager};

use crate::engine::fixture::{
    APART, DEVICE, Fixture, LAYERS_APART, PEER, PINNED, config, endpoint, pinned,
};
use crate::needs::{LITTLE, device, two_devices};

/// Returns the path of the process's simulated driver. With a real driver it prints the skip, and
/// returns `None`.
fn simulated_library(test: &str) -> Option<PathBuf> {
    device(test, LITTLE)?;
    if SimulatedCuda::find().is_none() {
        eprintln!("skipped: {test}: a simulated device needed, this one is real");
        return None;
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().find_map(|line| {
        let path = line.get(line.find('/')?..)?;
        path.ends_with("/libcuda.so.1").then(|| PathBuf::from(path))
    });
    Some(path.expect("the driver is loaded from a file"))
}

/// Runs `body` in a process whose driver lacks these functions.
fn without(test: &str, functions: &[&str], body: impl FnOnce()) {
    if is_child(test) {
        return body();
    }
    let Some(library) = simulated_library(test) else { return };
    let mut bytes = fs::read(library).unwrap();
    functions.iter().for_each(|function| hide(&mut bytes, function));
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("libcuda.so.1"), bytes).unwrap();
    let folder = folder.path().to_str().unwrap();
    in_child_with(test, &[("LD_LIBRARY_PATH", folder)], body);
}

/// Makes a symbol of a library local, so that no other code finds it by its name.
fn hide(library: &mut [u8], symbol: &str) {
    /// `SHT_DYNSYM`, the type of the section with the symbols.
    const SYMBOLS: usize = 11;
    /// The offset of a symbol's type, in the four bits below its binding.
    const TYPE: usize = 4;
    const SYMBOL_BYTES: usize = 24;
    let number = |at: usize, bytes: usize| {
        let digits = library[at..at + bytes].iter().rev();
        digits.fold(0, |number, &digit| number << 8 | usize::from(digit))
    };
    // From the ELF header: the offset of the section headers, their length, and their number.
    let (headers, length, count) = (number(0x28, 8), number(0x3A, 2), number(0x3C, 2));
    let header = |index: usize| headers + index * length;
    let symbols = (0..count).map(header).find(|&at| number(at + 4, 4) == SYMBOLS).unwrap();
    let names = number(header(number(symbols + 0x28, 4)) + 0x18, 8);
    let (first, bytes) = (number(symbols + 0x18, 8), number(symbols + 0x20, 8));
    let name = format!("{symbol}\0");
    let found = (first..first + bytes)
        .step_by(SYMBOL_BYTES)
        .find(|&at| library[names + number(at, 4)..].starts_with(name.as_bytes()));
    let found = found.unwrap_or_else(|| panic!("the driver has no {symbol}"));
    // The binding 0 is `STB_LOCAL`.
    library[found + TYPE] &= 0xF;
}

#[test]
fn a_driver_without_devices_is_an_error() {
    let name = "drivers::a_driver_without_devices_is_an_error";
    if !is_child(name) && simulated_library(name).is_none() {
        return;
    }
    in_child_with(name, &[("TERRANE_SIMULATED_CUDA", "devices=0")], || {
        for error in [
            probe().unwrap_err(),
            Context::primary(DeviceId::new(0)).unwrap_err(),
            Context::primary(DeviceId::new(7)).unwrap_err(),
        ] {
            assert!(matches!(error, CudaError::NoDevice), "{error:?}");
            assert!(error.is_unavailable() && !error.is_context_lost());
            assert_eq!(error.code(), Some(DriverCode::NO_DEVICE));
            assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES"), "{error}");
        }
    });
}

/// Every entry point names the missing function, and the version of the driver if it reports one.
fn is_too_old(function: &str, has_version: bool) {
    for error in [
        probe().unwrap_err(),
        Driver::load().unwrap_err(),
        Context::primary(DeviceId::new(0)).unwrap_err(),
    ] {
        let CudaError::DriverTooOld { symbol, version } = &error else { panic!("{error:?}") };
        assert_eq!((*symbol, version.is_some()), (function, has_version));
        assert!(error.is_unavailable(), "{error}");
        assert!(error.to_string().contains(function), "{error}");
        assert!(error.to_string().contains("newer driver"), "{error}");
        assert!(format!("{error:?}").contains(function));
    }
}

#[test]
fn a_driver_without_its_first_function_is_too_old() {
    let name = "drivers::a_driver_without_its_first_function_is_too_old";
    without(name, &["cuInit"], || is_too_old("cuInit", true));
}

#[test]
fn a_driver_without_a_version_is_too_old() {
    let name = "drivers::a_driver_without_a_version_is_too_old";
    without(name, &["cuDriverGetVersion"], || is_too_old("cuDriverGetVersion", false));
}

#[test]
fn a_driver_that_registers_no_memory_is_too_old() {
    let name = "drivers::a_driver_that_registers_no_memory_is_too_old";
    without(name, &["cuMemHostRegister_v2"], || is_too_old("cuMemHostRegister_v2", true));
}

#[test]
fn a_driver_that_measures_no_time_is_too_old() {
    let name = "drivers::a_driver_that_measures_no_time_is_too_old";
    let functions = ["cuEventElapsedTime", "cuEventElapsedTime_v2"];
    without(name, &functions, || is_too_old("cuEventElapsedTime", true));
}

#[test]
fn a_probe_reports_a_lost_device_and_other_refusals() {
    let name = "drivers::a_probe_reports_a_lost_device_and_other_refusals";
    if !is_child(name) && simulated_library(name).is_none() {
        return;
    }
    in_child_with(name, &[], || {
        probe().unwrap();
        let driver = SimulatedCuda::find().unwrap();
        driver.fail("cuDeviceGetName", 0, 719);
        let error = probe().unwrap_err();
        assert!(error.is_context_lost() && !error.is_unavailable(), "{error}");
        assert_eq!(error.code(), Some(DriverCode::new(719)));
        assert!(error.to_string().contains("cuDeviceGetName"), "{error}");
        // A driver that is installed and does not work, for example while the system boots.
        driver.fail("cuInit", 0, 802);
        let error = probe().unwrap_err();
        assert!(matches!(error, CudaError::Driver { operation: "cuInit", .. }), "{error:?}");
        assert!(error.to_string().contains("CUDA_ERROR_SYSTEM_NOT_READY"), "{error}");
        probe().expect("a failure is not cached");
    });
}

#[test]
fn a_driver_without_pools_refuses_a_pool_and_serves_the_rest() {
    let name = "drivers::a_driver_without_pools_refuses_a_pool_and_serves_the_rest";
    let functions = ["cuMemPoolCreate", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"];
    without(name, &functions, || {
        let Some(context) = device(name, LITTLE) else { return };
        let error = DevicePool::new(&context, ByteCount::ZERO).unwrap_err();
        let CudaError::DriverTooOld { symbol, version } = &error else { panic!("{error:?}") };
        assert_eq!(*symbol, "cuMemPoolCreate");
        assert!(version.is_some() && error.to_string().contains("cuMemPoolCreate"), "{error}");
        let shape = config(4, 2, 16);
        let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PINNED]);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let (access, blocks) = (fixture.access(), [3, 1]);
        check_transfer(&fixture.manager(), access, (&here, &blocks), (&there, &blocks), 0..2);
    });
}

/// A manager with an engine that copies by one path only.
fn forced(context: &Context, path: CopyPath) -> TransferManager {
    let options = DeviceEngineOptions { path: Some(path), ..DeviceEngineOptions::default() };
    let engine = DeviceEngine::new(context, options).unwrap();
    TransferManager::new([Arc::new(engine) as Arc<dyn CopyEngine>])
}

#[test]
fn without_batched_copies_no_transfer_is_batched() {
    let name = "drivers::without_batched_copies_no_transfer_is_batched";
    without(name, &["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"], || {
        let Some(context) = device(name, LITTLE) else { return };
        let shape = config(16, 2, 16);
        let here = endpoint(&terrane_cuda::DeviceAllocator::new(&context), shape, LAYERS_APART);
        let there = pinned(&context, shape, LayoutKind::FullyContiguous);
        let transfer = ordered(Transfer::new(&here, &there), &here, &there).blocks(&[1], &[2]);
        let error = forced(&context, CopyPath::Batched).explain(&transfer).unwrap_err();
        let TransferError::NoEngine { declined, .. } = &error else { panic!("{error}") };
        assert!(declined.iter().all(|(_, why)| *why == Declined::Kinds), "{declined:?}");

        let mut options = CalibrationOptions::default();
        (options.bytes, options.repetitions) = (ByteCount::mib(1), 1);
        let calibration = options.measure(&context).unwrap();
        assert!(calibration.cost(Direction::ToHost, CopyPath::Staged).is_some());

        let options = DeviceEngineOptions::default();
        check_copy_engine(&Fixture::new(&context, options, &[APART, PINNED]));
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}

#[test]
fn the_older_function_for_batched_copies_conforms() {
    let name = "drivers::the_older_function_for_batched_copies_conforms";
    without(name, &["cuMemcpyBatchAsync_v2"], || {
        let Some(context) = device(name, LITTLE) else { return };
        let ends = [APART, PINNED];
        check_copy_engine(&Fixture::in_small_parts(&context, CopyPath::Batched, &ends));
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}

#[test]
fn without_peer_access_blocks_are_copied_between_devices_by_the_driver() {
    let name = "drivers::without_peer_access_blocks_are_copied_between_devices_by_the_driver";
    without(name, &["cuCtxEnablePeerAccess"], || {
        let Some([context, peer]) = two_devices(name, LITTLE) else { return };
        let shape = config(4, 2, 16);
        let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PEER]);
        let fixture = fixture.beside(peer);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PEER, shape, LayoutKind::FullyContiguous);
        let transfer = ordered(Transfer::new(&here, &there), &here, &there).blocks(&[1], &[2]);
        forced(&context, CopyPath::Peer).explain(&transfer).unwrap_err();
        let (access, blocks) = (fixture.access(), [3, 1]);
        check_transfer(&fixture.manager(), access, (&here, &blocks), (&there, &blocks), 0..2);
    });
}

#[test]
fn codes_without_names_are_shown_as_numbers() {
    let name = "drivers::codes_without_names_are_shown_as_numbers";
    without(name, &["cuGetErrorName"], || {
        let Some(context) = device(name, LITTLE) else { return };
        let code = DriverCode::new(700);
        assert_eq!((code.name(), code.to_string()), (None, String::from("CUDA driver code 700")));
        assert!(!format!("{context:?}").is_empty());
    });
}
