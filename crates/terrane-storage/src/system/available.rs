//! The available memory, under the limits of the machine and the control group.

use std::fs;
use std::path::Path;

use terrane_core::ByteCount;

use super::control_groups::{field, groups};

/// The bytes that the machine and every control group of this process have left. `None` if the
/// kernel does not report them.
///
/// Reclaimable page cache counts as available. So does the machine's swap space, but not within the
/// limit of a control group.
#[must_use]
pub fn available_memory() -> Option<ByteCount> {
    available_under(Path::new("/"))
}

/// The same, with `root` instead of `/`.
fn available_under(root: &Path) -> Option<ByteCount> {
    let machine = fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| {
        let free = field(&text, "MemAvailable:")?;
        let swap = field(&text, "SwapFree:").unwrap_or(0);
        free.checked_add(swap)?.checked_mul(1024)
    });
    let group = groups(root, "memory").filter_map(|group| group.memory_left()).min();
    machine.into_iter().chain(group).min().map(ByteCount::new)
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
