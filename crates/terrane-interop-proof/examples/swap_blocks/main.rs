//! Swaps blocks between caches of candle's tensors, as candle-vllm does between a device and the
//! host.
//!
//! Blocks of each tensor are first copied by `swap_blocks`, then those of all layers by one
//! transfer. Every byte is compared with the bytes that candle reads.
//!
//! ```text
//! cargo run -p terrane-interop-proof --example swap_blocks
//! ```

mod block_copy;
mod candle;
mod swap_space;

use std::collections::HashMap;
use std::error::Error;
use std::io::{self, Write};

use candle_core::{DType, Device, Tensor};
use terrane::prelude::*;

use candle::{start_swap_blocks, swap_blocks};
use swap_space::{KvCache, SwapSpace};

const LAYERS: usize = 2;
const HEADS: usize = 2;
const SIZE: usize = 16;
const TOKENS: usize = 4;
/// The elements of a head that are adjacent for one token.
const X: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let (computing, swapped) = (caches(6, 1.0)?, caches(3, 2.0)?);
    let out = HashMap::from([(0, 2), (5, 0)]);
    let mut compared = 0;
    for ((keys, values), (swapped_keys, swapped_values)) in computing.iter().zip(&swapped) {
        swap_blocks(keys, swapped_keys, &out)?;
        swap_blocks(values, swapped_values, &out)?;
        compared += compare((keys, swapped_keys), &out)?;
        compared += compare((values, swapped_values), &out)?;
    }

    // All layers at once. The caches are adopted when the engine starts.
    let manager = TransferManager::with_default_engines()?;
    // SAFETY: this program has one thread, and uses the tensors when no swap runs.
    let space = unsafe { SwapSpace::new(&manager, &computing, &swapped) }?;
    let (back, again) = (HashMap::from([(2, 1), (0, 4)]), HashMap::from([(3, 1)]));
    let reports = [space.swap_in(&back)?, space.swap_out(&again)?];
    drop(space);
    for ((keys, values), (swapped_keys, swapped_values)) in computing.iter().zip(&swapped) {
        for (tensor, swapped) in [(keys, swapped_keys), (values, swapped_values)] {
            compared += compare((swapped, tensor), &back)?;
            compared += compare((tensor, swapped), &again)?;
        }
    }

    // A copy that runs while the program does something else.
    let (from, to) = (&computing[0].0, &swapped[0].0);
    let one = HashMap::from([(1, 0)]);
    // SAFETY: the tensors are used again after the copy.
    let copy = unsafe { start_swap_blocks(&manager, from, to, &one) }?;
    copy.wait().result?;
    compared += compare((from, to), &one)?;
    let [swapped_in, swapped_out] = reports;
    writeln!(io::stdout(), "in: {swapped_in}\nout: {swapped_out}")?;
    Ok(writeln!(io::stdout(), "{compared} bytes of candle's tensors verified")?)
}

/// Keys `[blocks, heads, size / x, tokens, x]` and values `[blocks, heads, size, tokens]` of each
/// layer, all with different numbers.
fn caches(blocks: usize, sign: f64) -> candle_core::Result<Vec<KvCache>> {
    let tensor = |sizes: &[usize], first: usize| -> candle_core::Result<Tensor> {
        let elements: usize = sizes.iter().product();
        let count = |number: usize| u32::try_from(number).map_err(candle_core::Error::wrap);
        let (first, end) = (count(first * elements)?, count((first + 1) * elements)?);
        let numbers = Tensor::arange(first, end, &Device::Cpu)?.to_dtype(DType::F32)?;
        (numbers * sign)?.reshape(sizes)
    };
    let layer = |layer| {
        let keys = tensor(&[blocks, HEADS, SIZE / X, TOKENS, X], 2 * layer)?;
        Ok((keys, tensor(&[blocks, HEADS, SIZE, TOKENS], 2 * layer + 1)?))
    };
    (0..LAYERS).map(layer).collect()
}

/// Compares the blocks of a mapping, and returns their bytes.
fn compare(
    (from, to): (&Tensor, &Tensor),
    mapping: &HashMap<usize, usize>,
) -> Result<usize, Box<dyn Error>> {
    let mut bytes = 0;
    for (&source, &destination) in mapping {
        let expected = from.get(source)?.flatten_all()?.to_vec1::<f32>()?;
        let found = to.get(destination)?.flatten_all()?.to_vec1::<f32>()?;
        if expected.iter().zip(&found).any(|(a, b)| a.to_bits() != b.to_bits()) {
            return Err(format!("block {destination} is not block {source} of the source").into());
        }
        bytes += 4 * found.len();
    }
    Ok(bytes)
}
