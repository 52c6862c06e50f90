//! vLLM's `test_gpu_worker`: blocks of device tensors, and host rows of several blocks.
//!
//! The host has one row per chunk, with all blocks of the chunk for each device tensor. A list of
//! blocks may begin and end in the middle of a chunk. The reference compares block by block.

use terrane_layout::formats::flashinfer;
use terrane_layout::formats::vllm::{self, PackedOrder};
use terrane_layout::{
    Axis, ElementFormat, Geometry, LayoutConfig, SectionName, TensorAxis, TensorForm,
};

use super::{End, Reference, ids, sample, small};
use crate::random::Seeded;

/// Tensors of the device, and the rows to which they are offloaded.
#[derive(Clone, Copy, Debug)]
struct Cache {
    form: Form,
    layers: usize,
    /// Blocks of a device tensor.
    blocks: usize,
    chunks: usize,
    /// Blocks of a chunk.
    per_chunk: usize,
    tokens: usize,
    heads: usize,
    elements: usize,
    /// Bytes of an element.
    width: u8,
    /// Whether the rows belong to two workers, and this is the second.
    shared: bool,
}

/// The contents of a block of a device tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Bytes: one tensor `[blocks, page]` per layer.
    Page,
    /// Bytes, and a tensor of chunks on the host for each tensor of the device.
    PageApart,
    /// Tensors `[2, B, N, H, D]`: K and V count as two tensors of pages.
    KeysFirst,
    /// Tensors `[2, B, H, N, D]`.
    KeysFirstByHeads,
    /// Tensors `[B, 2, N, H, D]`: a page has K and V.
    BlockFirst,
    /// `[L, B, N, H, 2·D]`.
    Packed,
    /// `[L, B, H, N, 2·D]`.
    PackedByHeads,
}

const FORMS: [Form; 7] = [
    Form::Page,
    Form::PageApart,
    Form::KeysFirst,
    Form::KeysFirstByHeads,
    Form::BlockFirst,
    Form::Packed,
    Form::PackedByHeads,
];

impl Cache {
    /// The number of tensors of pages, as the worker counts them.
    fn planes(&self) -> usize {
        let keys_first = matches!(self.form, Form::KeysFirst | Form::KeysFirstByHeads);
        if keys_first { self.layers * 2 } else { self.layers }
    }

    /// Bytes of a block in one of these tensors.
    fn page(&self) -> usize {
        let both = self.tokens * self.heads * self.elements * usize::from(self.width) * 2;
        both * self.layers / self.planes()
    }

    /// Bytes of a row of one worker, and of a row of all workers.
    fn rows(&self) -> (usize, usize) {
        let own = (self.planes() * self.per_chunk * self.page()).next_multiple_of(256);
        (own, if self.shared { own * 2 } else { own })
    }

    /// The tensor and byte of a block on the device.
    fn on_device(&self, plane: usize, block: usize) -> (usize, usize) {
        let page = self.page();
        match self.form {
            Form::Page | Form::PageApart | Form::BlockFirst => (plane, block * page),
            Form::KeysFirst | Form::KeysFirstByHeads => {
                (plane / 2, (plane % 2 * self.blocks + block) * page)
            }
            Form::Packed | Form::PackedByHeads => (0, (plane * self.blocks + block) * page),
        }
    }

    /// The tensor and byte of a block of a chunk on the host.
    fn on_host(&self, plane: usize, block: usize) -> (usize, usize) {
        if self.form == Form::PageApart {
            return (plane, block * self.page());
        }
        let (own, row) = self.rows();
        let first = row - own;
        let (chunk, sub_block) = (block / self.per_chunk, block % self.per_chunk);
        (0, first + chunk * row + (plane * self.per_chunk + sub_block) * self.page())
    }

    fn config(&self, blocks: usize) -> LayoutConfig {
        let config = LayoutConfig::builder()
            .num_blocks(small(blocks))
            .num_layers(small(self.layers))
            .outer_dim(2)
            .page_size(small(self.tokens))
            .inner_dim(small(self.heads * self.elements))
            .num_heads(small(self.heads))
            .element(ElementFormat::Width(self.width));
        config.build().unwrap()
    }

    fn device(&self, random: &mut Seeded) -> End {
        let config = self.config(self.blocks);
        let geometry = match self.form {
            Form::Page | Form::PageApart => Geometry::from_form(
                &pages()
                    .tensors(Axis::Layer, small(self.layers))
                    .dim(Axis::Block, small(self.blocks))
                    .dim(Axis::Element, small(self.page())),
            ),
            Form::KeysFirst => vllm::nhd(&config),
            Form::KeysFirstByHeads => vllm::hnd(&config),
            Form::BlockFirst => flashinfer::nhd(&config),
            Form::Packed => vllm::packed(&config, PackedOrder::Lbnhc),
            Form::PackedByHeads => vllm::packed(&config, PackedOrder::Lbhnc),
        };
        let all = self.planes() * self.blocks * self.page();
        let is_packed = matches!(self.form, Form::Packed | Form::PackedByHeads);
        let tensors = if is_packed { 1 } else { self.layers };
        End::random(geometry.unwrap(), &vec![all / tensors; tensors], random)
    }

    fn host(&self, random: &mut Seeded) -> End {
        let (own, row) = self.rows();
        let config = self.config(self.chunks * self.per_chunk);
        let in_row = u64::try_from(row).unwrap();
        let per_chunk = small(self.per_chunk);
        let offload = |order| vllm::offload_rows(&config, order, per_chunk, Some(in_row)).unwrap();
        let geometry = match self.form {
            Form::Packed => offload(PackedOrder::Lbnhc),
            Form::PackedByHeads => offload(PackedOrder::Lbhnc),
            _ => Geometry::from_form(&self.rows_of_planes(in_row)).unwrap(),
        };
        if self.form == Form::PageApart {
            let tensor = self.chunks * self.per_chunk * self.page();
            return End::random(geometry, &vec![tensor; self.layers], random);
        }
        let end = End::random(geometry, &[self.chunks * row], random);
        End { first: row - own, ..end }
    }

    /// Rows that no named format describes.
    fn rows_of_planes(&self, row: u64) -> TensorForm {
        let [layers, chunks, per_chunk] = [self.layers, self.chunks, self.per_chunk].map(small);
        let [tokens, heads, elements] = [self.tokens, self.heads, self.elements].map(small);
        let page = small(self.page());
        let kv = TensorForm::new(&[SectionName::K, SectionName::V], self.width.into());
        let rows = |form: TensorForm| form.dim(Axis::Block, chunks).padded(row);
        let keys_first = |form| {
            let form = rows(form).dim(Axis::Layer, layers).dim(TensorAxis::Outer, 2);
            form.dim(Axis::Block, per_chunk)
        };
        match self.form {
            Form::PageApart => pages()
                .tensors(Axis::Layer, layers)
                .dim(Axis::Block, chunks)
                .dim(Axis::Block, per_chunk)
                .dim(Axis::Element, page),
            Form::KeysFirst => keys_first(kv)
                .dim(Axis::Token, tokens)
                .dim(Axis::Head, heads)
                .dim(Axis::Element, elements),
            Form::KeysFirstByHeads => keys_first(kv)
                .dim(Axis::Head, heads)
                .dim(Axis::Token, tokens)
                .dim(Axis::Element, elements),
            Form::BlockFirst => rows(kv)
                .dim(Axis::Layer, layers)
                .dim(Axis::Block, per_chunk)
                .dim(TensorAxis::Outer, 2)
                .dim(Axis::Token, tokens)
                .dim(Axis::Head, heads)
                .dim(Axis::Element, elements),
            _ => rows(pages())
                .dim(Axis::Layer, layers)
                .dim(Axis::Block, per_chunk)
                .dim(Axis::Element, page),
        }
    }
}

/// A section of bytes.
fn pages() -> TensorForm {
    TensorForm::new(&[SectionName::new("page").unwrap()], 1)
}

/// Stores and loads of every form, with chunks of one block and of several.
///
/// # Panics
///
/// If Terrane does not support a cache.
#[must_use]
pub fn references(seed: u64) -> Vec<Reference> {
    let mut random = Seeded::new(seed);
    let sizes = [(16, 2, 8, 2), (3, 4, 5, 1), (1, 1, 64, 4)];
    let mut found = Vec::new();
    for form in FORMS {
        for (tokens, heads, elements, width) in sizes {
            for (per_chunk, shared) in [(1, false), (3, false), (3, true), (2, true)] {
                let cache = Cache {
                    form,
                    layers: 4,
                    blocks: 14,
                    chunks: 9,
                    per_chunk,
                    tokens,
                    heads,
                    elements,
                    width,
                    shared,
                };
                for stores in [true, false] {
                    let skipped = [per_chunk - 1, 0];
                    found.push(reference_of(&cache, stores, 3, skipped, &mut random));
                }
            }
        }
    }
    found
}

/// Three groups whose blocks come from one list: an aligned one, an empty one, and one whose first
/// and last chunk are only partly used.
///
/// # Panics
///
/// If Terrane does not support a cache.
#[must_use]
pub fn groups(seed: u64, stores: bool) -> Vec<Reference> {
    let mut random = Seeded::new(seed);
    let group = Cache {
        form: Form::PageApart,
        layers: 2,
        blocks: 16,
        chunks: 9,
        per_chunk: 3,
        tokens: 4,
        heads: 2,
        elements: 16,
        width: 2,
        shared: false,
    };
    // Groups differ in their pages.
    let others = [group, Cache { tokens: 8, ..group }, Cache { heads: 5, ..group }];
    let blocks = sample(group.blocks, 12, &mut random);
    let chunks = sample(group.chunks, 4, &mut random);
    let lists = [(&blocks[..6], &chunks[..2], [0, 0]), (&[], &[], [0, 0])];
    let lists = lists.into_iter().chain([(&blocks[6..], &chunks[2..], [2, 2])]);
    let each = others.iter().zip(lists);
    each.map(|(cache, (blocks, chunks, skipped))| {
        of_lists(cache, stores, [blocks, chunks], skipped, &mut random)
    })
    .collect()
}

fn reference_of(
    cache: &Cache,
    stores: bool,
    chunks: usize,
    skipped: [usize; 2],
    random: &mut Seeded,
) -> Reference {
    let blocks = sample(cache.blocks, chunks * cache.per_chunk, random);
    let chunks = sample(cache.chunks, chunks, random);
    of_lists(cache, stores, [&blocks, &chunks], skipped, random)
}

/// Blocks in chunks, without the first blocks of the first chunk and the last blocks of the last
/// one.
fn of_lists(
    cache: &Cache,
    stores: bool,
    [blocks, chunks]: [&[usize]; 2],
    [skipped, left]: [usize; 2],
    random: &mut Seeded,
) -> Reference {
    let per_chunk = cache.per_chunk;
    let sub_blocks: Vec<usize> =
        chunks.iter().flat_map(|&chunk| chunk * per_chunk..(chunk + 1) * per_chunk).collect();
    let end = blocks.len() - left;
    let (on_device, on_host) = (&blocks[skipped..end], &sub_blocks[skipped..end]);
    let (device, host) = (cache.device(random), cache.host(random));
    let page = cache.page();
    let mut expected = if stores { host.tensors.clone() } else { device.tensors.clone() };
    for plane in 0..cache.planes() {
        for (&block, &sub_block) in on_device.iter().zip(on_host) {
            let (a, at) = cache.on_device(plane, block);
            let (b, host_at) = cache.on_host(plane, sub_block);
            if stores {
                expected[b][host_at..host_at + page]
                    .copy_from_slice(&device.tensors[a][at..at + page]);
            } else {
                expected[a][at..at + page]
                    .copy_from_slice(&host.tensors[b][host_at..host_at + page]);
            }
        }
    }
    let name = format!("vllm, {cache:?}, stores {stores}, {on_device:?} and {on_host:?}");
    let (on_device, on_host) = (ids(on_device), ids(on_host));
    let (source, destination, blocks) = if stores {
        (device, host, [on_device, on_host])
    } else {
        (host, device, [on_host, on_device])
    };
    Reference { name, source, destination, blocks, layers: None, expected }
}
