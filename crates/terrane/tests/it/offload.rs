//! The example `offload` succeeds, and prints results for programs and for people.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::run::{errors, files, offload, on_simulated_device, output};

const FIELDS: [&str; 7] =
    ["hop", "path", "bytes", "seconds", "gb_per_s", "limit_gb_per_s", "verified"];

/// The hops of a run without a device. The run must succeed.
fn hops(arguments: &[&str]) -> Vec<Value> {
    hops_of(offload(&["--without", "gpu"]), arguments)
}

/// The hops of a run with these arguments and those of `command`. The run must succeed.
fn hops_of(mut command: Command, arguments: &[&str]) -> Vec<Value> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let mut all = vec!["--json", "--rounds", "2", "--disk-path", path];
    all.extend(arguments);
    let output = command.args(&all).output().unwrap();
    assert!(output.status.success(), "{all:?}: {}", errors(&output));
    assert_eq!(files(directory.path()), [] as [PathBuf; 0], "{all:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn check(hop: &Value, bytes: u64) {
    let fields = hop.as_object().unwrap();
    assert_eq!(fields.len(), FIELDS.len(), "{hop}");
    for field in FIELDS {
        assert!(fields.contains_key(field), "{field} is missing: {hop}");
    }
    assert_eq!(hop["verified"], true, "{hop}");
    assert_eq!(hop["bytes"], bytes, "{hop}");
    let positive = |field: &str| hop[field].as_f64().is_some_and(|number| number > 0.0);
    assert!(positive("seconds") && positive("gb_per_s") && positive("limit_gb_per_s"), "{hop}");
    assert!(!hop["path"].as_str().unwrap().is_empty(), "{hop}");
}

#[test]
fn every_hop_of_a_model_is_verified() {
    let hops = hops(&["--blocks", "8"]);
    let names: Vec<_> = hops.iter().map(|hop| hop["hop"].as_str().unwrap()).collect();
    assert_eq!(names, ["compute to host", "host to disk", "disk to host", "host to compute"]);
    // 32 layers of 2 × 8 heads of 128 elements of 2 bytes for 16 tokens.
    hops.iter().for_each(|hop| check(hop, 8 * (2 << 20)));
}

#[test]
fn a_latent_is_moved() {
    let hops = hops(&["--model", "deepseek-v3", "--blocks", "3"]);
    // 61 layers of a latent of 576 elements of 2 bytes for 16 tokens.
    assert_eq!(hops.len(), 4);
    hops.iter().for_each(|hop| check(hop, 3 * 61 * 18_432));
}

#[test]
fn each_group_of_a_model_is_moved() {
    let hops = hops(&["--model", "gpt-oss-20b", "--blocks", "3"]);
    let names: Vec<_> = hops.iter().map(|hop| hop["hop"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 8);
    assert_eq!(
        names.iter().filter(|name| name.ends_with("(full attention)")).count(),
        4,
        "{names:?}"
    );
    assert_eq!(names.iter().filter(|name| name.contains("window of 128")).count(), 4, "{names:?}");
    // 12 layers each of 2 × 8 heads of 64 elements of 2 bytes for 16 tokens.
    hops.iter().for_each(|hop| check(hop, 3 * 12 * 2 * 8 * 64 * 2 * 16));
}

#[test]
fn the_other_built_in_models_are_moved() {
    for (model, layers) in [("llama-3.1-70b", 80), ("qwen3-8b", 36), ("qwen3-235b-a22b", 94)] {
        // 8 KV heads of 128, or 4 of them: one a rank.
        let ranks = if model == "qwen3-235b-a22b" { "4" } else { "8" };
        let hops = hops(&["--model", model, "--tensor-parallel", ranks, "--blocks", "2"]);
        hops.iter().for_each(|hop| check(hop, 2 * layers * 2 * 128 * 2 * 16));
    }
}

#[test]
fn odd_pages_and_other_options_work() {
    let hops = hops(&[
        "--page-size",
        "13",
        "--blocks",
        "5",
        "--tensor-parallel",
        "2",
        "--threads",
        "3",
        "--huge-pages",
        "none",
        "--seed",
        "18446744073709551615",
    ]);
    hops.iter().for_each(|hop| check(hop, 5 * 32 * 2 * 4 * 128 * 2 * 13));
}

#[test]
fn one_block_is_enough() {
    hops(&["--blocks", "1", "--huge-pages", "explicit"]).iter().for_each(|hop| check(hop, 2 << 20));
}

#[test]
fn people_get_a_table_and_the_reasons() {
    let output = output(&["--blocks", "4", "--rounds", "1", "-v", "--without", "gpu"]);
    assert!(output.status.success(), "{}", errors(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for said in [
        "llama-3.1-8b (llama)",
        "131072 bytes a token",
        "compute tier: system memory (as requested by --without gpu)",
        "direct I/O: ",
        "io_uring: ",
        "of padding",
        "huge pages: ",
        "runs of",
        "predicted",
        "| host to disk ",
        "| verified |",
        "| yes ",
    ] {
        assert!(text.contains(said), "the output lacks {said:?}:\n{text}");
    }
    assert!(!text.contains("| NO "), "{text}");
}

#[test]
fn blocks_go_from_the_device_to_pinned_memory_to_disk_and_back() {
    let name = "blocks_go_from_the_device_to_pinned_memory_to_disk_and_back";
    let Some(command) = on_simulated_device(name, &["--require", "gpu"]) else { return };
    let hops = hops_of(command, &["--blocks", "4"]);
    let names: Vec<_> = hops.iter().map(|hop| hop["hop"].as_str().unwrap()).collect();
    assert_eq!(names, ["device to pinned", "pinned to disk", "disk to pinned", "pinned to device"]);
    hops.iter().for_each(|hop| check(hop, 4 * (2 << 20)));
}

#[test]
fn a_latent_goes_through_the_device() {
    let name = "a_latent_goes_through_the_device";
    let Some(command) = on_simulated_device(name, &["--require", "gpu"]) else { return };
    let hops = hops_of(command, &["--model", "deepseek-v3", "--blocks", "3"]);
    hops.iter().for_each(|hop| check(hop, 3 * 61 * 18_432));
}

#[test]
fn people_hear_of_the_device() {
    let name = "people_hear_of_the_device";
    let Some(mut command) = on_simulated_device(name, &["--blocks", "2", "--rounds", "1", "-v"])
    else {
        return;
    };
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for said in
        ["device tier: ", "compute capability", "by cuda (", "| device to pinned ", "| yes "]
    {
        assert!(text.contains(said), "the output lacks {said:?}:\n{text}");
    }
    assert!(!text.contains("| NO "), "{text}");
}

/// The simulated driver could be used here, but `--without gpu` ignores it.
#[test]
fn without_a_gpu_means_without_one() {
    let name = "without_a_gpu_means_without_one";
    let Some(command) = on_simulated_device(name, &["--without", "gpu"]) else { return };
    let hops = hops_of(command, &["--blocks", "2"]);
    assert_eq!(hops[0]["hop"], "compute to host");
}
