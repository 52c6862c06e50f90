//! Both allocators pass the conformance suite.

use terrane_core::{Alignment, Requirement};
use terrane_storage::{
    DiskAllocator, DiskOptions, FirstTouch, HugePageSize, HugePages, SystemAllocator, SystemOptions,
};
use terrane_testkit::conformance::{AllocatorFixture, check_allocator};

struct System(SystemOptions);

impl AllocatorFixture for System {
    type Allocator = SystemAllocator;

    fn allocator(&self) -> SystemAllocator {
        SystemAllocator::new(self.0.clone())
    }

    fn strictest_alignment(&self) -> Alignment {
        Alignment::new(1 << 30).unwrap()
    }

    /// The kernel counts the mappings of the whole process, and other tests map memory too.
    fn live(&self, _: &SystemAllocator) -> Option<u64> {
        None
    }
}

#[test]
fn system_memory() {
    for huge_pages in [HugePages::None, HugePages::default()] {
        for first_touch in [FirstTouch::None, FirstTouch::AllCpus] {
            let options = SystemOptions { huge_pages, first_touch, ..SystemOptions::default() };
            check_allocator(&System(options));
        }
    }
}

/// Without explicit huge pages, this tests the pages that replace them.
#[test]
fn explicit_huge_pages() {
    let huge_pages = HugePages::Explicit(HugePageSize::Mib2, Requirement::Preferred);
    check_allocator(&System(SystemOptions { huge_pages, ..SystemOptions::default() }));
}

struct Disk {
    directory: tempfile::TempDir,
    options: DiskOptions,
}

impl AllocatorFixture for Disk {
    type Allocator = DiskAllocator;

    fn allocator(&self) -> DiskAllocator {
        DiskAllocator::new(self.directory.path(), self.options).unwrap()
    }

    fn strictest_alignment(&self) -> Alignment {
        Alignment::new(1 << 30).unwrap()
    }

    /// The number of descriptors of files in the directory, unlinked or not, and of its names.
    fn live(&self, _: &DiskAllocator) -> Option<u64> {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
            // Other tests close their files concurrently.
            std::fs::read_link(entry.unwrap().path()).ok()
        });
        let open = open.filter(|target| target.starts_with(self.directory.path())).count();
        let names = std::fs::read_dir(self.directory.path()).unwrap().count();
        Some(u64::try_from(open + names).unwrap())
    }
}

#[test]
fn disk_files() {
    for requirement in [Requirement::Preferred, Requirement::Off] {
        let options = DiskOptions {
            direct: requirement,
            preallocate: requirement,
            unnamed: requirement,
            ..DiskOptions::default()
        };
        check_allocator(&Disk { directory: tempfile::tempdir().unwrap(), options });
    }
}
