//! Every entry point, without a driver.

use std::error::Error as _;
use std::thread;

use terrane_core::DeviceId;
use terrane_cuda::{Context, CudaError, Driver, DriverCode, probe};

/// Whether this machine has no driver. With a driver, it prints the skip and returns false.
fn is_without_driver(test: &str) -> bool {
    match probe() {
        Err(CudaError::LibraryMissing { .. }) => true,
        Err(other) => {
            eprintln!("skipped: {test}: this machine has the driver's library (probe: {other})");
            false
        }
        Ok(found) => {
            eprintln!("skipped: {test}: CUDA {} is here", found.version);
            false
        }
    }
}

#[test]
fn every_entry_point_names_the_missing_library() {
    if !is_without_driver("every_entry_point_names_the_missing_library") {
        return;
    }
    let refusals = [
        probe().unwrap_err(),
        Driver::load().unwrap_err(),
        Context::primary(DeviceId::new(0)).unwrap_err(),
        Context::primary(DeviceId::new(u32::MAX)).unwrap_err(),
    ];
    for refusal in refusals {
        assert!(refusal.is_unavailable(), "{refusal}");
        assert!(!refusal.is_context_lost());
        assert_eq!(refusal.code(), None);
        let CudaError::LibraryMissing { library, .. } = &refusal else {
            panic!("{refusal:?}");
        };
        assert_eq!(library, "libcuda.so.1");
        // The action, and the message of the linker.
        assert!(refusal.to_string().contains("install"), "{refusal}");
        let mut causes = String::new();
        let mut next = refusal.source();
        while let Some(cause) = next {
            causes.push_str(&cause.to_string());
            next = cause.source();
        }
        assert!(causes.contains("libcuda.so.1"), "{causes}");
        assert!(format!("{:?}", refusal.clone()).contains("libcuda.so.1"));
    }
}

#[test]
fn codes_are_shown_without_a_driver() {
    if !is_without_driver("codes_are_shown_without_a_driver") {
        return;
    }
    for number in [0, 1, 2, 100, 700, 999, u32::MAX] {
        let code = DriverCode::new(number);
        assert_eq!(code.name(), None);
        assert_eq!(code.to_string(), format!("CUDA driver code {number}"));
        let error = CudaError::Driver { operation: "cuCtxSynchronize", code };
        assert!(error.to_string().contains("cuCtxSynchronize"));
        assert!(format!("{error:?}").contains(&number.to_string()));
    }
}

#[test]
fn threads_may_probe_concurrently_and_repeatedly() {
    let answers: Vec<_> = thread::scope(|scope| {
        let asking: Vec<_> =
            (0..8).map(|_| scope.spawn(|| (probe().is_ok(), probe().is_ok()))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let first = answers[0].0;
    assert!(answers.iter().all(|&answer| answer == (first, first)), "{answers:?}");
}
