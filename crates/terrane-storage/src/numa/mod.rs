//! The NUMA nodes of the machine, from sysfs.

mod list;
mod pci;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use terrane_core::{ByteCount, OsError};

use list::parse_list;
pub use pci::{InvalidPciAddress, PciAddress};

/// The number of a NUMA node, as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// The node with this number. [`NumaTopology`] tells whether it exists.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: NodeId,
    /// Its CPUs, ascending. Empty on a node that is memory only (CXL, HBM).
    pub cpus: Vec<u32>,
    /// The size of its memory, if sysfs reports it.
    pub memory: Option<ByteCount>,
    /// The distances to the nodes of the topology, in their order; 10 is local. Empty if sysfs
    /// reports none.
    pub distances: Vec<u32>,
}

/// The NUMA nodes of the machine.
///
/// Reading it never fails. If sysfs has no topology, there is one node. It has as many CPUs as this
/// process may use, numbered from 0. [`gap`](Self::gap) then returns the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaTopology {
    root: PathBuf,
    nodes: Vec<NumaNode>,
    gap: Option<TopologyGap>,
}

impl NumaTopology {
    /// The topology of this machine.
    ///
    /// ```
    /// use terrane_storage::NumaTopology;
    ///
    /// let topology = NumaTopology::read();
    /// assert!(!topology.nodes().is_empty());
    /// ```
    #[must_use]
    pub fn read() -> Self {
        Self::read_from(Path::new("/sys"))
    }

    /// The topology in a tree like `/sys` under `root`.
    #[must_use]
    pub fn read_from(root: &Path) -> Self {
        let directory = root.join("devices/system/node");
        let online = directory.join("online");
        match read_list(&online) {
            Ok(numbers) if !numbers.is_empty() => {
                let nodes = numbers.iter().map(|&number| read_node(&directory, number)).collect();
                Self { root: root.to_owned(), nodes, gap: None }
            }
            Ok(_) => Self::one_node(root, TopologyGap::Malformed { path: online }),
            Err(gap) => Self::one_node(root, gap),
        }
    }

    fn one_node(root: &Path, gap: TopologyGap) -> Self {
        tracing::debug!(%gap, "NUMA topology unknown");
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let node = NumaNode {
            id: NodeId::new(0),
            cpus: (0..u32::try_from(cpus).unwrap_or(1)).collect(),
            memory: None,
            distances: Vec::new(),
        };
        Self { root: root.to_owned(), nodes: vec![node], gap: Some(gap) }
    }

    /// The online nodes, ascending. There is at least one.
    #[must_use]
    pub fn nodes(&self) -> &[NumaNode] {
        &self.nodes
    }

    /// The node with this number, if it is online.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NumaNode> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// The reason why sysfs has no topology and one node is assumed. `None` if sysfs has one.
    #[must_use]
    pub const fn gap(&self) -> Option<&TopologyGap> {
        self.gap.as_ref()
    }

    /// The distance between two nodes, if sysfs reports it; 10 is local.
    #[must_use]
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let column = self.nodes.iter().position(|node| node.id == to)?;
        self.node(from)?.distances.get(column).copied()
    }

    /// The nodes with CPUs, in order of their distance from `node`. Threads that work on a
    /// memory-only node run on the first of them.
    #[must_use]
    pub fn nearest_with_cpus(&self, node: NodeId) -> Vec<&NumaNode> {
        let mut nodes: Vec<&NumaNode> = self.nodes.iter().filter(|n| !n.cpus.is_empty()).collect();
        nodes.sort_by_key(|candidate| {
            (candidate.id != node, self.distance(node, candidate.id).unwrap_or(u32::MAX))
        });
        nodes
    }

    /// The node of a PCI device. `None` if sysfs does not know the device or its node.
    #[must_use]
    pub fn node_of_pci_device(&self, address: PciAddress) -> Option<NodeId> {
        let path = self.root.join(format!("bus/pci/devices/{address}/numa_node"));
        // The value is −1 if the firmware does not report the node.
        fs::read_to_string(path).ok()?.trim().parse().ok().map(NodeId::new)
    }
}

/// The reason why the topology could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyGap {
    /// A file of sysfs could not be read.
    #[error("{path:?} cannot be read, so one NUMA node is assumed; mount sysfs")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// A file of sysfs does not contain a list.
    #[error(
        "{path:?} has no list of numbers, so one NUMA node is assumed; mount the kernel's sysfs"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
}

fn read_list(path: &Path) -> Result<Vec<u32>, TopologyGap> {
    let text = fs::read_to_string(path).map_err(|error| TopologyGap::Unreadable {
        path: path.to_owned(),
        source: OsError::from_io("read", &error),
    })?;
    parse_list(&text).ok_or_else(|| TopologyGap::Malformed { path: path.to_owned() })
}

/// Reads one node from sysfs. Missing values stay empty; the node is kept.
fn read_node(directory: &Path, number: u32) -> NumaNode {
    let directory = directory.join(format!("node{number}"));
    let distances = fs::read_to_string(directory.join("distance")).ok().and_then(|text| {
        text.split_ascii_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<u32>>>()
    });
    NumaNode {
        id: NodeId::new(number),
        cpus: read_list(&directory.join("cpulist")).unwrap_or_default(),
        memory: fs::read_to_string(directory.join("meminfo")).ok().and_then(|t| total_of(&t)),
        distances: distances.unwrap_or_default(),
    }
}

/// The total in a node's `meminfo`. The lines have the form `Node 0 MemTotal:   24548580 kB`.
fn total_of(meminfo: &str) -> Option<ByteCount> {
    let line = meminfo.lines().find(|line| line.contains("MemTotal:"))?;
    let kib: u64 = line.split_ascii_whitespace().rev().nth(1)?.parse().ok()?;
    kib.checked_mul(1024).map(ByteCount::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Two sockets and a memory-only node, with a gap in the numbers.
    fn fixture() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let node = "devices/system/node";
        write(root, &format!("{node}/online"), "0-1,4\n");
        for (number, cpus, distance) in [
            (0, "0-3,8-11\n", "10 21 14\n"),
            (1, "4-7,12-15\n", "21 10 24\n"),
            (4, "\n", "14 24 10\n"),
        ] {
            write(root, &format!("{node}/node{number}/cpulist"), cpus);
            write(root, &format!("{node}/node{number}/distance"), distance);
            let meminfo =
                format!("Node {number} MemTotal:       1048576 kB\nNode {number} MemFree: 1 kB\n");
            write(root, &format!("{node}/node{number}/meminfo"), &meminfo);
        }
        write(root, "bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
        write(root, "bus/pci/devices/0000:00:1f.0/numa_node", "-1\n");
        directory
    }

    #[test]
    fn a_memory_only_node_is_a_node() {
        let fixture = fixture();
        let topology = NumaTopology::read_from(fixture.path());
        assert_eq!(topology.gap(), None);
        let ids: Vec<u32> = topology.nodes().iter().map(|node| node.id.get()).collect();
        assert_eq!(ids, [0, 1, 4]);
        let memory_only = topology.node(NodeId::new(4)).unwrap();
        assert_eq!(memory_only.cpus, [0_u32; 0]);
        assert_eq!(memory_only.memory, Some(ByteCount::gib(1)));
        assert_eq!(topology.nodes()[0].cpus, [0, 1, 2, 3, 8, 9, 10, 11]);
        let nearest = topology.nearest_with_cpus(NodeId::new(4));
        assert_eq!(nearest.iter().map(|n| n.id.get()).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(topology.nearest_with_cpus(NodeId::new(1))[0].id, NodeId::new(1));
    }

    #[test]
    fn distances_are_indexed_by_position_not_by_number() {
        let topology = fixture();
        let topology = NumaTopology::read_from(topology.path());
        assert_eq!(topology.distance(NodeId::new(4), NodeId::new(0)), Some(14));
        assert_eq!(topology.distance(NodeId::new(1), NodeId::new(4)), Some(24));
        assert_eq!(topology.distance(NodeId::new(1), NodeId::new(2)), None);
    }

    #[test]
    fn devices_are_found_by_either_length_of_domain() {
        let fixture = fixture();
        let topology = NumaTopology::read_from(fixture.path());
        for address in ["0000:3b:00.0", "00000000:3B:00.0"] {
            let address = address.parse().unwrap();
            assert_eq!(topology.node_of_pci_device(address), Some(NodeId::new(1)));
        }
        assert_eq!(topology.node_of_pci_device("0000:00:1f.0".parse().unwrap()), None);
        assert_eq!(topology.node_of_pci_device("0000:ff:1f.0".parse().unwrap()), None);
    }

    #[test]
    fn without_sysfs_there_is_one_node_and_a_reason() {
        let empty = tempfile::tempdir().unwrap();
        let topology = NumaTopology::read_from(empty.path());
        assert_eq!(topology.nodes().len(), 1);
        assert!(!topology.nodes()[0].cpus.is_empty());
        assert!(matches!(topology.gap(), Some(TopologyGap::Unreadable { .. })));

        write(empty.path(), "devices/system/node/online", "all of them\n");
        let topology = NumaTopology::read_from(empty.path());
        assert!(matches!(topology.gap(), Some(TopologyGap::Malformed { .. })));
    }

    #[test]
    fn a_node_with_only_a_number_is_kept() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "devices/system/node/online", "0-1\n");
        write(root.path(), "devices/system/node/node0/cpulist", "0\n");
        let topology = NumaTopology::read_from(root.path());
        assert_eq!(topology.nodes().len(), 2);
        assert_eq!(topology.nodes()[1].memory, None);
    }
}
