//! The rules of transfers that change the order of tokens and heads, or copy some heads.

use terrane_core::Alignment;
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind, TokenOrder};
use terrane_transfer::TransferManager;

use super::{
    EngineFixture, check_heads, for_all_pairs, random_blocks, random_number, random_range,
};
use crate::model::{Image, origin};
use crate::random::Seeded;

/// Transfers between token-major and head-major, and of some heads, have the bytes of the model, or
/// the quote declines them as broken-up pieces. Returns the number of transfers that were exact and
/// change the order or leave heads out.
pub fn relayouts_are_exact_or_declined(
    fixture: &impl EngineFixture,
    seed: u64,
    cases: usize,
) -> usize {
    let manager = TransferManager::new([fixture.engine()]);
    let mut random = Seeded::new(seed);
    let mut exact = 0;
    for_all_pairs(fixture, |source, destination| {
        for _ in 0..cases {
            let shape = random_heads(&mut random);
            let mut end = |name: &str| {
                let (blocks, heads) =
                    (random_number(&mut random, 9), random_number(&mut random, 8));
                let order = TokenOrder::ALL[random.below(2)];
                let alignment = Alignment::new(1 << random.below(11)).expect("a power of two");
                let config = shape.with_num_heads(heads).expect("a valid config");
                let config = config.with_token_order(order).expect("heads are stated");
                let config = config.with_num_blocks(blocks).expect("a valid config");
                let config = config.with_block_alignment(alignment).expect("a valid config");
                let endpoint = fixture.endpoint(name, config, LayoutKind::ALL[random.below(3)]);
                Image::scribble(&endpoint, fixture.access(), random.next_u64());
                endpoint
            };
            let (from, to) = (end(source), end(destination));
            let [order, other] = [&from, &to].map(|end| origin(end).0.token_order());
            let heads = [&from, &to].map(|end| origin(end).0.num_heads().unwrap_or(1));
            let count = random_number(&mut random, heads[0].min(heads[1]));
            let is_relayout = order != other || heads != [count; 2];
            let heads = heads.map(|all| {
                let first = random_number(&mut random, all - count + 1) - 1;
                first..first + count
            });
            let (read, written) = random_blocks(&mut random, &from, &to);
            let layers = random_range(&mut random, shape.num_layers());
            let ends = ((&from, &read[..]), (&to, &written[..]));
            let access = fixture.access();
            // A decline is as valid as an exact copy.
            let copied = check_heads(&manager, access, ends.0, ends.1, layers, Some(heads));
            exact += usize::from(is_relayout && copied.is_ok());
        }
    });
    exact
}

/// A shape of one head, whose number is changed later.
fn random_heads(random: &mut Seeded) -> LayoutConfig {
    let element = match random.below(4) {
        0 => ElementFormat::MXFP4,
        1 => ElementFormat::RowBytes(random_number(random, 70)),
        _ => ElementFormat::Width(u8::try_from(random_number(random, 8)).expect("at most 8")),
    };
    let config = LayoutConfig::builder()
        .num_blocks(1)
        .num_layers(random_number(random, 3))
        .outer_dim(random_number(random, 2))
        .page_size(random_number(random, 9))
        .inner_dim(32 * random_number(random, 2))
        .num_heads(1)
        .element(element);
    config.build().expect("a valid config")
}
