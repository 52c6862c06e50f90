//! The order of the axes of KV tensors.

use std::fmt;

/// An axis of a KV tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum KvAxis {
    /// K and V, or one latent. Without this axis, K and V have separate tensors.
    Outer,
    /// The blocks.
    Block,
    /// The tokens of a block.
    Token,
    /// The tokens of all blocks, one block after another.
    Slot,
    /// The heads of a token.
    Head,
    /// The elements of a head.
    Dim,
    /// The elements of a token, all heads together.
    Row,
    /// An axis of size 1 without meaning.
    One,
}

impl fmt::Display for KvAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Outer => "outer (K, V)",
            Self::Block => "blocks",
            Self::Token => "tokens of a block",
            Self::Slot => "tokens",
            Self::Head => "heads",
            Self::Dim => "elements of a head",
            Self::Row => "elements of a token",
            Self::One => "one",
        })
    }
}

/// The axes of an engine's KV tensors, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvAxisOrder {
    axes: [KvAxis; MOST],
    count: usize,
}

/// The most axes that an axis order can have.
const MOST: usize = 6;

impl KvAxisOrder {
    /// `[2, blocks, page, heads, dim]`: vLLM's FlashAttention.
    pub const VLLM: Self =
        Self::of([KvAxis::Outer, KvAxis::Block, KvAxis::Token, KvAxis::Head, KvAxis::Dim]);
    /// `[blocks, 2, page, heads, dim]`: vLLM's backends whose shape begins with the blocks, Triton
    /// among them, in any memory order; FlashInfer in NHD.
    pub const VLLM_BLOCKS_FIRST: Self = Self::FLASHINFER_NHD;
    /// `[blocks, 2, page, heads, dim]`: FlashInfer in NHD, and vLLM's FlashInfer.
    pub const FLASHINFER_NHD: Self =
        Self::of([KvAxis::Block, KvAxis::Outer, KvAxis::Token, KvAxis::Head, KvAxis::Dim]);
    /// `[blocks, 2, heads, page, dim]`: FlashInfer in HND.
    pub const FLASHINFER_HND: Self =
        Self::of([KvAxis::Block, KvAxis::Outer, KvAxis::Head, KvAxis::Token, KvAxis::Dim]);
    /// `[tokens, heads, dim]`, K and V apart: SGLang.
    pub const SGLANG: Self = Self::of([KvAxis::Slot, KvAxis::Head, KvAxis::Dim]);
    /// `[blocks, page, dim]`: vLLM's latent attention.
    pub const VLLM_LATENT: Self = Self::of([KvAxis::Block, KvAxis::Token, KvAxis::Row]);
    /// `[tokens, 1, dim]`: SGLang's latent attention.
    pub const SGLANG_LATENT: Self = Self::of([KvAxis::Slot, KvAxis::One, KvAxis::Row]);

    /// All named axis orders, each once.
    pub const KNOWN: [Self; 6] = [
        Self::VLLM,
        Self::FLASHINFER_NHD,
        Self::FLASHINFER_HND,
        Self::SGLANG,
        Self::VLLM_LATENT,
        Self::SGLANG_LATENT,
    ];

    const fn of<const N: usize>(given: [KvAxis; N]) -> Self {
        let mut axes = [KvAxis::One; MOST];
        let (head, _) = axes.split_at_mut(N);
        head.copy_from_slice(&given);
        Self { axes, count: N }
    }

    /// Creates an axis order with the axes in another order.
    ///
    /// # Errors
    ///
    /// [`InvalidAxisOrder`] for more than six axes, or for missing or repeated axes. Blocks and
    /// tokens are required once (or [`KvAxis::Slot`] for both). So are heads and their elements (or
    /// [`KvAxis::Row`] for both). Outers occur at most once.
    pub fn new(axes: &[KvAxis]) -> Result<Self, InvalidAxisOrder> {
        use KvAxis::{Block, Dim, Head, Outer, Row, Slot, Token};
        let count = |axis| axes.iter().filter(|&&other| other == axis).count();
        let tokens = (count(Block), count(Token), count(Slot));
        let row = (count(Head), count(Dim), count(Row));
        let is_valid = axes.len() <= MOST
            && count(Outer) <= 1
            && matches!(tokens, (1, 1, 0) | (0, 0, 1))
            && matches!(row, (1, 1, 0) | (0, 0, 1));
        if !is_valid {
            return Err(InvalidAxisOrder { axes: axes.to_vec() });
        }
        let mut axis_order = Self { axes: [KvAxis::One; MOST], count: axes.len() };
        axis_order.axes.iter_mut().zip(axes).for_each(|(to, from)| *to = *from);
        Ok(axis_order)
    }

    /// The axes, in their order.
    #[must_use]
    pub fn axes(&self) -> &[KvAxis] {
        self.axes.get(..self.count).unwrap_or_default()
    }

    /// Whether K and V are in one tensor.
    #[must_use]
    pub fn has_outer(&self) -> bool {
        self.axes().contains(&KvAxis::Outer)
    }
}

/// Axes that no KV tensor has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the axes {axes:?} are not those of a KV tensor; give blocks and tokens (or slots), heads and \
     elements (or rows) once, outers at most once, at most {MOST} axes in all"
)]
pub struct InvalidAxisOrder {
    /// The axes.
    pub axes: Vec<KvAxis>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_forms_are_valid() {
        for axis_order in KvAxisOrder::KNOWN {
            assert_eq!(KvAxisOrder::new(axis_order.axes()), Ok(axis_order));
        }
    }

    #[test]
    fn others_are_not() {
        use KvAxis::{Block, Dim, Head, Outer, Row, Slot, Token};
        for axes in [
            &[][..],
            &[Block, Token, Head],
            &[Block, Slot, Row],
            &[Outer, Outer, Slot, Row],
            &[Block, Block, Token, Row],
            &[Outer, Block, Token, Head, Dim, Row],
        ] {
            assert!(KvAxisOrder::new(axes).is_err(), "{axes:?}");
        }
    }
}
