//! Prefill and decode in two processes, with host memory.

use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::InProcess;

#[path = "../common/processes.rs"]
mod shared;

use shared::{CONTIGUOUS, SEPARATE, exchange_with_process};

#[test]
fn blocks_are_written_to_another_process_and_read_from_it() {
    const TEST: &str = "processes::blocks_are_written_to_another_process_and_read_from_it";
    let system = SystemAllocator::new(SystemOptions::default());
    exchange_with_process(TEST, (&system, SEPARATE), (&system, SEPARATE), &InProcess, None);
}

#[test]
fn processes_may_use_different_layouts() {
    const TEST: &str = "processes::processes_may_use_different_layouts";
    let system = SystemAllocator::new(SystemOptions::default());
    let heap = HeapAllocator::system();
    exchange_with_process(TEST, (&system, SEPARATE), (&heap, CONTIGUOUS), &InProcess, None);
}
