//! Blocks of an endpoint that a job refuses, or that a get did not write completely.

use std::path::Path;

use terrane_store::{BlockGroup, BlockResult, Blocks, JobOptions, Store};
use terrane_transfer::{Endpoint, Transfer, TransferError, TransferManager};

use super::harness::{assert_at_rest, damage_byte, disk, keys, namespace};
use super::memory_tiers::{engine_layout, fill};

/// The bytes of a slot for these blocks.
fn slot_bytes(engine: &Endpoint) -> u64 {
    engine.layout().geometry().block_bytes().get().next_multiple_of(4096)
}

fn store_for(engine: &Endpoint, directory: &Path) -> Store {
    let (store, _) = Store::builder()
        .group(BlockGroup::of_layout("kv", engine.layout()))
        .disk(disk(directory, 8 * slot_bytes(engine)))
        .namespace(namespace())
        .open()
        .unwrap();
    store
}

#[test]
fn a_block_whose_read_failed_is_incomplete_until_it_is_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Endpoint::new(engine_layout(16)).unwrap();
    let store = store_for(&engine, directory.path());
    let put = |numbers: std::ops::Range<u32>| {
        let ids: Vec<u32> = numbers.clone().collect();
        let numbers = numbers.start as usize..numbers.end as usize;
        numbers.clone().zip(&ids).for_each(|(number, &block)| fill(&engine, block, number));
        let source = Blocks::new(&engine, &ids);
        assert!(store.put(&keys(numbers), source, JobOptions::new(), ()).unwrap().wait().is_ok());
    };
    let get = || {
        let to = Blocks::new(&engine, &[8, 9, 10]);
        store.get(&keys(0..3), to, JobOptions::new(), ()).unwrap().wait().results
    };
    put(0..3);
    damage_byte(directory.path(), 1, slot_bytes(&engine), 100);

    use BlockResult::{Corrupt, Done};
    assert!(matches!(get()[..], [Done { .. }, Corrupt, Done { .. }]));
    let manager = TransferManager::with_default_engines().unwrap();
    let copy = || {
        let transfer = Transfer::new(&engine, &engine).blocks(&[8, 9, 10], &[12, 13, 14]);
        manager.submit(transfer, ()).map_err(|rejected| rejected.cause)
    };
    let error = copy().unwrap_err();
    assert!(matches!(&error, TransferError::Incomplete { blocks } if *blocks == [9]), "{error}");
    put(1..2);
    assert!(get().iter().all(BlockResult::is_ok));
    copy().unwrap().wait().result.unwrap();
    assert_at_rest(&store);
}

#[test]
fn a_block_that_an_endpoint_lacks_is_refused_with_its_number_of_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Endpoint::new(engine_layout(16)).unwrap();
    let store = store_for(&engine, directory.path());
    let refusal = |blocks: Blocks| {
        let rejected = store.put(&keys(0..1), blocks, JobOptions::new(), ()).unwrap_err();
        rejected.cause.to_string()
    };
    let whole = refusal(Blocks::new(&engine, &[16]));
    assert!(
        whole.starts_with("block 16 is not within the endpoint, which has 16 blocks"),
        "{whole}"
    );
    let part = refusal(Blocks::new(&engine, &[3]).tokens(&[9999]));
    assert!(part.starts_with("block 3 with 9999 tokens is not within"), "{part}");
}
