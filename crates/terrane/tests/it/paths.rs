//! Uses every public path of the facade once. If a path moves, this file does not compile.

use std::path::Path;

#[test]
fn core() {
    let _: fn(&'static str) -> terrane::core::Label = terrane::core::Label::from;
    let request = terrane::core::RegionRequest::new(terrane::core::ByteCount::kib(1));
    assert_eq!(request.alignment, terrane::core::Alignment::BYTE);
    let span = |memory: &dyn terrane::core::Memory| terrane::core::Span::of(memory).length;
    let system = terrane::storage::SystemAllocator::new(terrane::storage::SystemOptions::default());
    let memory = terrane::core::Allocate::allocate(&system, &request).unwrap();
    assert!(span(&memory) >= terrane::core::ByteCount::kib(1));
}

#[test]
fn layout() {
    let config: terrane::layout::LayoutConfig = config();
    let limits = terrane::core::Limits::NONE;
    let kind = terrane::layout::LayoutKind::FullyContiguous;
    let plan = terrane::layout::LayoutPlan::new(&config, kind, limits).unwrap();
    let found = terrane::layout::verify(plan.geometry(), &[plan.base_bytes()]).unwrap();
    assert_eq!(found.pieces, 4 * 2 * 2);
    let _: fn(terrane::layout::state::NeedsKind) = drop;
}

#[cfg(feature = "model-config")]
#[test]
fn layout_model() {
    let options = terrane::layout::model::ModelOptions::new();
    let error = terrane::layout::model::ModelGeometry::from_json("{}", &options).unwrap_err();
    assert!(matches!(error, terrane::layout::LayoutError::Model(_)), "{error}");
}

#[test]
fn storage() {
    let options = terrane::storage::IoQueueOptions::default();
    let queue = terrane::storage::IoQueue::new(&options).unwrap();
    assert_eq!(queue.in_flight(), 0);
    let nowhere = Path::new("/nonexistent");
    let error =
        terrane::storage::DiskAllocator::new(nowhere, terrane::storage::DiskOptions::default())
            .unwrap_err();
    assert!(matches!(error, terrane::storage::StorageError::NotFound { .. }), "{error}");
}

#[test]
fn cuda() {
    let _: fn() -> Result<terrane::cuda::Availability, terrane::cuda::CudaError> =
        terrane::cuda::probe;
    let options = terrane::cuda::DeviceEngineOptions::default();
    assert_eq!(options.path, None::<terrane::cuda::CopyPath>);
    if let Err(reason) = terrane::cuda::Context::primary(terrane::core::DeviceId::new(0)) {
        assert!(!reason.to_string().is_empty());
    }
}

#[cfg(feature = "nixl")]
#[test]
fn nixl() {
    let _: fn() -> Result<terrane::nixl::NixlInstallation, terrane::nixl::NixlUnavailable> =
        terrane::nixl::probe;
    let builder = terrane::nixl::AgentBuilder::unnamed();
    let builder = builder.backend(terrane::nixl::BackendConfig::new("UCX"));
    let agent: terrane::nixl::Agent = builder.build().unwrap();
    let options = terrane::nixl::NixlEngineOptions::default();
    terrane::nixl::NixlEngine::new(&agent, options).unwrap();
}

#[test]
fn wire() {
    let bytes = b"what no peer sends";
    let limits = &terrane::wire::WireLimits::DEFAULT;
    assert!(terrane::wire::LayoutDescriptor::decode(bytes, limits).is_err());
}

#[cfg(feature = "arrow")]
#[test]
fn arrow() {
    use terrane::arrow::arrays::abi::{ArrowSchema, Released};
    let mut released = ArrowSchema::EMPTY;
    // SAFETY: a released schema may be passed.
    let refused = unsafe { terrane::arrow::arrays::import_field(&raw mut released) };
    assert!(matches!(refused, Err(terrane::arrow::arrays::ImportError::Released { .. })));
    let error = terrane::arrow::columns::ColumnError::TooMany { what: "rows", limit: 1 };
    assert!(error.to_string().contains("rows"), "{error}");
}

#[test]
fn interop() {
    use terrane::interop::dlpack::{ElementType, ImportError, Importer, TensorShape};
    let shape = TensorShape::compact(ElementType::BF16, &[2, 3]).unwrap();
    assert_eq!(shape.bytes(), terrane::core::ByteCount::new(12));
    // SAFETY: null may be passed.
    let refused = unsafe { Importer::new().versioned(std::ptr::null_mut()) };
    assert!(matches!(refused, Err(ImportError::NullTensor)));
    let form = terrane::interop::tensors::KvAxisOrder::VLLM;
    assert!(form.has_outer());
}

#[test]
fn transfer() {
    let manager = terrane::transfer::TransferManager::with_default_engines().unwrap();
    let names: Vec<_> = manager.engines().iter().map(|engine| engine.name()).collect();
    assert_eq!(names, ["host", "disk"]);
    let options = terrane::transfer::engines::HostEngineOptions::default();
    assert!(options.threads.get() >= 1);
    let _: fn(terrane::transfer::TransferError) = drop;
}

/// Uses all of the prelude, from a config to a completion.
#[test]
fn prelude() {
    use terrane::prelude::*;

    let system = SystemAllocator::new(SystemOptions {
        huge_pages: HugePages::Transparent(Requirement::Preferred),
        ..SystemOptions::default()
    });
    let directory = tempfile::tempdir().unwrap();
    let disk = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let host: PhysicalLayout = LayoutBuilder::new(config())
        .layer_separate(BlockDimension::First)
        .allocate(&system)
        .unregistered()
        .build()
        .unwrap();
    let file = LayoutBuilder::new(config())
        .kind(LayoutKind::FullyContiguous)
        .allocate(&disk)
        .unregistered()
        .build()
        .unwrap();
    assert_eq!(
        (host.storage_kind(), file.storage_kind()),
        (StorageKind::System, StorageKind::Disk)
    );
    let regions: &[Region] = host.regions();
    assert!(regions.iter().all(|region| region.length() > ByteCount::ZERO));
    let (host, file) = (Endpoint::new(host).unwrap(), Endpoint::new(file).unwrap());
    let manager = TransferManager::with_default_engines().unwrap();
    let transfer =
        Transfer::new(&host, &file).blocks(&[0, 3], &[2, 1]).durability(Durability::Data);
    let completion: Completion<&str> = manager.submit(transfer, "guard").unwrap();
    let ticket: Ticket = completion.ticket();
    let Outcome { guard, result } = completion.wait();
    assert_eq!(guard, "guard");
    assert_eq!(result.unwrap().explanation.pieces, 8);
    assert!(ticket.has_ended());
    let _ = Alignment::PAGE;
    let _: fn(&Context, DeviceEngineOptions) -> Result<DeviceEngine, CudaError> = DeviceEngine::new;
    let _: fn(&Context) -> DeviceAllocator = DeviceAllocator::new;
    let _: fn(&Context, PinnedOptions) -> Result<PinnedAllocator, CudaError> = PinnedAllocator::new;
}

fn config() -> terrane::layout::LayoutConfig {
    terrane::layout::LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(2)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(64)
        .element(terrane::layout::ElementFormat::Width(2))
        .build()
        .unwrap()
}

#[test]
fn pool() {
    let system = terrane::storage::SystemAllocator::new(terrane::storage::SystemOptions::default());
    let options = terrane::pool::PoolOptions::default();
    let pool = terrane::pool::Pool::new(system, options).unwrap();
    let request = terrane::core::RegionRequest::new(terrane::core::ByteCount::kib(64));
    let block = terrane::core::Allocate::allocate(&pool, &request).unwrap();
    assert!(terrane::core::Memory::length(&block) >= terrane::core::ByteCount::kib(64));
}
