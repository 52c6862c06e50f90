//! SGLang's `test_kvcacheio`: lists of token indices, in whole pages, between pools of tokens.

use terrane_layout::formats::sglang;
use terrane_layout::{ElementFormat, Geometry, LayoutConfig};

use super::{End, Reference, Tensors, ids, sample, small};
use crate::random::Seeded;

/// The order of a pool's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// One tensor `[tokens, H, D]` for K and one for V of each layer.
    Device,
    /// `[2, L, tokens, H, D]`.
    LayerFirst,
    /// `[2, tokens, L, H, D]`.
    PageFirst,
    /// `[2, pages, L, N, H, D]`.
    PageFirstDirect,
    /// `[2, pages, H, N, L, D]`.
    PageHead,
}

#[derive(Clone, Copy, Debug)]
struct Pool {
    order: Order,
    /// K and V, or a latent.
    outers: usize,
    layers: usize,
    pages: usize,
    /// Tokens of a page.
    page: usize,
    heads: usize,
    /// Bytes of a head.
    head_bytes: usize,
    /// Bytes of an element.
    width: u8,
}

impl Pool {
    fn tokens(&self) -> usize {
        self.pages * self.page
    }

    fn item(&self) -> usize {
        self.heads * self.head_bytes
    }

    fn geometry(&self) -> Geometry {
        let elements = self.item() / usize::from(self.width);
        let mut config = LayoutConfig::builder()
            .num_blocks(small(self.pages))
            .num_layers(small(self.layers))
            .outer_dim(small(self.outers))
            .page_size(small(self.page))
            .inner_dim(small(elements))
            .element(ElementFormat::Width(self.width));
        if self.outers == 2 {
            config = config.num_heads(small(self.heads));
        }
        let config = config.build().unwrap();
        match self.order {
            Order::Device => sglang::device(&config),
            Order::LayerFirst => sglang::layer_first(&config),
            Order::PageFirst => sglang::page_first(&config),
            Order::PageFirstDirect => sglang::page_first_direct(&config),
            Order::PageHead => sglang::page_head(&config),
        }
        .unwrap()
    }

    fn end(&self, random: &mut Seeded) -> End {
        let all = self.outers * self.layers * self.tokens() * self.item();
        let tensors = if self.order == Order::Device { self.outers * self.layers } else { 1 };
        End::random(self.geometry(), &vec![all / tensors; tensors], random)
    }

    /// The tensor and the byte where a head of a token begins.
    fn at(&self, [outer, layer]: [usize; 2], token: usize, head: usize) -> (usize, usize) {
        let within = head * self.head_bytes;
        let tokens = self.tokens();
        let (page, slot) = (token / self.page, token % self.page);
        match self.order {
            Order::Device => (outer * self.layers + layer, token * self.item() + within),
            Order::LayerFirst => {
                (0, ((outer * self.layers + layer) * tokens + token) * self.item() + within)
            }
            Order::PageFirst => {
                (0, ((outer * tokens + token) * self.layers + layer) * self.item() + within)
            }
            Order::PageFirstDirect => {
                let layers = (outer * self.pages + page) * self.layers + layer;
                (0, (layers * self.page + slot) * self.item() + within)
            }
            Order::PageHead => {
                let heads = (outer * self.pages + page) * self.heads + head;
                let row = (heads * self.page + slot) * self.layers + layer;
                (0, row * self.head_bytes)
            }
        }
    }
}

/// Copies the items of two lists of tokens, one by one.
fn copy(
    [from, to]: [&Pool; 2],
    source: &Tensors,
    destination: &mut Tensors,
    [from_tokens, to_tokens]: [&[usize]; 2],
    layers: &[usize],
) {
    let bytes = from.head_bytes;
    for &layer in layers {
        for outer in 0..from.outers {
            for (&token, &to_token) in from_tokens.iter().zip(to_tokens) {
                for head in 0..from.heads {
                    let (tensor, at) = from.at([outer, layer], token, head);
                    let (to_tensor, to_at) = to.at([outer, layer], to_token, head);
                    destination[to_tensor][to_at..to_at + bytes]
                        .copy_from_slice(&source[tensor][at..at + bytes]);
                }
            }
        }
    }
}

/// Whole pages as lists of their tokens.
fn tokens_of(pages: &[usize], page: usize) -> Vec<usize> {
    pages.iter().flat_map(|&number| number * page..(number + 1) * page).collect()
}

/// Every host order to and from the device: K and V, and latents; one layer, and all.
///
/// # Panics
///
/// If Terrane does not support a pool.
#[must_use]
pub fn references(seed: u64) -> Vec<Reference> {
    let mut random = Seeded::new(seed);
    let random = &mut random;
    let orders = [Order::LayerFirst, Order::PageFirst, Order::PageFirstDirect, Order::PageHead];
    // Page, heads, bytes of a head, bytes of an element.
    let sizes = [(1, 2, 32, 2), (4, 3, 24, 1), (5, 1, 16, 2), (16, 4, 64, 4)];
    let mut found = Vec::new();
    for (page, heads, head_bytes, width) in sizes {
        for outers in [1, 2] {
            let heads = if outers == 1 { 1 } else { heads };
            let device = Pool {
                order: Order::Device,
                outers,
                layers: 4,
                pages: 7,
                page,
                heads,
                head_bytes,
                width,
            };
            for order in orders {
                // A latent has no heads by which to split a page.
                if outers == 1 && order == Order::PageHead {
                    continue;
                }
                let host = Pool { order, pages: 11, ..device };
                for (from, to) in [(device, host), (host, device)] {
                    found.push(reference_of(&from, &to, None, random));
                    found.push(reference_of(&from, &to, Some(random.below(4)), random));
                }
            }
            // Within the device, and between two host pools.
            found.push(reference_of(&device, &Pool { pages: 9, ..device }, None, random));
            let direct = Pool { order: Order::PageFirstDirect, ..device };
            found.push(reference_of(
                &direct,
                &Pool { order: Order::PageFirst, ..device },
                None,
                random,
            ));
        }
    }
    found
}

fn reference_of(from: &Pool, to: &Pool, layer: Option<usize>, random: &mut Seeded) -> Reference {
    let (source, destination) = (from.end(random), to.end(random));
    let count = 1 + random.below(5);
    let pages = [sample(from.pages, count, random), sample(to.pages, count, random)];
    let [from_tokens, to_tokens] = [0, 1].map(|end| tokens_of(&pages[end], from.page));
    let layers = layer.map_or_else(|| (0..from.layers).collect(), |layer| vec![layer]);
    let mut expected = destination.tensors.clone();
    copy([from, to], &source.tensors, &mut expected, [&from_tokens, &to_tokens], &layers);
    Reference {
        name: format!("sglang, {from:?} to {to:?}, pages {pages:?}, layers {layers:?}"),
        source,
        destination,
        blocks: [ids(&pages[0]), ids(&pages[1])],
        layers: layer.map(|layer| small(layer)..small(layer + 1)),
        expected,
    }
}
