//! Layouts and the runs between them.

use crate::support::text;

#[test]
fn runs_of_a_transfer_are_those_of_the_layouts() {
    let text = text(&["layout", "llama-3.1-8b", "--tiers", "device,host,disk"]);
    // 32 layers, with K and V adjacent in each: 64 pieces, 32 runs. Between host and disk, one
    // block is one run.
    assert!(
        text.contains("device to host: 2 MiB in 64 pieces becomes 32 runs of 64 KiB"),
        "{text}"
    );
    assert!(text.contains("host to disk: 2 MiB in 64 pieces becomes one run\n"), "{text}");
    assert!(
        text.contains("explain: 2 MiB from system memory to a disk")
            || text.contains("explain: 2 MiB from"),
        "{text}"
    );
}

#[test]
fn one_group_can_be_chosen() {
    let text = text(&["layout", "gpt-oss-20b", "--group", "1", "--tiers", "host"]);
    assert!(text.starts_with("group 1: attention in a window of 128, 12 layers"), "{text}");
    assert!(!text.contains("group 0"));
}
