//! Compares predicted bytes with those that an independent script derives from the shapes of
//! tensors.

use std::path::Path;

use serde_json::Value;
use terrane_core::ByteCount;
use terrane_plan::{Model, Plan, PlanError, PlanRequest, published_models};

#[test]
fn bytes_of_all_models_are_exactly_those_of_the_script() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../terrane-layout/tests/data/expected.json");
    let expected: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut plans = 0;
    for name in published_models() {
        for (ranks, groups) in expected[name].as_object().unwrap() {
            let mut request = PlanRequest::new(Model::published(name).unwrap());
            request.tensor_parallel = ranks.parse().unwrap();
            request.host = Some(ByteCount::gib(2048));
            let plan = Plan::new(&request);
            let Some(groups) = groups.as_array() else {
                assert!(matches!(plan, Err(PlanError::Model { .. })), "{name} on {ranks}");
                continue;
            };
            let plan = plan.unwrap();
            plans += 1;
            let sum =
                |field: &str| groups.iter().filter_map(|group| group[field].as_u64()).sum::<u64>();
            assert_eq!(plan.bytes_per_token, sum("bytes_per_token"), "{name} on {ranks}");
            assert_eq!(plan.bytes_per_sequence, sum("bytes_per_sequence"), "{name} on {ranks}");
            assert_eq!(plan.groups.len(), groups.len(), "{name} on {ranks}");
            for (group, figures) in plan.groups.iter().zip(groups) {
                let token = figures["bytes_per_token"].as_u64().unwrap_or(0);
                let state = figures["bytes_per_sequence"].as_u64().unwrap_or(0);
                assert_eq!(
                    (group.bytes_per_token, group.bytes_per_sequence),
                    (token, state),
                    "{name}"
                );
                assert_eq!(group.block_bytes, 16 * token + state, "{name}");
                assert_eq!(group.chunk_bytes, 256 * token, "{name}");
            }
            // The tier's bytes are the sum of its blocks, its states and its padding.
            let tier = &plan.tiers[0];
            let of_blocks =
                tier.blocks * 16 * sum("bytes_per_token") + tier.states * sum("bytes_per_sequence");
            assert_eq!(tier.padding.block_bytes, of_blocks, "{name} on {ranks}");
            let padding = tier.padding;
            let all = of_blocks + padding.block_alignment + padding.regions_and_pages;
            assert_eq!(all, tier.used_bytes, "{name} on {ranks}");
            assert_eq!(all + padding.remainder, tier.given_bytes, "{name} on {ranks}");
        }
    }
    assert!(plans >= 90, "{plans}");
}
