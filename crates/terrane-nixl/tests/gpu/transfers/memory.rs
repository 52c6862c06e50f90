//! Memory of a device and of another process.

use terrane_cuda::{DeviceAllocator, PinnedAllocator, PinnedOptions};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_transfer::DeviceOrder;

use super::SOME;
use crate::machine::device;
use crate::needs::OnDevice;
use crate::processes::{CONTIGUOUS, SEPARATE, exchange_with_process};

/// A stream wrote the bytes, and the host has waited for it.
const ORDER: Option<DeviceOrder> = Some(DeviceOrder::AlreadySynchronised);

#[test]
fn device_memory_is_written_and_read_by_another_process() {
    const TEST: &str = "transfers::memory::device_memory_is_written_and_read_by_another_process";
    let Some(context) = device(TEST, SOME) else { return };
    let memory = DeviceAllocator::new(&context);
    let ends = ((&memory, SEPARATE), (&memory, SEPARATE));
    exchange_with_process(TEST, ends.0, ends.1, &OnDevice::new(&context), ORDER);
}

#[test]
fn blocks_of_a_device_go_to_pinned_memory_of_another_process() {
    const TEST: &str =
        "transfers::memory::blocks_of_a_device_go_to_pinned_memory_of_another_process";
    let Some(context) = device(TEST, SOME) else { return };
    let memory = DeviceAllocator::new(&context);
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let ends = ((&memory, SEPARATE), (&pinned, CONTIGUOUS));
    exchange_with_process(TEST, ends.0, ends.1, &OnDevice::new(&context), ORDER);
}

#[test]
fn blocks_of_a_device_go_to_system_memory_of_another_process() {
    const TEST: &str =
        "transfers::memory::blocks_of_a_device_go_to_system_memory_of_another_process";
    let Some(context) = device(TEST, SOME) else { return };
    let memory = DeviceAllocator::new(&context);
    let system = SystemAllocator::new(SystemOptions::default());
    let ends = ((&memory, SEPARATE), (&system, SEPARATE));
    exchange_with_process(TEST, ends.0, ends.1, &OnDevice::new(&context), ORDER);
}
