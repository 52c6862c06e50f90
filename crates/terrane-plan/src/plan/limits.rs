//! The limits of a machine that a plan exceeds.

use std::path::Path;

use serde::{Deserialize, Serialize};
use terrane_core::ByteCount;

use crate::machine::DiskFacts;
use crate::plan::memory::{HUGE_PAGE, HostNeeds, TierKind, TierPlan};
use crate::request::PlanRequest;
use crate::sizes::option_size;

/// A limit that the plan exceeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitHit {
    /// The limit.
    pub limit: String,
    /// The amount that the plan needs.
    pub needed: u64,
    /// The amount that the machine has.
    pub available: u64,
    /// `bytes` or `pages`.
    pub unit: String,
    /// The remedy.
    pub remedy: String,
}

/// Compares the plan with the known facts about the machine.
pub(crate) fn exceeded(
    request: &PlanRequest,
    tiers: &[TierPlan],
    host: Option<&HostNeeds>,
) -> Vec<LimitHit> {
    let Some(machine) = &request.machine else { return Vec::new() };
    let mut limits = Limits(Vec::new());
    let ranks = u64::from(request.tensor_parallel);
    for tier in tiers {
        match tier.kind {
            TierKind::Device => {
                let memory = machine.device.as_ref().map(|device| device.memory_bytes);
                limits.bytes(
                    "device memory",
                    tier.given_bytes,
                    memory,
                    "use less device memory for the cache, or more ranks",
                );
                if machine.device.is_none() {
                    limits.bytes(
                        "device memory",
                        tier.given_bytes,
                        Some(0),
                        "plan without --gpu-mem, or name a machine with a GPU",
                    );
                }
            }
            TierKind::Host => {
                let needed = tier.used_bytes.saturating_mul(ranks);
                let facts = machine.host.as_ref();
                limits.bytes(
                    "host memory",
                    needed,
                    facts.and_then(|host| host.memory_bytes),
                    "use less host memory for the cache",
                );
                // Available memory excludes free huge pages, which the tier uses first.
                let available = facts.and_then(|host| {
                    let pages = host.free_huge_pages.unwrap_or(0).saturating_mul(HUGE_PAGE);
                    Some(host.available_bytes?.saturating_add(pages))
                });
                limits.bytes("host memory that is available", needed, available, "stop other processes, raise the control group's memory.max, or use less for the cache");
            }
            TierKind::Disk => {}
        }
    }
    for FileSystemNeeds { directories, needed, free } in file_systems(&machine.disks, tiers, ranks)
    {
        let limit = format!("free space in {}", directories.join(" and "));
        limits.bytes(&limit, needed, Some(free), "free space there, or use less for the cache");
    }
    if let (Some(needs), Some(facts)) = (host, &machine.host) {
        let enough = facts.free_huge_pages.is_none_or(|free| free >= needs.huge_pages);
        if let (false, Some(free)) = (enough, facts.free_huge_pages) {
            let remedy = format!(
                "{}; without them, the kernel assembles huge pages where it can",
                needs.sysctl
            );
            limits.0.push(LimitHit {
                limit: "free huge pages of 2 MiB".into(),
                needed: needs.huge_pages,
                available: free,
                unit: "pages".into(),
                remedy,
            });
        }
        limits.bytes("memlock of a process, for RDMA only", needs.memlock_bytes, facts.memlock_bytes, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service; the CUDA driver is not limited by it");
        let size = option_size(needs.shm_bytes);
        limits.bytes(
            "free space in /dev/shm, for vLLM's native offloading only",
            needs.shm_bytes,
            facts.shm_bytes,
            &format!("docker run --shm-size={size}, or mount -o remount,size={size} /dev/shm"),
        );
    }
    limits.0
}

/// The tiers on one file system.
struct FileSystemNeeds<'a> {
    directories: Vec<&'a str>,
    needed: u64,
    free: u64,
}

/// The needs of the disk tiers, summed for each file system. The free space of other directories is
/// not known.
fn file_systems<'a>(
    disks: &[DiskFacts],
    tiers: &'a [TierPlan],
    ranks: u64,
) -> Vec<FileSystemNeeds<'a>> {
    let mut found: Vec<(&DiskFacts, FileSystemNeeds<'a>)> = Vec::new();
    for tier in tiers.iter().filter(|tier| tier.kind == TierKind::Disk) {
        // Paths are equal without the slash at the end.
        let is_there = |disk: &&DiskFacts| Path::new(&disk.directory) == Path::new(&tier.name);
        let Some(disk) = disks.iter().find(is_there) else { continue };
        let needed = tier.used_bytes.saturating_mul(ranks);
        let is_same = |other: &DiskFacts| match (disk.file_system, other.file_system) {
            (Some(one), Some(other)) => one == other,
            _ => Path::new(&disk.directory) == Path::new(&other.directory),
        };
        if let Some((_, needs)) = found.iter_mut().find(|(other, _)| is_same(other)) {
            needs.directories.push(&tier.name);
            needs.needed = needs.needed.saturating_add(needed);
            needs.free = needs.free.min(disk.free_bytes);
        } else {
            let directories = vec![tier.name.as_str()];
            found.push((disk, FileSystemNeeds { directories, needed, free: disk.free_bytes }));
        }
    }
    found.into_iter().map(|(_, needs)| needs).collect()
}

struct Limits(Vec<LimitHit>);

impl Limits {
    fn bytes(&mut self, limit: &str, needed: u64, available: Option<u64>, remedy: &str) {
        if let Some(available) = available.filter(|&available| available < needed) {
            self.0.push(LimitHit {
                limit: limit.to_owned(),
                needed,
                available,
                unit: "bytes".into(),
                remedy: remedy.to_owned(),
            });
        }
    }
}

impl std::fmt::Display for LimitHit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.unit == "bytes" {
            let [needed, available] = [self.needed, self.available].map(ByteCount::new);
            write!(f, "{}: {needed} needed, {available} available; {}", self.limit, self.remedy)
        } else {
            let Self { limit, needed, available, remedy, .. } = self;
            write!(f, "{limit}: {needed} needed, {available} available; {remedy}")
        }
    }
}
