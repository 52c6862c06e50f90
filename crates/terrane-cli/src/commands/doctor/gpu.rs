//! Examines the driver and its devices. It runs in a child process, because a driver may hang or
//! crash.

use std::fs;
use std::path::Path;
use std::time::Instant;

use terrane_core::{ByteCount, Capability, Memory, RegionRequest};
use terrane_cuda::{
    Context, CudaError, Device, DeviceEngine, DeviceEngineOptions, PinnedAllocator, PinnedOptions,
};
use terrane_plan::DeviceFacts;
use terrane_storage::NumaTopology;

use super::finding::{Finding, Status};
use super::probe::ProbeResult;

/// Probes the driver. With `contexts`, also probes features that need a context on each device:
/// kernels and pinned memory.
pub(crate) fn probe(contexts: bool) -> ProbeResult {
    let begun = Instant::now();
    let availability = match terrane_cuda::probe() {
        Ok(availability) => availability,
        Err(error) => {
            return ProbeResult {
                findings: vec![unavailable("gpu", &error)],
                ..ProbeResult::default()
            };
        }
    };
    let mut findings =
        vec![Finding::granted("gpu", format!("driver for CUDA {}", availability.version))];
    let topology = NumaTopology::read();
    for device in &availability.devices {
        findings.push(describe(device, &topology));
        findings.extend(link(device));
        if contexts {
            findings.extend(used(device).unwrap_or_else(|error| {
                // `--require` must not take another device's findings for this one's.
                let keys = ["gpu", "kernels", "pinned"];
                keys.map(|key| unavailable(key, &error).about(&device.name)).to_vec()
            }));
        }
    }
    let first = availability.devices.first().map(|device| DeviceFacts {
        name: device.name.clone(),
        memory_bytes: device.memory.get(),
        memory_bytes_per_second: None,
    });
    ProbeResult {
        findings,
        device: first,
        start_seconds: Some(begun.elapsed().as_secs_f64()),
        ..ProbeResult::default()
    }
}

/// The error's message has the reason before a semicolon, and the remedy after it.
fn unavailable(key: &str, error: &CudaError) -> Finding {
    let text = error.to_string();
    let (reason, remedy) = text.split_once("; ").unwrap_or((&text, "see the driver's log: dmesg"));
    Finding::refused(key, reason, remedy)
}

fn describe(device: &Device, topology: &NumaTopology) -> Finding {
    let (major, minor) = device.compute_capability;
    let node = device.numa_node(topology);
    let node =
        node.map_or_else(|| "NUMA node unknown".to_owned(), |node| format!("NUMA node {node}"));
    let detail = format!(
        "{}, {}, compute capability {major}.{minor}, {} copy engines, {node}",
        device.name, device.memory, device.copy_engines
    );
    Finding::granted("device", detail).about(format!("{}", device.id))
}

/// The negotiated PCIe link, and the fastest link that both ends support.
fn link(device: &Device) -> Option<Finding> {
    let address = device.pci_address?;
    let folder = format!("/sys/bus/pci/devices/{address}");
    let read = |name: &str| {
        fs::read_to_string(Path::new(&folder).join(name)).ok().map(|text| text.trim().to_owned())
    };
    let subject = format!("{}", device.id);
    let [speed, width, best_speed, best_width] =
        ["current_link_speed", "current_link_width", "max_link_speed", "max_link_width"].map(read);
    let (Some(speed), Some(width)) = (speed, width) else {
        return Some(
            Finding::partial(
                "pcie",
                format!("{folder} has no link"),
                "mount /sys; a virtual machine may hide it",
            )
            .about(subject),
        );
    };
    let generation =
        generation(&speed).map_or_else(String::new, |number| format!("generation {number}, "));
    let detail = format!("{generation}{speed}, {width} lanes");
    let is_best = best_speed.as_ref().is_none_or(|best| *best == speed)
        && best_width.as_ref().is_none_or(|best| *best == width);
    let finding = if is_best {
        Finding::granted("pcie", detail)
    } else {
        let best =
            format!("{}, {} lanes", best_speed.unwrap_or_default(), best_width.unwrap_or_default());
        Finding::partial(
            "pcie",
            format!("{detail}, of {best}"),
            "an idle device lowers its speed: repeat under load; else check the slot and the riser",
        )
    };
    Some(finding.about(subject))
}

/// The generation of PCIe with this speed, in the kernel's notation: `32.0 GT/s PCIe`.
fn generation(speed: &str) -> Option<u8> {
    Some(match speed.split_whitespace().next()?.trim_end_matches(".0") {
        "2.5" => 1,
        "5" => 2,
        "8" => 3,
        "16" => 4,
        "32" => 5,
        "64" => 6,
        _ => return None,
    })
}

/// Findings that need a context: kernels and pinned memory.
fn used(device: &Device) -> Result<Vec<Finding>, CudaError> {
    let context = Context::primary(device.id)?;
    let engine = DeviceEngine::new(&context, DeviceEngineOptions::default())?;
    let subject = format!("{}", device.id);
    let kernels = if engine.has_kernels() {
        Finding::granted("kernels", "the driver accepts the copy kernels")
    } else {
        Finding::refused(
            "kernels",
            "the driver does not compile the copy kernels",
            "install a newer driver; copies take one request for each piece meanwhile",
        )
    };
    let request = RegionRequest::new(ByteCount::mib(64)).labelled("probe");
    let pinned =
        PinnedAllocator::new(&context, PinnedOptions::default())?.allocate_memory(&request)?;
    let name = |capability: &Capability| {
        (*capability == Capability::HostRegistration).then_some((
            "pinned",
            "the driver allocates pinned memory itself, which takes several times as long",
        ))
    };
    let pinned = Finding::of_report(&pinned.capabilities(), name).into_iter();
    let pinned = pinned.map(|mut finding| {
        if finding.status == Status::Granted {
            finding.detail = "mapped memory is registered, in chunks of at most 64 GiB".to_owned();
        }
        finding
    });
    Ok([kernels].into_iter().chain(pinned).map(|finding| finding.about(&subject)).collect())
}

/// GPUDirect Storage: the kernel module and the library.
pub(crate) fn cufile() -> Finding {
    const REMEDY: &str = "install nvidia-gds and load nvidia-fs; copies between disk and GPU pass through pinned memory meanwhile";
    let libraries = [
        "/usr/lib/x86_64-linux-gnu/libcufile.so.0",
        "/usr/lib/aarch64-linux-gnu/libcufile.so.0",
        "/usr/lib64/libcufile.so.0",
        "/usr/local/cuda/lib64/libcufile.so.0",
        "/usr/local/cuda/targets/x86_64-linux/lib/libcufile.so.0",
    ];
    let library = libraries.into_iter().find(|path| Path::new(path).exists());
    let has_module = Path::new("/proc/driver/nvidia-fs").exists();
    match (library, has_module) {
        (Some(library), true) => {
            Finding::granted("cufile", format!("nvidia-fs is loaded, and {library} is there"))
        }
        (Some(library), false) => Finding::partial(
            "cufile",
            format!("{library} is there, and nvidia-fs is not loaded"),
            REMEDY,
        ),
        (None, true) => Finding::partial(
            "cufile",
            "nvidia-fs is loaded, and libcufile.so.0 is in none of the usual folders",
            REMEDY,
        ),
        (None, false) => {
            Finding::refused("cufile", "neither nvidia-fs nor libcufile.so.0 is there", REMEDY)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_of_the_kernel_has_its_generation() {
        let speeds = ["2.5 GT/s PCIe", "8.0 GT/s PCIe", "32.0 GT/s PCIe", "Unknown", ""];
        assert_eq!(speeds.map(generation), [Some(1), Some(3), Some(5), None, None]);
    }
}
