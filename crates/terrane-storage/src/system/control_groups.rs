//! The control groups of this process, of version 1 and 2, and their limits.

use std::fs;
use std::path::{Path, PathBuf};

use terrane_core::ByteCount;

/// The limits of the control groups of this process. A parent group sets limits too, so the lowest
/// limit counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ControlGroupLimits {
    /// The memory that the group may use; `None` if there is no limit.
    pub memory: Option<ByteCount>,
    /// The processors whose time the group may use: 1.5 is 150 ms in 100 ms. `None` if there is no
    /// limit.
    pub processors: Option<f64>,
}

impl ControlGroupLimits {
    /// The limits as the kernel reports them now.
    #[must_use]
    pub fn read() -> Self {
        Self::read_under(Path::new("/"))
    }

    /// The same, with `root` instead of `/`.
    fn read_under(root: &Path) -> Self {
        let processors = groups(root, "cpu").filter_map(|group| group.processors());
        Self {
            memory: groups(root, "memory")
                .filter_map(|group| group.memory_limit())
                .min()
                .map(ByteCount::new),
            processors: processors.min_by(f64::total_cmp),
        }
    }
}

/// The folder of a control group.
pub(super) struct Group {
    folder: PathBuf,
    is_version_1: bool,
}

/// The groups of this process that have a controller, and all groups above them.
pub(super) fn groups(root: &Path, controller: &'static str) -> impl Iterator<Item = Group> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| folders(root, line, controller));
    lines.collect::<Vec<_>>().into_iter().flatten()
}

/// The group on a line of `/proc/self/cgroup`, and all above it.
fn folders(root: &Path, line: &str, controller: &str) -> Option<Vec<Group>> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let is_version_1 = !controllers.is_empty();
    let mount = if !is_version_1 {
        root.join("sys/fs/cgroup")
    } else if controllers.split(',').any(|name| name == controller) {
        root.join("sys/fs/cgroup").join(controller)
    } else {
        return None;
    };
    // In a container the path can be the host's, which does not exist here. The walk then ends at
    // the mount's own files, which are the container's.
    let path = Path::new(path.trim_start_matches('/'));
    Some(path.ancestors().map(|group| Group { folder: mount.join(group), is_version_1 }).collect())
}

impl Group {
    /// The bytes that are left. Page cache that the kernel reclaims first counts as free.
    pub(super) fn memory_left(&self) -> Option<u64> {
        let (usage, cache) = if self.is_version_1 {
            ("memory.usage_in_bytes", "total_inactive_file")
        } else {
            ("memory.current", "inactive_file")
        };
        let limit = self.memory_limit()?;
        let usage: u64 = self.read(usage)?.trim().parse().ok()?;
        let cache = self.read("memory.stat").and_then(|text| field(&text, cache)).unwrap_or(0);
        Some(limit.saturating_sub(usage.saturating_sub(cache)))
    }

    fn memory_limit(&self) -> Option<u64> {
        /// Version 1 has no word for "no limit": it reports the largest multiple of a page.
        const NO_LIMIT: u64 = 1 << 62;
        let file = if self.is_version_1 { "memory.limit_in_bytes" } else { "memory.max" };
        // The text "max" is no number and means no limit.
        self.read(file)?.trim().parse().ok().filter(|&limit| limit < NO_LIMIT)
    }

    fn processors(&self) -> Option<f64> {
        let (quota, period) = if self.is_version_1 {
            (self.read("cpu.cfs_quota_us")?, self.read("cpu.cfs_period_us")?)
        } else {
            let text = self.read("cpu.max")?;
            let (quota, period) = text.trim().split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        };
        // "max" and -1 mean no limit.
        let [quota, period] = [quota, period].map(|text| text.trim().parse::<u32>().ok());
        let period = period.filter(|&period| period > 0)?;
        Some(f64::from(quota?) / f64::from(period))
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(name)).ok()
    }
}

/// The number that follows `key` on its line.
pub(super) fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == key).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(files: &[(&str, &str)]) -> ControlGroupLimits {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        ControlGroupLimits::read_under(root.path())
    }

    #[test]
    fn the_least_limit_of_nested_groups_counts() {
        let found = limits(&[
            ("proc/self/cgroup", "0::/pod/box\n"),
            ("sys/fs/cgroup/pod/memory.max", "600000\n"),
            ("sys/fs/cgroup/pod/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/box/cpu.max", "150000 100000\n"),
        ]);
        let memory = Some(ByteCount::new(600_000));
        assert_eq!(found, ControlGroupLimits { memory, processors: Some(1.5) });
    }

    #[test]
    fn groups_of_version_1_without_limits_have_none() {
        let groups = ("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n");
        let unlimited = [
            groups,
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"),
        ];
        assert_eq!(limits(&unlimited), ControlGroupLimits::default());
        let limited = [groups, ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096\n")];
        assert_eq!(limits(&limited).memory, Some(ByteCount::new(4096)));
        assert_eq!(limits(&[]), ControlGroupLimits::default());
    }
}
