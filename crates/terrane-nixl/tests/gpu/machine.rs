//! The tests' requirements on the machine: memory, a driver, a real device, and cuFile's needs.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use terrane_core::DeviceId;
use terrane_cuda::{Context, DriverVersion};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig, NixlError};

use crate::chain;
use crate::cufile::{Driver, UDEV, is_backend_failure, unknown_drive};
use crate::needs::{self, Needs};

/// The first driver that supports the CUDA runtime of UCX's modules and GDS's plugins,
/// `libcudart.so.12`.
const OLDEST: DriverVersion = DriverVersion { major: 12, minor: 0 };

/// The first device, if it is real and has a driver that NIXL can use. Otherwise reports the missing
/// part and returns `None`.
pub fn device(test: &str, needs: Needs) -> Option<Context> {
    let context = needs::real_device(test, needs)?;
    match too_old(context.driver().version().unwrap()) {
        None => Some(context),
        Some(reason) => {
            eprintln!("skipped: {test}: {reason}");
            None
        }
    }
}

/// Like [`device`], with a second device that has the same amount of free memory.
pub fn two_devices(test: &str, needs: Needs) -> Option<[Context; 2]> {
    let first = device(test, needs)?;
    let reason = match Context::primary(DeviceId::new(1)) {
        Ok(second) => {
            let (free, _) = second.memory().unwrap();
            if free >= needs.device {
                return Some([first, second]);
            }
            format!("{} of memory needed of the second device, {free} free", needs.device)
        }
        Err(error) => format!("two devices needed: {error}"),
    };
    eprintln!("skipped: {test}: {reason}");
    None
}

fn too_old(driver: DriverVersion) -> Option<String> {
    (driver < OLDEST).then(|| format!("a driver of CUDA {OLDEST} needed, this one is of {driver}"))
}

/// Builds an agent with GDS. If cuFile's driver does not open for a reason of the machine, reports the
/// reason and returns `None`. Any other failure fails the test, such as a plugin that does not load.
#[track_caller]
pub fn with_gds(test: &str, builder: AgentBuilder) -> Option<Agent> {
    let error = match builder.build() {
        Ok(agent) => return Some(agent),
        Err(error) => error,
    };
    // The plugin loads and knows its parameters. Then it opens cuFile's driver, and nothing else.
    let reason = match error {
        NixlError::Backend { .. } => Driver::here().reason(),
        _ => None,
    };
    let Some(reason) = reason else { panic!("{}", chain(&error)) };
    eprintln!("skipped: {test}: cuFile's driver does not open: {reason}: {}", chain(&error));
    None
}

/// An agent with GDS alone, from [`with_gds`].
#[track_caller]
pub fn gds(test: &str) -> Option<Agent> {
    with_gds(test, AgentBuilder::unnamed().backend(BackendConfig::new("GDS")))
}

/// Reports that the test is skipped because cuFile refuses files in the folder of `near`. Without a
/// reason of the machine, the refusal fails the test.
#[track_caller]
pub fn refused_by_cufile(test: &str, near: &Path, error: &(dyn Error + 'static)) {
    let reason = match is_backend_failure(error) {
        true => unknown_drive(Path::new(UDEV), near),
        false => None,
    };
    let Some(reason) = reason else { panic!("{}", chain(error)) };
    eprintln!(
        "skipped: {test}: cuFile takes no file of {}: {reason}: {}",
        near.display(),
        chain(error)
    );
}

#[test]
fn unmet_needs_of_a_test_are_named() {
    const TEST: &str = "machine::unmet_needs_of_a_test_are_named";
    const OTHER: &str = "device_memory_outlives_the_agent_that_registered_it";
    let Some(context) = needs::device(TEST, needs::LITTLE) else { return };
    if !needs::is_simulated(&context) {
        eprintln!("skipped: {TEST}: a simulated device needed, whose memory can be chosen");
        return;
    }
    let again = Command::new(std::env::current_exe().unwrap())
        .args([OTHER, "--exact", "--nocapture"])
        .env("TERRANE_SIMULATED_CUDA", "devices=1,memory=16MiB")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    let expected =
        format!("skipped: {OTHER}: {} of device 0's memory needed, ", needs::LITTLE.device);
    assert!(again.status.success() && said.contains(&expected), "{said}");

    let older = DriverVersion { major: 11, minor: 8 };
    let said = too_old(older).unwrap();
    assert!(said.contains("12.0") && said.contains("11.8"), "{said}");
    assert_eq!(too_old(OLDEST), None);
}
