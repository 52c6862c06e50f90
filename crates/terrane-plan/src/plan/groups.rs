//! The groups of caches, and the memory that users need in them.

use serde::{Deserialize, Serialize};
use terrane_core::ByteCount;
use terrane_layout::LayoutError;
use terrane_layout::model::{CacheGroup, GroupKind, ModelGeometry, ModelOptions};

use crate::error::PlanError;
use crate::request::PlanRequest;

/// A group of caches on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupPlan {
    /// The kind of cache, as text.
    pub kind: String,
    /// The number of tokens in its window or chunk, if it has one.
    pub window: Option<u32>,
    /// Whether the group has one state for each sequence, instead of rows for tokens.
    pub is_state: bool,
    /// The number of layers.
    pub layers: u32,
    /// The first layer.
    pub first_layer: u32,
    /// KV heads.
    pub heads: u32,
    /// Bytes of one token, layer, and K or V; for a group of states, bytes of one state.
    pub row_bytes: u64,
    /// Bytes of a token over its layers; 0 for states.
    pub bytes_per_token: u64,
    /// Bytes of a sequence over its layers; 0 for groups with tokens.
    pub bytes_per_sequence: u64,
    /// Bytes of a block, or of the states of a sequence.
    pub block_bytes: u64,
    /// Bytes of a chunk; 0 for states.
    pub chunk_bytes: u64,
}

/// The need of the users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Demand {
    /// Tokens of a context.
    pub context: u64,
    /// Users.
    pub users: u64,
    /// Bytes of one context on one rank. A window needs only the blocks inside it.
    pub bytes_per_user: u64,
    /// Bytes of all users on one rank.
    pub bytes: u64,
    /// Bytes of all users on all ranks.
    pub bytes_of_all_ranks: u64,
}

pub(crate) fn options(request: &PlanRequest) -> ModelOptions {
    let options = ModelOptions::new().tensor_parallel(request.tensor_parallel);
    request.kv_element.map_or(options, |element| options.kv_element(element))
}

pub(crate) fn group_plans(
    request: &PlanRequest,
    geometry: &ModelGeometry,
) -> Result<Vec<GroupPlan>, PlanError> {
    let one = |group: &CacheGroup| -> Result<GroupPlan, LayoutError> {
        let is_state = group.kind() == GroupKind::State;
        let token = group.bytes_per_token()?;
        let row = group.row_bytes().or(group.state_bytes()).unwrap_or(ByteCount::ZERO);
        Ok(GroupPlan {
            kind: group.kind().to_string(),
            window: match group.kind() {
                GroupKind::SlidingAttention { window } => Some(window),
                GroupKind::ChunkedAttention { chunk } => Some(chunk),
                _ => None,
            },
            is_state,
            layers: u32::try_from(group.layers().len()).unwrap_or(u32::MAX),
            first_layer: group.layers().first().copied().unwrap_or(0),
            heads: group.heads(),
            row_bytes: row.get(),
            bytes_per_token: token.get(),
            bytes_per_sequence: group.bytes_per_sequence()?.get(),
            block_bytes: group.layout_config(1, request.block_tokens)?.block_bytes().get(),
            chunk_bytes: token.checked_mul("tokens", request.chunk_tokens.into())?.get(),
        })
    };
    geometry.groups().iter().map(|group| one(group).map_err(|e| request.model.refused(e))).collect()
}

impl GroupPlan {
    /// The number of blocks of one context. The tokens of a window may begin in the middle of a
    /// block, so a window may need one more block.
    pub(crate) fn blocks_of(&self, context: u64, block_tokens: u32) -> u64 {
        if self.is_state {
            return 1;
        }
        let all = context.div_ceil(block_tokens.into());
        self.window
            .map_or(all, |window| all.min(u64::from(window).div_ceil(block_tokens.into()) + 1))
    }
}

pub(crate) fn demand(
    request: &PlanRequest,
    groups: &[GroupPlan],
) -> Result<Option<Demand>, PlanError> {
    let (Some(context), Some(users)) = (request.context, request.users) else { return Ok(None) };
    let bytes_per_user = context_bytes(groups, context, request.block_tokens)?;
    let bytes = bytes_per_user.checked_mul("users", users)?;
    let all = bytes.checked_mul("ranks", request.tensor_parallel.into())?;
    Ok(Some(Demand {
        context,
        users,
        bytes_per_user: bytes_per_user.get(),
        bytes: bytes.get(),
        bytes_of_all_ranks: all.get(),
    }))
}

/// The bytes of one context in all groups.
pub(crate) fn context_bytes(
    groups: &[GroupPlan],
    context: u64,
    block_tokens: u32,
) -> Result<ByteCount, PlanError> {
    let each = groups.iter().map(|group| {
        ByteCount::new(group.block_bytes)
            .checked_mul("blocks", group.blocks_of(context, block_tokens))
    });
    let each: Vec<ByteCount> = each.collect::<Result<_, _>>()?;
    let sum: Result<ByteCount, terrane_core::SizeOverflow> = each.into_iter().collect();
    Ok(sum?)
}
