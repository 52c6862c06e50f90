//! Offloads and restores KV caches of other libraries.

use std::ffi::c_void;

use terrane_core::{Alignment, BoxedCause, DeviceId};
use terrane_cuda::{Context, EnginesOptions, PinnedAllocator, PinnedOptions, Stream, engines};
use terrane_interop::dlpack::{
    ConsumerStream, ElementType, ImportedTensor, ProducerStream, TensorDevice, handshake,
};
use terrane_interop::tensors::{KvAxisOrder, KvTensors, adopt_kv, kv_tensors};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, TokenOrder};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_transfer::{Access, Endpoint, Transfer, TransferManager};

use crate::calls::answer;
use crate::dlpack::{counted, importer};
use crate::live_counts::{LiveCount, Resource};

/// A cache, and its tensors.
#[repr(C)]
pub struct CacheRequest {
    /// 0: vLLM, 1: FlashInfer NHD, 2: FlashInfer HND, 3: SGLang (K, V, K, V, …), 4: vLLM latent,
    /// 5: SGLang latent.
    form: u32,
    num_blocks: u32,
    num_layers: u32,
    outer_dim: u32,
    page_size: u32,
    num_heads: u32,
    head_dim: u32,
    element_bytes: u32,
    /// 0: token-major, 1: head-major.
    token_order: u32,
    /// The number of blocks of the tier.
    tier_blocks: u32,
    /// A device's number, or −1 for the host.
    device: i32,
    /// 0: the tier is pinned memory (of a device) or system memory, 1: system memory in any case.
    plain_tier: u32,
}

/// A cache of another library, and a tier for it.
pub struct Cache {
    engine: Endpoint,
    tier: Endpoint,
    manager: TransferManager,
    context: Option<Context>,
    form: KvAxisOrder,
    _entry: LiveCount,
}

/// Imports the tensors of a cache, and creates a tier for it. It takes all tensors even if it
/// fails.
///
/// # Safety
///
/// `request` is valid. There are `count` structures of DLPack that the caller owns; one is legacy
/// if its number in `are_legacy` is not 0. `cache` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_cache(
    request: *const CacheRequest,
    tensors: *const *mut c_void,
    are_legacy: *const u8,
    count: usize,
    cache: *mut *mut Cache,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let request = unsafe { &*request };
        // SAFETY: the caller's promise.
        let tensors = unsafe { std::slice::from_raw_parts(tensors, count) };
        let (importer, found) = importer(request.device);
        // SAFETY: the caller's promise.
        let are_legacy = unsafe { std::slice::from_raw_parts(are_legacy, count) };
        // All are taken before any is checked, so that all are released.
        let tensors: Vec<_> = tensors
            .iter()
            .zip(are_legacy)
            .map(|(tensor, &is_legacy)| match is_legacy {
                // SAFETY: the caller's promise.
                0 => unsafe { importer.versioned(tensor.cast()) },
                // SAFETY: the caller's promise.
                _ => unsafe { importer.legacy(tensor.cast()) },
            })
            .collect();
        found?;
        let tensors = tensors.into_iter().collect::<Result<Vec<ImportedTensor>, _>>()?;
        let made = make(request, &tensors)?;
        // SAFETY: the caller's promise.
        unsafe { cache.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

fn make(request: &CacheRequest, tensors: &[ImportedTensor]) -> Result<Cache, BoxedCause> {
    let form = match request.form {
        0 => KvAxisOrder::VLLM,
        1 => KvAxisOrder::FLASHINFER_NHD,
        2 => KvAxisOrder::FLASHINFER_HND,
        3 => KvAxisOrder::SGLANG,
        4 => KvAxisOrder::VLLM_LATENT,
        _ => KvAxisOrder::SGLANG_LATENT,
    };
    let order = match request.token_order {
        0 => TokenOrder::TokenMajor,
        _ => TokenOrder::HeadMajor,
    };
    let inner = request.num_heads.checked_mul(request.head_dim).ok_or("too many elements")?;
    let config = LayoutConfig::builder()
        .num_blocks(request.num_blocks)
        .num_layers(request.num_layers)
        .outer_dim(request.outer_dim)
        .page_size(request.page_size)
        .inner_dim(inner)
        .num_heads(request.num_heads)
        .token_order(order)
        .element(ElementFormat::Width(u8::try_from(request.element_bytes)?))
        .build()?;
    let builder = if request.form == 3 {
        let keys: Vec<_> = tensors.iter().step_by(2).cloned().collect();
        let values: Vec<_> = tensors.iter().skip(1).step_by(2).cloned().collect();
        adopt_kv(&config, &form, KvTensors::Apart { keys: &keys, values: &values })?
    } else {
        adopt_kv(&config, &form, KvTensors::Together(tensors))?
    };
    let engine = builder.unregistered().build()?;
    let tier = config.with_num_blocks(request.tier_blocks)?;
    let tier = tier.with_block_alignment(Alignment::SECTOR)?;
    let context = match u32::try_from(request.device) {
        Ok(device) => Some(Context::primary(DeviceId::new(device))?),
        Err(_) => None,
    };
    let system = SystemAllocator::new(SystemOptions::default());
    let plan = terrane_layout::LayoutPlan::new(
        &tier,
        terrane_layout::LayoutKind::FullyContiguous,
        terrane_core::Limits::NONE,
    )?;
    let memory = match &context {
        Some(context) if request.plain_tier == 0 => {
            let pinned = PinnedAllocator::new(context, PinnedOptions::default())?;
            counted(&pinned, plan.base_bytes())?
        }
        _ => counted(&system, plan.base_bytes())?,
    };
    let tier =
        LayoutBuilder::new(tier).fully_contiguous().adopt([memory]).unregistered().build()?;
    let manager = match &context {
        Some(context) => TransferManager::new(engines([context], &EnginesOptions::default())?),
        None => TransferManager::with_default_engines()?,
    };
    let (engine, tier) = (Endpoint::new(engine)?, Endpoint::new(tier)?);
    let entry = LiveCount::new(Resource::Imports);
    Ok(Cache { engine, tier, manager, context, form, _entry: entry })
}

/// Copies blocks of the cache to blocks of the tier, or back (`direction` 1), and waits. On a
/// device, the copy begins after the work given to `stream` (a handle, or 0), and `stream`
/// continues after it has ended.
///
/// # Safety
///
/// `cache` came from [`terrane_proof_cache`], there are `count` block numbers each, and the stream
/// is alive. Only that stream uses the blocks during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_copy(
    cache: *const Cache,
    direction: i32,
    cache_blocks: *const u32,
    tier_blocks: *const u32,
    count: usize,
    stream: u64,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let cache = unsafe { &*cache };
        // SAFETY: the caller's promise.
        let cache_blocks = unsafe { std::slice::from_raw_parts(cache_blocks, count) };
        // SAFETY: the caller's promise.
        let tier_blocks = unsafe { std::slice::from_raw_parts(tier_blocks, count) };
        let transfer = match direction {
            0 => Transfer::new(&cache.engine, &cache.tier).blocks(cache_blocks, tier_blocks),
            _ => Transfer::new(&cache.tier, &cache.engine).blocks(tier_blocks, cache_blocks),
        };
        let Some(context) = &cache.context else {
            cache.manager.submit(transfer, ()).map_err(|refused| refused.cause)?.wait().result?;
            return Ok(());
        };
        let handle = std::ptr::with_exposed_provenance_mut(usize::try_from(stream)?);
        // SAFETY: the caller's promise about the stream.
        let borrowed = unsafe { Stream::borrow(context, handle, ()) }?;
        let transfer = transfer.device_order(borrowed.order());
        cache.manager.submit(transfer, ()).map_err(|refused| refused.cause)?.wait().result?;
        let consumer = ConsumerStream::of(&borrowed);
        // SAFETY: the stream is alive.
        unsafe { handshake(context, ProducerStream::Complete, consumer) }?;
        Ok(())
    })
}

/// Exports the tier as read-only tensors in the form of the cache. Writes as many pointers to
/// versioned structures as fit into `room`, and releases the others.
///
/// # Safety
///
/// `cache` came from [`terrane_proof_cache`], and `tensors` has room for `room` pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_tier_tensors(
    cache: *const Cache,
    code: u8,
    bits: u8,
    tensors: *mut *mut c_void,
    room: usize,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let cache = unsafe { &*cache };
        let code = terrane_interop::dlpack::TypeCode::from_number(code).ok_or("no such code")?;
        let element = ElementType::new(code, bits, 1)?;
        let exports = kv_tensors(&cache.tier, &cache.form, element, Access::Read)?;
        for (number, export) in exports.into_iter().take(room).enumerate() {
            debug_assert!(!matches!(export.device(), TensorDevice::Cuda(_)));
            // SAFETY: the consumer is NumPy, or PyTorch on the processor: no device reads the tier.
            let export = unsafe { export.released_when_done() };
            let pointer = export.into_versioned()?.into_raw().cast();
            // SAFETY: the caller promised that much room.
            let to = unsafe { tensors.add(number) };
            // SAFETY: as above.
            unsafe { to.write(pointer.as_ptr()) };
        }
        Ok(())
    })
}

/// Drops a cache, its tensors, and the tier.
///
/// # Safety
///
/// `cache` came from [`terrane_proof_cache`], and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_cache_release(cache: *mut Cache) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(cache) });
        Ok(())
    })
}
