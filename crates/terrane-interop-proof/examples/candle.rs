//! Adopts a cache of candle tensors as a layout, without DLPack and without a copy.
//!
//! The tensors have the shapes of paged attention in candle-vllm and mistral.rs. Each layer has
//! keys `[blocks, heads, size / x, tokens, x]` and values `[blocks, heads, size, tokens]`. Blocks
//! are copied to a tier with another layout and back. Every byte is compared with the bytes that
//! candle reads.
//!
//! ```text
//! cargo run -p terrane-interop-proof --example candle
//! ```

use std::error::Error;
use std::io::{self, Write};
use std::ptr::NonNull;
use std::sync::Mutex;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Tensor};
use terrane_core::{HostAddress, Location, StorageKind};
use terrane_interop::tensors::{StridedForm, StridedTensor, adopt_strided_parts};
use terrane_layout::{Axis, ElementFormat, LayoutBuilder, LayoutConfig, SectionName};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

const LAYERS: usize = 2;
const BLOCKS: usize = 6;
const HEADS: usize = 2;
const SIZE: usize = 16;
const TOKENS: usize = 4;
const X: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let keys = caches(&[BLOCKS, HEADS, SIZE / X, TOKENS, X], 1.0)?;
    let values = caches(&[BLOCKS, HEADS, SIZE, TOKENS], 2.0)?;

    // The meaning of each tensor's dimensions. Sizes and strides come from candle.
    let layers = u32::try_from(LAYERS)?;
    let of_keys = StridedForm::new(&[SectionName::K])
        .tensors(Axis::Layer, layers)
        .dim(Axis::Block)
        .dim(Axis::Head)
        .dim(Axis::Element)
        .dim(Axis::Token)
        .dim(Axis::Element);
    let of_values = StridedForm::new(&[SectionName::V])
        .tensors(Axis::Layer, layers)
        .dim(Axis::Block)
        .dim(Axis::Head)
        .dim(Axis::Element)
        .dim(Axis::Token);
    let [strided_keys, strided_values] =
        [&keys, &values].map(|tensors| tensors.iter().map(adopted).collect::<Result<Vec<_>, _>>());
    let parts = [(&of_keys, &strided_keys?[..]), (&of_values, &strided_values?[..])];
    let cache = adopt_strided_parts(&parts)?.unregistered().build()?;
    cache.verify()?;

    // A tier for the same blocks. All layers of a block are contiguous, and elements are innermost.
    let config = LayoutConfig::builder()
        .num_blocks(3)
        .num_layers(layers)
        .outer_dim(2)
        .page_size(u32::try_from(TOKENS)?)
        .inner_dim(u32::try_from(HEADS * SIZE)?)
        .num_heads(u32::try_from(HEADS)?)
        .element(ElementFormat::Width(4))
        .build()?;
    let tier = LayoutBuilder::new(config)
        .fully_contiguous()
        .allocate(&SystemAllocator::new(SystemOptions::default()))
        .unregistered()
        .build()?;

    let (cache, tier) = (Endpoint::new(cache)?, Endpoint::new(tier)?);
    let manager = TransferManager::with_default_engines()?;
    let before = numbers(&keys, &values)?;
    // Blocks 0, 2 and 5 are offloaded, and restored to 1, 3 and 4.
    let out = Transfer::new(&cache, &tier).blocks(&[0, 2, 5], &[0, 1, 2]);
    manager.submit(out, ()).map_err(|refused| refused.cause)?.wait().result?;
    let back = Transfer::new(&tier, &cache).blocks(&[0, 1, 2], &[1, 3, 4]);
    manager.submit(back, ()).map_err(|refused| refused.cause)?.wait().result?;

    let mut compared = 0;
    for (tensor, (old, new)) in before.iter().zip(numbers(&keys, &values)?).enumerate() {
        for (block, from) in [0, 0, 2, 2, 5, 5].into_iter().enumerate() {
            let of_block = |all: &[f32], block: usize| -> Vec<u32> {
                let length = all.len() / BLOCKS;
                all.iter().skip(block * length).take(length).map(|each| each.to_bits()).collect()
            };
            if of_block(&new, block) != of_block(old, from) {
                return Err(format!("block {block} of tensor {tensor} is not block {from}").into());
            }
            compared += 4 * new.len() / BLOCKS;
        }
    }
    Ok(writeln!(io::stdout(), "{compared} bytes of candle's tensors verified")?)
}

/// A tensor for each layer, with different numbers.
fn caches(sizes: &[usize], sign: f64) -> Result<Vec<Tensor>, candle_core::Error> {
    let elements: usize = sizes.iter().product();
    (0..LAYERS)
        .map(|layer| {
            let first = u32::try_from(layer * elements).map_err(candle_core::Error::wrap)?;
            let end = first + u32::try_from(elements).map_err(candle_core::Error::wrap)?;
            let numbers = Tensor::arange(first, end, &Device::Cpu)?.to_dtype(DType::F32)?;
            (numbers * sign)?.reshape(sizes)
        })
        .collect()
}

fn numbers(keys: &[Tensor], values: &[Tensor]) -> Result<Vec<Vec<f32>>, candle_core::Error> {
    keys.iter().chain(values).map(|tensor| tensor.flatten_all()?.to_vec1()).collect()
}

/// Adopts a candle tensor by its address, sizes and strides. The tensor is the owner of the bytes.
fn adopted(tensor: &Tensor) -> Result<StridedTensor, Box<dyn Error>> {
    let found = FirstElement(Mutex::new(None));
    tensor.inplace_op1(&found)?;
    let first =
        found.0.into_inner()?.ok_or("the tensor does not have 4-byte elements on the host")?;
    let at = (StorageKind::System, Location::Host(first));
    let (dims, strides) = (tensor.dims().iter().copied(), tensor.stride().iter().copied());
    // SAFETY: candle allocated and initialised the storage, and never moves it. The clone keeps it
    // alive. This program uses the tensor only when no transfer is in flight.
    Ok(unsafe { StridedTensor::from_raw(at, 4, dims, strides, tensor.clone()) }?)
}

/// An operation that finds the first element of a tensor. Candle gives it mutable storage.
struct FirstElement(Mutex<Option<HostAddress>>);

impl InplaceOp1 for FirstElement {
    fn name(&self) -> &'static str {
        "first element"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if let CpuStorage::F32(numbers) = storage
            && let Some(rest) = numbers.get_mut(layout.start_offset()..)
        {
            let first = NonNull::from(rest).cast::<f32>();
            let mut found =
                self.0.lock().map_err(|_| candle_core::Error::Msg("poisoned".into()))?;
            *found = Some(HostAddress::new(first));
        }
        Ok(())
    }
}
