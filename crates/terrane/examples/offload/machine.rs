//! The available memory of the machine, and its directories on disks.

use std::fs;
use std::path::{Path, PathBuf};

use terrane::core::ByteCount;

/// The memory that is available without swapping. `None` if the kernel does not report it.
pub fn available_memory() -> Option<ByteCount> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(ByteCount::new)
}

/// The directory of the disk tier, and its file system.
pub struct Disk {
    pub directory: PathBuf,
    /// The name of the file system's type in `/proc/self/mountinfo`, such as `ext4`.
    pub file_system: String,
}

impl Disk {
    /// Whether the file system is in memory.
    pub fn is_memory(&self) -> bool {
        matches!(self.file_system.as_str(), "tmpfs" | "ramfs")
    }
}

/// The directory that the user named, or a temporary one that is not in memory.
pub fn choose_disk(requested: Option<&Path>) -> Disk {
    let candidates = match requested {
        Some(directory) => vec![directory.to_owned()],
        None => vec![std::env::temp_dir(), PathBuf::from("/var/tmp"), PathBuf::from(".")],
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut disks: Vec<Disk> = candidates
        .into_iter()
        .map(|directory| Disk { file_system: file_system_of(&directory, &mounts), directory })
        .collect();
    let on_disk = disks.iter().position(|disk| !disk.is_memory() && disk.directory.is_dir());
    disks.swap_remove(on_disk.unwrap_or(0))
}

/// The type of the file system whose mount point is the nearest ancestor of `directory`.
fn file_system_of(directory: &Path, mounts: &str) -> String {
    let directory = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, rest) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        let file_system = rest.split(' ').next()?;
        directory.starts_with(point).then_some((point.len(), file_system))
    });
    // If two file systems are mounted at one point, the later one hides the other.
    let nearest = mounts.max_by_key(|(length, _)| *length);
    nearest.map_or("an unknown file system", |(_, file_system)| file_system).to_owned()
}
