//! The available memory, under the limits of the machine and the control group.

use std::fs;
use std::path::{Path, PathBuf};

use terrane_core::ByteCount;

/// The bytes that the machine and every control group of this process have left. `None` if the
/// kernel does not report them.
///
/// Reclaimable page cache counts as available, and swap space too.
#[must_use]
pub fn available_memory() -> Option<ByteCount> {
    available_under(Path::new("/"))
}

/// The same, with `root` in place of `/`.
fn available_under(root: &Path) -> Option<ByteCount> {
    let machine = fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| {
        let free = field(&text, "MemAvailable:")?;
        let swap = field(&text, "SwapFree:").unwrap_or(0);
        free.checked_add(swap)?.checked_mul(1024)
    });
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let group = groups.lines().filter_map(|line| headroom(root, line)).min();
    machine.into_iter().chain(group).min().map(ByteCount::new)
}

/// The file names of one cgroup version.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// The key in `memory.stat` of the page cache that the kernel reclaims first.
    cache: &'static str,
}

const VERSION_1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_inactive_file",
};
const VERSION_2: Files =
    Files { limit: "memory.max", usage: "memory.current", cache: "inactive_file" };

/// The bytes left in the group on a line of `/proc/self/cgroup` and in every group above it.
fn headroom(root: &Path, line: &str) -> Option<u64> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let (mount, files) = if controllers.is_empty() {
        (root.join("sys/fs/cgroup"), VERSION_2)
    } else if controllers.split(',').any(|name| name == "memory") {
        (root.join("sys/fs/cgroup/memory"), VERSION_1)
    } else {
        return None;
    };
    // In a container the path can be the host's, which does not exist here. The walk then ends at
    // the mount's own files, which are the container's.
    let path = Path::new(path.trim_start_matches('/'));
    let groups = path.ancestors().map(|group| mount.join(group));
    groups.filter_map(|group| headroom_of(&group, &files)).min()
}

fn headroom_of(group: &Path, files: &Files) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(PathBuf::from(group).join(name)).ok();
    // The text "max" is no number and means no limit.
    let limit: u64 = read(files.limit)?.trim().parse().ok()?;
    let usage: u64 = read(files.usage)?.trim().parse().ok()?;
    let cache = read("memory.stat").and_then(|text| field(&text, files.cache)).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(cache)))
}

/// The number that follows `key` on its line.
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == key).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:   1000 kB\nSwapFree:  24 kB\n");

    #[test]
    fn the_tightest_limit_counts() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/pod/box\n"),
            ("sys/fs/cgroup/pod/memory.max", "600000\n"),
            ("sys/fs/cgroup/pod/memory.current", "500000\n"),
            ("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 50000\n"),
            ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/box/memory.current", "1\n"),
        ]);
        assert_eq!(available_under(root.path()), Some(ByteCount::new(150_000)));
    }

    #[test]
    fn version_1_and_a_path_of_the_hosts() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "5:cpu:/\n4:memory:/docker/1234\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"),
        ]);
        assert_eq!(available_under(root.path()), Some(ByteCount::ZERO));
    }

    #[test]
    fn without_groups_the_machine_counts_and_without_anything_nothing_does() {
        assert_eq!(available_under(tree(&[MEMINFO]).path()), Some(ByteCount::kib(1024)));
        assert_eq!(available_under(tree(&[]).path()), None);
    }
}
