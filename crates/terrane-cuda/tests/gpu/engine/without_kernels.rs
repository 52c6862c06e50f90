//! The engine with a driver that refuses its kernels: it uses the driver's copies.

use std::sync::Arc;

use terrane_core::{Capability, CapabilityStatus, Reason, Requirement};
use terrane_cuda::{CalibrationOptions, CopyPath, CudaError, DeviceEngine, DeviceEngineOptions};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::conformance::{EngineFixture, check_copy_engine};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::{Live, SimulatedCuda};
use terrane_transfer::{Checksums, CopyEngine, Declined, Transfer, TransferError, TransferManager};

use super::fixture::{APART, DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device};

const ALL: [&str; 3] = [DEVICE, APART, PINNED];
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`.
const TOO_NEW: u32 = 222;
const OUT_OF_MEMORY: u32 = 2;

fn without() -> DeviceEngineOptions {
    DeviceEngineOptions { kernels: Requirement::Off, ..DeviceEngineOptions::default() }
}

#[test]
fn an_engine_without_kernels_conforms() {
    let Some(context) = device("an_engine_without_kernels_conforms", LITTLE) else { return };
    check_copy_engine(&Fixture::new(&context, without(), &ALL));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn a_driver_that_refuses_the_kernels_copies() {
    let name = "a_driver_that_refuses_the_kernels_copies";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: no simulated driver, which refuses what it is told to");
    };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &ALL);
    driver.fail("cuModuleLoadDataEx", 0, TOO_NEW);
    let engine = fixture.engine();
    let reason = Reason::Driver { operation: "cuModuleLoadDataEx", code: TOO_NEW };
    let report = engine.capabilities();
    assert_eq!(report.status(&Capability::CopyKernels), Some(&CapabilityStatus::Refused(reason)));
    drop(engine);

    driver.fail("cuModuleLoadDataEx", 0, TOO_NEW);
    let manager = fixture.manager();
    let shape = config(8, 4, 16);
    let ids: Vec<u32> = (0..8).collect();
    let whole = LayoutKind::FullyContiguous;
    for (from, to) in [(DEVICE, PINNED), (PINNED, APART), (DEVICE, APART)] {
        let [from, to] = [(from, LAYERS_APART), (to, whole)]
            .map(|(end, kind)| fixture.endpoint(end, shape, kind));
        Image::scribble(&from, fixture.access(), 3);
        let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&ids, &ids);
        let explanation = manager.explain(&transfer).unwrap();
        let says = explanation.to_string();
        assert!(says.contains("copy kernels") && says.contains("222"), "{says}");
        check_transfer(&manager, fixture.access(), (&from, &ids), (&to, &ids), 0..4);
    }
    assert_eq!(driver.clear_faults(), 0);
}

/// The kernels for checksums are loaded with the others: a later load might wait for all work on
/// the device. If the driver refuses only these, the engine still copies with kernels.
#[test]
fn a_driver_that_refuses_the_checksum_kernels_copies_with_the_others() {
    let name = "a_driver_that_refuses_the_checksum_kernels_copies_with_the_others";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: no simulated driver, which refuses what it is told to");
    };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &ALL);
    let [here, there] = [DEVICE, PINNED]
        .map(|end| fixture.endpoint(end, config(4, 2, 16), LayoutKind::FullyContiguous));
    let transfer = ordered(Transfer::new(&here, &there), &here, &there).blocks(&[0], &[0]);
    let wanted = transfer.clone().checksums(Checksums::Compute);
    let status =
        |engine: &DeviceEngine| engine.capabilities().status(&Capability::ChecksumKernels).cloned();
    let make = || Arc::new(DeviceEngine::new(&context, DeviceEngineOptions::default()).unwrap());
    for code in [TOO_NEW, OUT_OF_MEMORY] {
        let modules = driver.count(Live::Modules);
        driver.fail("cuModuleLoadDataEx", 1, code);
        let engine = make();
        assert_eq!(driver.clear_faults(), 0, "both modules were loaded");
        let manager = TransferManager::new([Arc::clone(&engine) as _]);
        manager.explain(&transfer).unwrap();
        assert_eq!(driver.count(Live::Modules), modules + 1);
        assert!(engine.has_kernels());
        if code == TOO_NEW {
            let error = manager.explain(&wanted).unwrap_err();
            let TransferError::NoEngine { declined, .. } = &error else { panic!("{error}") };
            assert_eq!(declined[0], ("cuda", Declined::ChecksumKernels));
            let reason = Reason::Driver { operation: "cuModuleLoadDataEx", code };
            assert_eq!(status(&engine), Some(CapabilityStatus::Refused(reason)));
            assert!(!manager.explain(&transfer).unwrap().to_string().contains("222"));
        } else {
            // A temporary lack of memory proves nothing about the driver.
            assert_eq!(status(&engine), None);
            manager.explain(&wanted).unwrap();
            assert_eq!(status(&engine), Some(CapabilityStatus::Granted));
            assert_eq!(driver.count(Live::Modules), modules + 2);
        }
        end_of(manager.submit(transfer.clone(), ()).unwrap()).result.unwrap();
        drop((manager, engine));
        assert_eq!(driver.count(Live::Modules), modules);
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Missing kernels are an error if the kernels are required, or if the forced path needs them. So
/// is any failure that is not a refusal of the driver.
#[test]
fn required_kernels_are_loaded_or_an_error() {
    let name = "required_kernels_are_loaded_or_an_error";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: no simulated driver, which refuses what it is told to");
    };
    let wished = |kernels, code| {
        driver.fail("cuModuleLoadDataEx", 0, code);
        let options = DeviceEngineOptions { kernels, ..DeviceEngineOptions::default() };
        DeviceEngine::new(&context, options).unwrap_err()
    };
    for (requirement, code) in [(Requirement::Required, TOO_NEW), (Requirement::Preferred, 2)] {
        let error = wished(requirement, code);
        assert!(matches!(error, CudaError::KernelsRefused { .. }), "{error}");
    }
    let required = DeviceEngineOptions { kernels: Requirement::Required, ..without() };
    let engine = DeviceEngine::new(&context, required).unwrap();
    assert_eq!(
        engine.capabilities().status(&Capability::CopyKernels),
        Some(&CapabilityStatus::Granted)
    );
    assert!(engine.has_kernels());

    let forced = DeviceEngineOptions { path: Some(CopyPath::Staged), ..without() };
    let engine = DeviceEngine::new(&context, forced).unwrap();
    assert!(!engine.has_kernels());
    let manager = TransferManager::new([Arc::new(engine) as _]);
    let fixture = Fixture::new(&context, without(), &ALL);
    let [here, there] = [DEVICE, PINNED]
        .map(|end| fixture.endpoint(end, config(4, 2, 16), LayoutKind::FullyContiguous));
    let transfer = ordered(Transfer::new(&here, &there), &here, &there).blocks(&[0], &[0]);
    assert!(manager.explain(&transfer).is_err());
}

/// The paths of an engine without kernels are measured as well.
#[test]
fn copies_without_kernels_are_calibrated() {
    let Some(context) = device("copies_without_kernels_are_calibrated", LITTLE) else { return };
    let mut options = CalibrationOptions::default();
    options.bytes = terrane_core::ByteCount::mib(1);
    options.repetitions = 1;
    options.engine = without();
    let measured = options.measure(&context).unwrap();
    assert_eq!(measured.device(), context.device().name);
}
