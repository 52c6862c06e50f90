//! Exports of an endpoint's blocks, and the transfers that conflict with them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use terrane_core::{Alignment, ByteCount, Location, Memory, StorageKind};
use terrane_interop::dlpack::{
    ElementType, ExportError, ImportedTensor, Importer, ManagedTensor, TensorExport, TensorShape,
};
use terrane_interop::tensors::{KvAxisOrder, kv_tensors};
use terrane_layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
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
    let tensor = piece(Access::Read).unwrap().into_versioned().unwrap();
    // Other users may also read the block, but not write it.
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
fn a_transfer_runs_after_the_tensor_whose_ticket_it_names() {
    let allocator = HeapAllocator::system();
    let (exported, other) = (endpoint(&allocator), endpoint(&allocator));
    let manager = manager();
    let element = ElementType::BF16;
    let piece = TensorExport::of_piece(&exported, (2, 1, 0), element, Access::Read).unwrap();
    let block = TensorExport::of_block(&exported, 1, element, Access::Write).unwrap();
    let tickets = [piece.ticket().unwrap(), block[0].ticket().unwrap()];
    let tensors = [piece].into_iter().chain(block);
    let mut tensors: Vec<_> = tensors.map(|export| export.into_versioned().unwrap()).collect();
    let transfer = Transfer::new(&other, &exported).blocks(&[0, 3], &[2, 1]);
    let completion = manager.submit(transfer.after(&tickets[0]).after(&tickets[1]), ()).unwrap();
    while let Some(tensor) = tensors.pop() {
        assert!(!completion.ticket().has_ended(), "a consumer has the blocks");
        drop(tensor);
    }
    completion.wait().result.unwrap();
    assert!(tickets.iter().all(terrane_transfer::Ticket::has_ended));
    let region = exported.layout().regions()[0].clone();
    let shape = TensorShape::compact(element, &[8]).unwrap();
    // SAFETY: nothing is exported.
    assert!(unsafe { TensorExport::new(region, shape) }.unwrap().ticket().is_none());
}

#[test]
fn buffers_do_not_move_during_a_write() {
    let allocator = HeapAllocator::system();
    let (exported, other) = (endpoint(&allocator), endpoint(&allocator));
    let manager = manager();
    let export = TensorExport::of_region(&exported, 0, ElementType::U8, Access::Write).unwrap();
    // Legacy tensors cannot be read-only, but this one is writable.
    let tensor = export.into_legacy().unwrap();
    let out = || Transfer::new(&exported, &other).blocks(&[3], &[0]);
    assert!(is_conflict(&manager.submit(out(), ()).unwrap_err().cause));
    // The consumer calls the deleter on its own thread.
    let thread = std::thread::Builder::new().spawn(move || drop(tensor)).unwrap();
    thread.join().unwrap();
    manager.submit(out(), ()).unwrap().wait().result.unwrap();
}

#[test]
fn an_export_keeps_other_endpoints_from_its_bytes_when_its_own_is_dropped() {
    let allocator = HeapAllocator::system();
    let exported = endpoint(&allocator);
    let regions = exported.layout().regions().to_vec();
    let again = || {
        let builder = LayoutBuilder::new(config()).fully_contiguous().adopt(regions.clone());
        Endpoint::new(builder.unregistered().build().unwrap())
    };
    let piece = TensorExport::of_piece(&exported, (2, 1, 0), ElementType::BF16, Access::Read);
    let all = kv_tensors(&exported, &KvAxisOrder::VLLM, ElementType::BF16, Access::Read).unwrap();
    let exports = std::iter::once(piece.unwrap()).chain(all);
    let mut tensors: Vec<_> = exports.map(|export| export.into_versioned().unwrap()).collect();
    drop(exported);
    while !tensors.is_empty() {
        assert!(again().is_err(), "its transfers would not know of the tensors that are out");
        // The consumer calls one deleter.
        drop(tensors.pop());
    }
    drop(again().unwrap());
}

#[test]
fn kv_tensors_hold_all_blocks_until_the_last_has_gone() {
    let allocator = HeapAllocator::system();
    let exported = endpoint(&allocator);
    let mut tensors =
        kv_tensors(&exported, &KvAxisOrder::VLLM, ElementType::BF16, Access::Write).unwrap();
    assert_eq!(tensors.len(), 2);
    assert!(is_conflict(&exported.hold_for_read(&[0]).unwrap_err()));
    drop(tensors.pop());
    assert!(exported.hold_for_read(&[0]).is_err());
    drop(tensors);
    drop(exported.hold_for_write(&[0]).unwrap());
    drop(exported);
    assert_eq!(allocator.live(), 0);
}

/// The tensors' strides result in the same address for each piece as the geometry.
#[test]
fn blocks_and_layouts_have_their_pieces_where_the_geometry_has_them() {
    let separate = |block_dimension| LayoutKind::LayerSeparate { block_dimension };
    for kind in [
        LayoutKind::FullyContiguous,
        separate(BlockDimension::First),
        separate(BlockDimension::Second),
    ] {
        for padded in [Alignment::BYTE, Alignment::SECTOR] {
            let allocator = HeapAllocator::system();
            let config = config().with_block_alignment(padded).unwrap();
            let builder = LayoutBuilder::new(config).kind(kind).allocate(&allocator);
            let end = Endpoint::new(builder.unregistered().build().unwrap()).unwrap();
            let layout = end.layout();
            let address = |block, layer, outer| {
                let at = layout.geometry().offset(block, layer, outer);
                let region = &layout.regions()[usize::try_from(at.region).unwrap()];
                region.view(ByteCount::new(at.offset), ByteCount::new(1)).unwrap().location()
            };
            let all = TensorExport::of_layout(&end, ElementType::BF16, Access::Read).unwrap();
            let imported: Vec<_> = all.into_iter().map(back).collect();
            let layers = 2 / imported.len();
            for tensor in &imported {
                let elements = i64::try_from(config.block_bytes().get()).unwrap() / 8;
                let layers = i64::try_from(layers).unwrap();
                assert_eq!(tensor.shape().sizes(), [4, layers, 2, elements], "{kind:?}");
                assert!(tensor.is_read_only());
            }
            for block in 0..4 {
                let one = TensorExport::of_block(&end, block, ElementType::BF16, Access::Read);
                let one: Vec<_> = one.unwrap().into_iter().map(back).collect();
                assert_eq!(one.len(), imported.len());
                for (layer, outer) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let (number, within) = (layer / layers, layer % layers);
                    let place = [within, outer].map(|index| i64::try_from(index).unwrap());
                    let expected = address(
                        block,
                        u32::try_from(layer).unwrap(),
                        u32::try_from(outer).unwrap(),
                    );
                    assert_eq!(element(&one[number], &place), expected, "{kind:?}");
                    let [within, outer] = place;
                    let place = [i64::from(block), within, outer];
                    assert_eq!(element(&imported[number], &place), expected, "{kind:?}");
                }
            }
        }
    }
}

/// The location of the two-byte element at these indices, with zeros for the remaining axes.
fn element(tensor: &ImportedTensor, indices: &[i64]) -> Location {
    let steps = indices.iter().zip(tensor.shape().strides());
    let elements: i64 = steps.map(|(index, stride)| index * stride).sum();
    let bytes = ByteCount::new(u64::try_from(2 * elements).unwrap());
    tensor.location().checked_add(bytes).unwrap()
}

fn back(export: TensorExport) -> ImportedTensor {
    let tensor = export.into_versioned().unwrap().into_raw();
    // SAFETY: it was created above, and no code writes the bytes.
    unsafe { Importer::new().versioned(tensor.as_ptr()) }.unwrap()
}

#[test]
fn a_block_is_held_until_the_last_of_its_tensors_has_gone() {
    let allocator = HeapAllocator::system();
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
    let builder = LayoutBuilder::new(config()).kind(kind).allocate(&allocator);
    let end = Endpoint::new(builder.unregistered().build().unwrap()).unwrap();
    let mut tensors = TensorExport::of_block(&end, 1, ElementType::U8, Access::Write).unwrap();
    assert_eq!(tensors.len(), 2, "one a layer");
    assert!(!tensors[0].is_read_only());
    drop(end.hold_for_write(&[0, 2, 3]).unwrap());
    for _ in 0..2 {
        assert!(is_conflict(&end.hold_for_read(&[1]).unwrap_err()));
        drop(tensors.pop());
    }
    drop(end.hold_for_write(&[1]).unwrap());
}

#[test]
fn a_tensor_that_no_consumer_took_is_taken_back() {
    let end = endpoint(&HeapAllocator::system());
    let export = TensorExport::of_block(&end, 1, ElementType::U8, Access::Write).unwrap();
    for tensor in export {
        let tensor = tensor.into_legacy().unwrap().into_raw();
        assert!(is_conflict(&end.hold_for_read(&[1]).unwrap_err()));
        // SAFETY: it was returned just now, and no other code has it.
        drop(unsafe { ManagedTensor::from_raw(tensor) });
    }
    drop(end.hold_for_write(&[1]).unwrap());
}

#[test]
fn invalid_exports_are_refused_and_release_their_holds() {
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
    assert!(matches!(beyond, ExportError::NoRegion { region: 1, regions: 1 }), "{beyond}");
    let beyond = TensorExport::of_block(&end, 4, ElementType::U8, Access::Read).unwrap_err();
    assert!(matches!(beyond, ExportError::Layout(_)), "{beyond}");
    let beyond = TensorExport::of_layout(&end, three, Access::Read).unwrap_err();
    assert!(matches!(beyond, ExportError::NotWhole { .. }), "{beyond}");
    let export = TensorExport::of_piece(&end, (0, 0, 0), ElementType::U8, Access::Read).unwrap();
    assert!(matches!(export.into_legacy(), Err(ExportError::LegacyReadOnly)));
    drop(end.hold_for_write(&[0, 1, 2, 3]).unwrap());

    let large = TensorShape::compact(ElementType::U8, &[1 << 20]).unwrap();
    let region = end.layout().regions()[0].clone();
    // SAFETY: nothing is exported.
    let refused = unsafe { TensorExport::new(region.clone(), large) }.unwrap_err();
    assert!(matches!(refused, ExportError::OutOfBounds(_)));
    let odd = region.view(ByteCount::new(1), ByteCount::new(8)).unwrap();
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
    let tensor = export.guarded_by(Panics).into_versioned().unwrap();
    catch_unwind(AssertUnwindSafe(|| drop(tensor))).unwrap();
    // The blocks are free again, and the memory is freed with its last user.
    drop(end.hold_for_write(&[0]).unwrap());
    drop(end);
    assert_eq!(allocator.live(), 0);
}
