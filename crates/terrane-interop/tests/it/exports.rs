//! Exports of an endpoint's blocks, and the transfers that would come in their way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use terrane_core::StorageKind;
use terrane_interop::dlpack::{ElementType, ExportError, TensorExport, TensorShape};
use terrane_interop::tensors::{KvForm, kv_tensors};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{HostEngine, HostEngineOptions};
use terrane_transfer::{Access, Endpoint, Transfer, TransferError, TransferManager};

fn config() -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(2).outer_dim(2).page_size(4);
    config.inner_dim(16).num_heads(2).element(ElementFormat::Width(2)).build().unwrap()
}

fn endpoint(allocator: &HeapAllocator) -> Endpoint {
    let builder = LayoutBuilder::new(config()).fully_contiguous().allocate(allocator);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

fn manager() -> TransferManager {
    TransferManager::new([Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap()) as _])
}

fn is_conflict(error: &TransferError) -> bool {
    matches!(error, TransferError::Conflict { conflicts } if !conflicts.is_empty())
}

#[test]
fn nothing_is_written_under_a_reader() {
    let allocator = HeapAllocator::system();
    let (exported, other) = (endpoint(&allocator), endpoint(&allocator));
    let manager = manager();
    let piece = |access| TensorExport::of_piece(&exported, (2, 1, 0), ElementType::BF16, access);
    let tensor = piece(Access::Read).unwrap().into_versioned();
    // Others may read as well; nobody may write.
    let second = piece(Access::Read).unwrap();
    assert!(matches!(piece(Access::Write), Err(ExportError::Held(error)) if is_conflict(&error)));
    let into = || Transfer::new(&other, &exported).blocks(&[0], &[2]);
    assert!(is_conflict(&manager.submit(into(), ()).unwrap_err().cause));
    let out = Transfer::new(&exported, &other).blocks(&[2], &[0]);
    manager.submit(out, ()).unwrap().wait().result.unwrap();

    drop((tensor, second));
    manager.submit(into(), ()).unwrap().wait().result.unwrap();
}

#[test]
fn nothing_moves_under_a_writer() {
    let allocator = HeapAllocator::system();
    let (exported, other) = (endpoint(&allocator), endpoint(&allocator));
    let manager = manager();
    let export = TensorExport::of_region(&exported, 0, ElementType::U8, Access::Write).unwrap();
    // Legacy tensors cannot say that they are read-only, and this one is not.
    let tensor = export.into_legacy().unwrap();
    let out = || Transfer::new(&exported, &other).blocks(&[3], &[0]);
    assert!(is_conflict(&manager.submit(out(), ()).unwrap_err().cause));
    // The consumer calls the deleter on a thread of its own.
    let thread = std::thread::Builder::new().spawn(move || drop(tensor)).unwrap();
    thread.join().unwrap();
    manager.submit(out(), ()).unwrap().wait().result.unwrap();
}

#[test]
fn kv_tensors_hold_all_blocks_until_the_last_has_gone() {
    let allocator = HeapAllocator::system();
    let exported = endpoint(&allocator);
    let mut tensors =
        kv_tensors(&exported, &KvForm::VLLM, ElementType::BF16, Access::Write).unwrap();
    assert_eq!(tensors.len(), 2);
    assert!(is_conflict(&exported.hold_for_read(&[0]).unwrap_err()));
    drop(tensors.pop());
    assert!(exported.hold_for_read(&[0]).is_err());
    drop(tensors);
    drop(exported.hold_for_write(&[0]).unwrap());
    drop(exported);
    assert_eq!(allocator.live(), 0);
}

#[test]
fn what_cannot_be_a_tensor_is_refused_and_nothing_stays_held() {
    let allocator = HeapAllocator::system();
    let end = endpoint(&allocator);
    let piece =
        |at, element, access| TensorExport::of_piece(&end, at, element, access).unwrap_err();
    let refused = piece((4, 0, 0), ElementType::U8, Access::Read);
    assert!(matches!(refused, ExportError::Layout(_)), "{refused}");
    let three = ElementType::new(terrane_interop::dlpack::TypeCode::UInt, 24, 1).unwrap();
    let refused = piece((0, 0, 0), three, Access::Read);
    assert!(matches!(refused, ExportError::NotWhole { .. }), "{refused}");
    let beyond = TensorExport::of_region(&end, 1, ElementType::U8, Access::Read).unwrap_err();
    assert!(matches!(beyond, ExportError::OutOfBounds(_)), "{beyond}");
    let export = TensorExport::of_piece(&end, (0, 0, 0), ElementType::U8, Access::Read).unwrap();
    assert!(matches!(export.into_legacy(), Err(ExportError::LegacyReadOnly)));
    drop(end.hold_for_write(&[0, 1, 2, 3]).unwrap());

    let large = TensorShape::compact(ElementType::U8, &[1 << 20]).unwrap();
    let region = end.layout().regions()[0].clone();
    // SAFETY: nothing is handed out.
    let refused = unsafe { TensorExport::new(region.clone(), large) }.unwrap_err();
    assert!(matches!(refused, ExportError::OutOfBounds(_)));
    let odd =
        region.view(terrane_core::ByteCount::new(1), terrane_core::ByteCount::new(8)).unwrap();
    let eight = TensorShape::compact(ElementType::I64, &[1]).unwrap();
    // SAFETY: as above.
    let refused = unsafe { TensorExport::new(odd, eight) }.unwrap_err();
    assert!(matches!(refused, ExportError::Misaligned { .. }), "{refused}");
}

#[test]
fn files_are_no_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(folder.path(), DiskOptions::default()).unwrap();
    let builder = LayoutBuilder::new(config()).kind(LayoutKind::FullyContiguous).allocate(&files);
    let end = Endpoint::new(builder.unregistered().build().unwrap()).unwrap();
    let refused = TensorExport::of_piece(&end, (0, 0, 0), ElementType::U8, Access::Read);
    assert!(matches!(refused, Err(ExportError::NoDevice { kind: StorageKind::Disk })));
}

#[test]
fn a_guard_that_panics_ends_at_the_deleter() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("expected: a guard that panics");
        }
    }
    let allocator = HeapAllocator::system();
    let end = endpoint(&allocator);
    let export = TensorExport::of_piece(&end, (0, 0, 0), ElementType::U8, Access::Read).unwrap();
    let tensor = export.guarded_by(Panics).into_versioned();
    catch_unwind(AssertUnwindSafe(|| drop(tensor))).unwrap();
    // What was held is free, and the memory goes with its last user.
    drop(end.hold_for_write(&[0]).unwrap());
    drop(end);
    assert_eq!(allocator.live(), 0);
}
