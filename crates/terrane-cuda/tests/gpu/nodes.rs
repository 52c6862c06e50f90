//! Pinned memory near its device: bound to the NUMA node that sysfs reports for the device, and
//! reported.

use std::fs;

use tempfile::TempDir;
use terrane_core::{
    Allocate, AllocateError, ByteCount, Capability, CapabilityReport, CapabilityStatus, Memory,
    Reason, RegionRequest, Requirement,
};
use terrane_cuda::{
    Context, CudaError, PinnedAllocator, PinnedMemory, PinnedNuma, PinnedOptions, ResourceCount,
};
use terrane_storage::{NumaTopology, StorageError};

use crate::needs::{LITTLE, device};

/// A node number that no machine has.
const MISSING_NODE: u32 = 1000;

/// A machine with these nodes (`"0-1"`). Its firmware reports the device's node, or does not.
fn machine(context: &Context, nodes: &str, of_device: Option<u32>) -> (TempDir, NumaTopology) {
    let root = tempfile::tempdir().unwrap();
    let write = |file: String, text: String| {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("devices/system/node/online".to_owned(), format!("{nodes}\n"));
    let address = context.device().pci_address.expect("the device has a place");
    let node = of_device.map_or(-1, i64::from);
    write(format!("bus/pci/devices/{address}/numa_node"), format!("{node}\n"));
    let topology = NumaTopology::read_from(root.path());
    (root, topology)
}

/// An allocator of registered memory only, near the device.
fn near(context: &Context, topology: &NumaTopology, requirement: Requirement) -> PinnedAllocator {
    let options = PinnedOptions {
        numa: PinnedNuma::NearDevice(requirement),
        registration: Requirement::Required,
        background_step: ByteCount::mib(2),
        ..PinnedOptions::default()
    };
    PinnedAllocator::with_topology(context, options, topology.clone()).unwrap()
}

/// Memory that was prepared at once, and memory that was prepared in the background, with the early
/// report of the latter.
fn both_ways(
    allocator: &PinnedAllocator,
) -> Result<([PinnedMemory; 2], CapabilityReport), CudaError> {
    let request = RegionRequest::new(ByteCount::mib(6));
    let at_once = allocator.allocate_memory(&request)?;
    let (background, bring_up) = allocator.allocate_in_background(&request)?;
    let early = background.capabilities();
    let patience = std::time::Duration::from_secs(120);
    assert!(bring_up.wait_for(request.bytes, patience).unwrap());
    Ok(([at_once, background], early))
}

/// The refusals of both ways to prepare memory, and of the trait's method.
fn refusals(allocator: &PinnedAllocator) -> ([CudaError; 2], AllocateError) {
    let request = RegionRequest::new(ByteCount::mib(6));
    let at_once = allocator.allocate_memory(&request).unwrap_err();
    let in_background = allocator.allocate_in_background(&request).unwrap_err();
    ([at_once, in_background], allocator.allocate(&request).unwrap_err())
}

/// The status of the NUMA binding, which is equal in all reports.
fn numa_status(memories: &[PinnedMemory; 2], early: &CapabilityReport) -> CapabilityStatus {
    let [at_once, background] = memories.each_ref().map(Memory::capabilities);
    let status =
        at_once.status(&Capability::NumaBinding).expect("the requirement has an outcome").clone();
    assert_eq!(early.status(&Capability::NumaBinding), Some(&status), "{early}");
    assert_eq!(background.status(&Capability::NumaBinding), Some(&status), "{background}");
    for report in [at_once, background] {
        let registered = report.status(&Capability::HostRegistration);
        assert_eq!(registered, Some(&CapabilityStatus::Granted), "{report}");
    }
    status
}

/// The kernel's memory policy: `"bind:0"`. The kernel merges adjacent mappings of one policy.
fn policy(memory: &PinnedMemory) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let mut mappings = maps.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let begin = u64::from_str_radix(words.next()?, 16).ok()?;
        (begin <= memory.address().get()).then(|| words.next().map(str::to_owned))?
    });
    mappings.next_back()
}

fn assert_all_gone(context: &Context) {
    let usage = context.usage();
    assert_eq!(
        (usage.registered, usage.host),
        (ResourceCount::default(), ResourceCount::default())
    );
    assert_eq!(context.failed_drops(), 0);
}

#[test]
fn pinned_memory_is_bound_to_the_node_of_its_device() {
    let name = "pinned_memory_is_bound_to_the_node_of_its_device";
    let Some(context) = device(name, LITTLE) else { return };
    // The node that sysfs reports, or else the only node.
    for (nodes, of_device) in [("0-1", Some(0)), ("0", None)] {
        let (_root, topology) = machine(&context, nodes, of_device);
        for requirement in [Requirement::Preferred, Requirement::Required] {
            let (memories, early) = match both_ways(&near(&context, &topology, requirement)) {
                Ok(brought) => brought,
                Err(error) => return skip_without_binding(name, requirement, &error),
            };
            match numa_status(&memories, &early) {
                CapabilityStatus::Granted => {
                    let found = memories.each_ref().map(policy);
                    assert_eq!(found, [(); 2].map(|()| Some("bind:0".to_owned())));
                }
                // A container may not permit the binding.
                CapabilityStatus::Refused(reason @ Reason::Os(_))
                    if requirement == Requirement::Preferred =>
                {
                    eprintln!("skipped: {name}: {reason}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_all_gone(&context);
}

/// Prints a skip if a container does not permit the required binding, which is this error.
fn skip_without_binding(test: &str, requirement: Requirement, error: &CudaError) {
    let CudaError::HostMemory { source } = error else { panic!("{error}") };
    let StorageError::Capability(missing) = &**source else { panic!("{error}") };
    let outcome = &missing.outcome;
    assert_eq!(
        (requirement, &outcome.capability),
        (Requirement::Required, &Capability::NumaBinding)
    );
    assert!(matches!(outcome.status, CapabilityStatus::Refused(Reason::Os(_))), "{error}");
    eprintln!("skipped: {test}: {error}");
}

/// The device's node is requested: if the kernel has no such node, the refusal is reported.
#[test]
fn a_node_that_does_not_exist_is_reported_or_an_error() {
    let name = "a_node_that_does_not_exist_is_reported_or_an_error";
    let Some(context) = device(name, LITTLE) else { return };
    let (_root, topology) = machine(&context, "0,1000", Some(MISSING_NODE));
    let (memories, early) = both_ways(&near(&context, &topology, Requirement::Preferred)).unwrap();
    let status = numa_status(&memories, &early);
    assert!(matches!(status, CapabilityStatus::Refused(Reason::Os(_))), "{status:?}");
    drop(memories);

    let required = near(&context, &topology, Requirement::Required);
    let (errors, error) = refusals(&required);
    for error in errors {
        let CudaError::HostMemory { source } = &error else { panic!("{error}") };
        assert!(matches!(**source, StorageError::Capability(_)), "{error}");
    }
    assert!(matches!(error, AllocateError::Capability { .. }), "{error}");
    assert_all_gone(&context);
}

#[test]
fn a_device_without_a_node_is_reported_or_an_error() {
    let name = "a_device_without_a_node_is_reported_or_an_error";
    let Some(context) = device(name, LITTLE) else { return };
    let (_root, two) = machine(&context, "0-1", None);
    // Not even the number of nodes is known.
    let nothing = NumaTopology::read_from(tempfile::tempdir().unwrap().path());
    assert!(nothing.gap().is_some());
    for topology in [two, nothing] {
        let (memories, early) =
            both_ways(&near(&context, &topology, Requirement::Preferred)).unwrap();
        let status = numa_status(&memories, &early);
        let CapabilityStatus::Refused(Reason::Needs(what)) = status else { panic!("{status:?}") };
        assert!(what.contains("the device's node"), "{what}");
        let (memories, early) = both_ways(&near(&context, &topology, Requirement::Off)).unwrap();
        assert_eq!(numa_status(&memories, &early), CapabilityStatus::NotTried);
        drop(memories);

        let required = near(&context, &topology, Requirement::Required);
        let (errors, error) = refusals(&required);
        for error in errors {
            let CudaError::Capability(missing) = &error else { panic!("{error}") };
            assert_eq!(missing.outcome.capability, Capability::NumaBinding, "{error}");
        }
        assert!(matches!(error, AllocateError::Capability { .. }), "{error}");
    }
    assert_all_gone(&context);
}
