//! Prefill and decode, each a process, with memory of the host.

use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::InProcess;

#[path = "../common/processes.rs"]
mod shared;

use shared::{CONTIGUOUS, SEPARATE, there_and_back};

#[test]
fn blocks_are_written_to_another_process_and_read_from_it() {
    const TEST: &str = "processes::blocks_are_written_to_another_process_and_read_from_it";
    let system = SystemAllocator::new(SystemOptions::default());
    there_and_back(TEST, (&system, SEPARATE), (&system, SEPARATE), &InProcess, None);
}

#[test]
fn processes_need_not_lay_their_blocks_out_alike() {
    const TEST: &str = "processes::processes_need_not_lay_their_blocks_out_alike";
    let system = SystemAllocator::new(SystemOptions::default());
    let heap = HeapAllocator::system();
    there_and_back(TEST, (&system, SEPARATE), (&heap, CONTIGUOUS), &InProcess, None);
}
