//! The host: memory, limits, NUMA, shared memory, io_uring.

use std::fs;
use std::path::Path;

use rustix::io::Errno;
use terrane_core::{ByteCount, Capability, CapabilityStatus, OsError, Reason};
use terrane_plan::HostFacts;
use terrane_storage::{
    ControlGroupLimits, IoQueue, IoQueueOptions, NumaTopology, available_memory,
};

use super::finding::Finding;

/// The facts that a plan needs.
pub(crate) fn facts() -> HostFacts {
    HostFacts {
        memory_bytes: meminfo("MemTotal:"),
        available_bytes: available_memory().map(ByteCount::get),
        huge_pages: number("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
        free_huge_pages: number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
        memlock_bytes: memlock().flatten(),
        shm_bytes: free_bytes(Path::new("/dev/shm")),
    }
}

pub(crate) fn findings() -> Vec<Finding> {
    let mut findings = vec![memory(), numa()];
    findings.extend(huge_pages());
    findings.push(transparent_huge_pages());
    findings.push(locked_memory());
    findings.push(processors());
    findings.push(control_group());
    findings.push(shared_memory());
    findings.push(io_uring());
    findings.push(registered_buffers());
    findings
}

fn memory() -> Finding {
    let total = meminfo("MemTotal:").map(ByteCount::new);
    match (total, available_memory()) {
        (Some(total), Some(free)) => {
            Finding::granted("memory", format!("{free} available under all limits, of {total}"))
        }
        _ => Finding::partial(
            "memory",
            "/proc/meminfo cannot be read",
            "mount /proc in the container",
        ),
    }
}

fn numa() -> Finding {
    let topology = NumaTopology::read();
    if let Some(gap) = topology.gap() {
        return Finding::partial("numa", gap.to_string(), "mount /sys in the container");
    }
    let nodes = topology.nodes().iter().map(|node| {
        let memory = node.memory.map_or_else(String::new, |bytes| format!(", {bytes}"));
        format!("node {}: {} CPUs{memory}", node.id, node.cpus.len())
    });
    Finding::granted("numa", nodes.collect::<Vec<_>>().join("; "))
}

fn huge_pages() -> Vec<Finding> {
    let folder = Path::new("/sys/kernel/mm/hugepages");
    [(2_u64, "huge-pages"), (1024, "gigantic-pages")]
        .into_iter()
        .map(|(mib, key)| {
            let path = folder.join(format!("hugepages-{}kB", mib * 1024));
            let read = |name: &str| number_at(&path.join(name));
            match (read("free_hugepages"), read("nr_hugepages")) {
                (Some(free), Some(all)) if free > 0 => {
                    Finding::granted(key, format!("{free} of {all} pages of {mib} MiB are free"))
                }
                (Some(_), Some(all)) => Finding::refused(
                    key,
                    format!("0 of {all} pages of {mib} MiB are free"),
                    reserve(mib),
                ),
                _ => Finding::refused(
                    key,
                    format!("the kernel has no huge pages of {mib} MiB"),
                    "use transparent huge pages",
                ),
            }
        })
        .collect()
}

fn reserve(mib: u64) -> String {
    if mib == 2 {
        "sudo sysctl -w vm.nr_hugepages=N (`terrane plan --here` computes N); optional".to_owned()
    } else {
        "boot with hugepagesz=1G hugepages=N; optional".to_owned()
    }
}

fn transparent_huge_pages() -> Finding {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let text = fs::read_to_string(path).unwrap_or_default();
    let chosen = text.split(['[', ']']).nth(1).unwrap_or("");
    match chosen {
        "always" | "madvise" => Finding::granted("transparent-huge-pages", chosen),
        "never" => Finding::refused(
            "transparent-huge-pages",
            format!("{path} is never"),
            format!("echo madvise | sudo tee {path}"),
        ),
        _ => Finding::refused(
            "transparent-huge-pages",
            format!("{path} cannot be read"),
            "use a kernel with them",
        ),
    }
}

fn locked_memory() -> Finding {
    const REMEDY: &str = "for RDMA: ulimit -l unlimited, or LimitMEMLOCK=infinity in the service";
    match memlock() {
        Some(None) => Finding::granted("memlock", "unlimited"),
        Some(Some(bytes)) => {
            Finding::partial("memlock", format!("{} for a process", ByteCount::new(bytes)), REMEDY)
        }
        None => Finding::partial(
            "memlock",
            "/proc/self/limits cannot be read",
            "mount /proc in the container",
        ),
    }
}

/// `RLIMIT_MEMLOCK` in bytes. The inner value is `None` if it is unlimited.
fn memlock() -> Option<Option<u64>> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find(|line| line.starts_with("Max locked memory"))?;
    let soft = line.split_whitespace().nth(3)?;
    Some(soft.parse().ok())
}

fn processors() -> Finding {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    Finding::granted("processors", format!("{count} that this process may use"))
}

/// The limits of the container or service, if it has less memory or processor time than the
/// machine.
fn control_group() -> Finding {
    let limits = ControlGroupLimits::read();
    // The kernel's list of processors, which a limit on processor time does not change.
    let processors = NumaTopology::read().nodes().iter().map(|node| node.cpus.len()).sum();
    let memory = meminfo("MemTotal:").unwrap_or(u64::MAX);
    control_group_of((limits.memory, limits.processors), memory, processors)
}

fn control_group_of(
    (memory, processors): (Option<ByteCount>, Option<f64>),
    all_memory: u64,
    all_processors: usize,
) -> Finding {
    let memory = memory.filter(|limit| limit.get() < all_memory).map(|limit| {
        let limits = format!("{limit} of memory, of {}", ByteCount::new(all_memory));
        (limits, "memory.max of the group (docker run --memory, or MemoryMax of the service)")
    });
    let processors = processors.filter(|&limit| limit < all_processors as f64).map(|limit| {
        let limits = format!("the time of {limit:.2} processors, of {all_processors}");
        (limits, "cpu.max of the group (docker run --cpus, or CPUQuota of the service)")
    });
    let (limits, remedies): (Vec<_>, Vec<_>) = memory.into_iter().chain(processors).unzip();
    if limits.is_empty() {
        return Finding::granted("control-group", "no limit of memory or processors");
    }
    let remedy = format!("raise {}", remedies.join(", and "));
    Finding::partial("control-group", limits.join("; "), remedy)
}

fn shared_memory() -> Finding {
    match free_bytes(Path::new("/dev/shm")) {
        Some(bytes) if bytes >= 1 << 30 => {
            Finding::granted("shm", format!("{} free", ByteCount::new(bytes)))
        }
        Some(bytes) => Finding::partial(
            "shm",
            format!("{} free", ByteCount::new(bytes)),
            "docker run --shm-size=8g, for engines whose ranks share memory",
        ),
        None => Finding::refused("shm", "/dev/shm is not mounted", "mount -t tmpfs tmpfs /dev/shm"),
    }
}

fn io_uring() -> Finding {
    const REMEDY: &str = "allow io_uring_setup in the seccomp profile, and check /proc/sys/kernel/io_uring_disabled; threads serve meanwhile";
    match IoQueue::new(&IoQueueOptions { depth: 8, ..IoQueueOptions::default() }) {
        Ok(queue) => {
            let name = |capability: &Capability| {
                (*capability == Capability::IoUring).then_some(("io_uring", REMEDY))
            };
            let finding = Finding::of_report(queue.capabilities(), name).into_iter().next();
            finding.unwrap_or_else(|| Finding::refused("io_uring", "not reported", REMEDY))
        }
        Err(error) => Finding::refused("io_uring", error.to_string(), REMEDY),
    }
}

/// The memory that is registered for the trial: as much as a queue registers of large memory.
const TRIAL: ByteCount = ByteCount::mib(64);

/// Whether a queue registers memory with io_uring.
fn registered_buffers() -> Finding {
    const KEY: &str = "registered-buffers";
    const REMEDY: &str = "raise the limit of locked memory (ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in the service) or grant CAP_IPC_LOCK; meanwhile the kernel pins the pages for each request";
    const IO_URING: &str = "io_uring is required: see its line";
    let options = IoQueueOptions { depth: 8, registered: TRIAL, ..IoQueueOptions::default() };
    let status = match IoQueue::new(&options).and_then(|mut queue| queue.try_registration(TRIAL)) {
        Ok(status) => status,
        Err(error) => return Finding::refused(KEY, error.to_string(), IO_URING),
    };
    let reason = match status {
        CapabilityStatus::Granted => {
            return Finding::granted(KEY, format!("{TRIAL} were registered"));
        }
        CapabilityStatus::Refused(reason) => reason,
        _ => return Finding::refused(KEY, "not reported", REMEDY),
    };
    let remedy = match reason {
        Reason::Needs(_) => IO_URING,
        Reason::Unsupported { .. } => "use Linux 5.19 or later",
        Reason::Os(OsError { code, .. })
            if matches!(Errno::from_raw_os_error(code), Errno::PERM | Errno::NOSYS) =>
        {
            "allow io_uring_register in the seccomp filter"
        }
        _ => REMEDY,
    };
    Finding::refused(KEY, reason.to_string(), remedy)
}

fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

fn number(path: &str) -> Option<u64> {
    number_at(Path::new(path))
}

fn number_at(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The free bytes for this user in the file system of a directory.
pub(crate) fn free_bytes(directory: &Path) -> Option<u64> {
    let facts = rustix::fs::statvfs(directory).ok()?;
    facts.f_bavail.checked_mul(facts.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::finding::Status;

    #[test]
    fn only_limits_below_the_machine_s_are_limits() {
        let of = |memory: Option<u32>, processors: Option<f64>| {
            control_group_of((memory.map(ByteCount::gib), processors), 64 << 30, 8)
        };
        for (memory, processors) in
            [(None, None), (Some(64), None), (None, Some(8.0)), (Some(100), Some(12.5))]
        {
            let finding = of(memory, processors);
            assert_eq!((finding.status, finding.remedy), (Status::Granted, None), "{processors:?}");
        }
        let finding = of(Some(16), Some(8.0));
        assert_eq!(finding.detail, "16 GiB of memory, of 64 GiB");
        let remedy = finding.remedy.unwrap();
        assert!(remedy.contains("memory.max") && !remedy.contains("cpu.max"), "{remedy}");
        let finding = of(None, Some(7.5));
        assert_eq!(finding.detail, "the time of 7.50 processors, of 8");
        let remedy = finding.remedy.unwrap();
        assert!(remedy.contains("cpu.max") && !remedy.contains("memory.max"), "{remedy}");
        assert!(
            of(Some(16), Some(1.5)).remedy.unwrap().contains("memory.max of the group (docker")
        );
    }
}
