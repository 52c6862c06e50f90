//! LMCache's formats: chunks of tokens, gathered from a paged cache by slots, and scattered back.
//!
//! A slot mapping gives the position of each token of a sequence. It is the page times the tokens
//! of a page, plus the position within the page. A chunk is an object with T tokens, of several
//! pages.

use terrane_layout::formats::{flashinfer, lmcache, sglang, vllm};
use terrane_layout::{
    Axis, ElementFormat, Geometry, LayoutConfig, SectionName, TensorAxis, TensorForm,
};

use super::{End, Reference, ids, sample, small};
use crate::random::Seeded;

/// The tensors of the paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Paged {
    /// One tensor `[2, pages, N, hidden]` per layer.
    KeysFirst,
    /// One tensor `[pages, 2, N, hidden]` per layer.
    BlockFirst,
    /// A list of tensors `[pages · N, hidden]` for K, and one for V.
    Lists,
    /// One tensor `[pages, N, hidden]` per layer.
    Latent,
}

/// The order of an object of T tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// `[2, L, T, hidden]`.
    Kv2ltd,
    /// The same, each object in a separate allocation.
    Kv2ltdApart,
    /// One object `[2, T, hidden]` per layer.
    Kv2td,
    /// One object `[T, 2, hidden]` per layer.
    KvT2d,
    /// `[1, L, T, hidden]`.
    Mla,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    layers: usize,
    /// Pages of the paged cache.
    pages: usize,
    /// Tokens of a page.
    page: usize,
    /// Bytes of K of a token.
    hidden: usize,
    heads: usize,
    width: u8,
    /// The number of objects that fit into the cache.
    objects: usize,
    /// Pages of an object.
    per_object: usize,
}

impl Sizes {
    fn tokens(&self) -> usize {
        self.per_object * self.page
    }

    fn config(&self, blocks: usize, outers: usize) -> LayoutConfig {
        let mut config = LayoutConfig::builder()
            .num_blocks(small(blocks))
            .num_layers(small(self.layers))
            .outer_dim(small(outers))
            .page_size(small(self.page))
            .inner_dim(small(self.hidden / usize::from(self.width)))
            .element(ElementFormat::Width(self.width));
        if outers == 2 {
            config = config.num_heads(small(self.heads));
        }
        config.build().unwrap()
    }

    fn paged(&self, paged: Paged, random: &mut Seeded) -> End {
        let outers = if paged == Paged::Latent { 1 } else { 2 };
        let config = self.config(self.pages, outers);
        let geometry = match paged {
            Paged::KeysFirst => vllm::nhd(&config),
            Paged::BlockFirst => flashinfer::nhd(&config),
            Paged::Lists => sglang::device(&config),
            Paged::Latent => vllm::mla(&config),
        };
        let plane = self.pages * self.page * self.hidden;
        let lengths = match paged {
            Paged::Lists => vec![plane; self.layers * 2],
            _ => vec![plane * outers; self.layers],
        };
        End::random(geometry.unwrap(), &lengths, random)
    }

    /// The tensor and byte of a slot.
    fn of_slot(&self, paged: Paged, [outer, layer]: [usize; 2], slot: usize) -> (usize, usize) {
        let hidden = self.hidden;
        let slots = self.pages * self.page;
        match paged {
            Paged::KeysFirst => (layer, (outer * slots + slot) * hidden),
            Paged::BlockFirst => {
                let (page, within) = (slot / self.page, slot % self.page);
                (layer, ((page * 2 + outer) * self.page + within) * hidden)
            }
            Paged::Lists => (outer * self.layers + layer, slot * hidden),
            Paged::Latent => (layer, slot * hidden),
        }
    }

    fn objects(&self, format: Format, random: &mut Seeded) -> End {
        let outers = if format == Format::Mla { 1 } else { 2 };
        let config = self.config(self.objects * self.per_object, outers);
        let pages = small(self.per_object);
        let geometry = match format {
            Format::Kv2ltd => lmcache::kv_2ltd(&config, pages),
            Format::Kv2ltdApart => Geometry::from_form(&self.apart()),
            Format::Kv2td => lmcache::kv_2td(&config, pages),
            Format::KvT2d => lmcache::kv_t2d(&config, pages),
            Format::Mla => lmcache::mla(&config, pages),
        };
        let plane = self.tokens() * self.hidden;
        let lengths = match format {
            Format::Kv2ltd | Format::Mla => vec![self.objects * outers * self.layers * plane],
            Format::Kv2ltdApart => vec![outers * self.layers * plane; self.objects],
            Format::Kv2td | Format::KvT2d => vec![self.objects * outers * plane; self.layers],
        };
        End::random(geometry.unwrap(), &lengths, random)
    }

    /// A tensor `[2, L, T, H, D]` for each object.
    fn apart(&self) -> TensorForm {
        let elements = self.hidden / self.heads / usize::from(self.width);
        TensorForm::new(&[SectionName::K, SectionName::V], self.width.into())
            .tensors(Axis::Block, small(self.objects))
            .dim(TensorAxis::Outer, 2)
            .dim(Axis::Layer, small(self.layers))
            .dim(Axis::Block, small(self.per_object))
            .dim(Axis::Token, small(self.page))
            .dim(Axis::Head, small(self.heads))
            .dim(Axis::Element, small(elements))
    }

    /// The tensor and byte of a token of an object.
    fn of_token(
        &self,
        format: Format,
        [outer, layer]: [usize; 2],
        [object, token]: [usize; 2],
    ) -> (usize, usize) {
        let (hidden, tokens, layers) = (self.hidden, self.tokens(), self.layers);
        match format {
            Format::Kv2ltd => {
                (0, (((object * 2 + outer) * layers + layer) * tokens + token) * hidden)
            }
            Format::Kv2ltdApart => (object, ((outer * layers + layer) * tokens + token) * hidden),
            Format::Kv2td => (layer, ((object * 2 + outer) * tokens + token) * hidden),
            Format::KvT2d => (layer, ((object * tokens + token) * 2 + outer) * hidden),
            Format::Mla => (0, ((object * layers + layer) * tokens + token) * hidden),
        }
    }
}

/// Sequences to objects and back, in every format from every paged cache.
///
/// # Panics
///
/// If Terrane does not support a format.
#[must_use]
pub fn references(seed: u64) -> Vec<Reference> {
    let mut random = Seeded::new(seed);
    let sizes = [(4, 48, 3, 2, 3), (1, 32, 2, 1, 4), (16, 64, 4, 4, 2), (6, 40, 5, 1, 1)];
    let of_keys = [Paged::KeysFirst, Paged::BlockFirst, Paged::Lists];
    let formats = [Format::Kv2ltd, Format::Kv2ltdApart, Format::Kv2td, Format::KvT2d];
    let mut pairs = vec![(Paged::Latent, Format::Mla)];
    pairs.extend(of_keys.iter().flat_map(|&paged| formats.map(|format| (paged, format))));
    let mut found = Vec::new();
    for (page, hidden, heads, width, per_object) in sizes {
        let hidden = hidden * heads * usize::from(width);
        let sizes =
            Sizes { layers: 3, pages: 13, page, hidden, heads, width, objects: 5, per_object };
        for &(paged, format) in &pairs {
            for gathers in [true, false] {
                found.push(reference_of(&sizes, (paged, format), gathers, &mut random));
                // A sequence's last object is shorter, with its own sizes.
                let rest = Sizes { per_object: 1, ..sizes };
                found.push(reference_of(&rest, (paged, format), gathers, &mut random));
            }
        }
    }
    found
}

fn reference_of(
    sizes: &Sizes,
    (paged, format): (Paged, Format),
    gathers: bool,
    random: &mut Seeded,
) -> Reference {
    let (cache, objects) = (sizes.paged(paged, random), sizes.objects(format, random));
    let used = 1 + random.below(3);
    let pages = sample(sizes.pages, used * sizes.per_object, random);
    let numbers = sample(sizes.objects, used, random);
    let slots: Vec<usize> =
        pages.iter().flat_map(|&page| page * sizes.page..(page + 1) * sizes.page).collect();
    let outers = if format == Format::Mla { 1 } else { 2 };
    let mut expected = if gathers { objects.tensors.clone() } else { cache.tensors.clone() };
    for (position, &slot) in slots.iter().enumerate() {
        let object = numbers[position / sizes.tokens()];
        let token = position % sizes.tokens();
        for layer in 0..sizes.layers {
            for outer in 0..outers {
                let (a, at) = sizes.of_slot(paged, [outer, layer], slot);
                let (b, to) = sizes.of_token(format, [outer, layer], [object, token]);
                let (row, other) = (at..at + sizes.hidden, to..to + sizes.hidden);
                if gathers {
                    expected[b][other].copy_from_slice(&cache.tensors[a][row]);
                } else {
                    expected[a][row].copy_from_slice(&objects.tensors[b][other]);
                }
            }
        }
    }
    let per_object = sizes.per_object;
    let of_objects: Vec<usize> =
        numbers.iter().flat_map(|&n| n * per_object..(n + 1) * per_object).collect();
    let name = format!("lmcache, {paged:?}, {format:?}, {sizes:?}, gathers {gathers}");
    let blocks = [ids(&pages), ids(&of_objects)];
    let layers = None;
    if gathers {
        Reference { name, source: cache, destination: objects, blocks, layers, expected }
    } else {
        let [pages, of_objects] = blocks;
        let blocks = [of_objects, pages];
        Reference { name, source: objects, destination: cache, blocks, layers, expected }
    }
}

/// `BINARY`: compressed objects, whose contents are unknown.
///
/// # Panics
///
/// If Terrane does not support such objects.
#[must_use]
pub fn binary(seed: u64) -> Vec<Reference> {
    let mut random = Seeded::new(seed);
    let random = &mut random;
    [1, 17, 4096, 5003].map(|object| binary_of(object, random)).to_vec()
}

fn binary_of(object: usize, random: &mut Seeded) -> Reference {
    let counts = [6, 9];
    let [source, destination] = counts.map(|count| {
        let geometry = Geometry::opaque(small(count), small(object)).unwrap();
        End::random(geometry, &[count * object], random)
    });
    let [from, to] = counts.map(|count| sample(count, 4, random));
    let mut expected = destination.tensors.clone();
    for (&from, &to) in from.iter().zip(&to) {
        let bytes = &source.tensors[0][from * object..(from + 1) * object];
        expected[0][to * object..(to + 1) * object].copy_from_slice(bytes);
    }
    Reference {
        name: format!("lmcache, binary objects of {object} bytes, {from:?} to {to:?}"),
        source,
        destination,
        blocks: [ids(&from), ids(&to)],
        layers: None,
        expected,
    }
}
