//! Plans from files, machines and traces.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use terrane_cuda::{Calibration, CopyPath, Direction};
use terrane_plan::Machine;

use crate::support::{PROGRAM, config, json, run, text};

#[test]
fn a_model_is_a_name_a_file_or_a_folder() {
    let named = json(&["plan", "llama-3.1-8b", "--json"]);
    let file = json(&["plan", config().to_str().unwrap(), "--json"]);
    assert_eq!(named["groups"], file["groups"]);
    let folder = tempfile::tempdir().unwrap();
    fs::copy(config(), folder.path().join("config.json")).unwrap();
    let of_folder = json(&["plan", folder.path().to_str().unwrap(), "--json"]);
    assert_eq!(named["groups"], of_folder["groups"]);
    assert_eq!(json(&["plan", "meta-llama/Llama-3.1-8B", "--json"])["groups"], named["groups"]);
}

#[test]
fn every_model_and_machine_of_the_list_can_be_planned() {
    let list = text(&["plan", "--list"]);
    let (models, machines) = list.split_once("MACHINE").unwrap();
    let names = |part: &str| -> Vec<String> {
        // Continuation lines of the source begin with spaces.
        let lines = part.lines().skip(1).filter(|line| !line.starts_with(' ') && !line.is_empty());
        lines.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
    };
    let (models, machines) = (names(models), names(machines));
    assert!(models.len() >= 30 && machines.len() >= 12, "{models:?} {machines:?}");
    for model in &models {
        let plan = json(&["plan", model, "--host", "64GiB", "--json"]);
        assert!(plan["tiers"][0]["used_bytes"].as_u64().unwrap() > 0, "{model}");
    }
    for machine in &machines {
        let plan =
            json(&["plan", "llama-3.1-8b", "--host", "64GiB", "--machine", machine, "--json"]);
        assert_eq!(plan["machine"]["name"], **machine);
    }
}

#[test]
fn a_profile_is_a_pattern_for_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.json");
    let profile = String::from_utf8(run(&["plan", "--show-machine", "gb200"]).stdout).unwrap();
    fs::write(&file, profile.replace("\"gb200\"", "\"mine\"")).unwrap();
    let plan = json(&["plan", "qwen3-8b", "--machine", file.to_str().unwrap(), "--json"]);
    assert_eq!(plan["machine"]["name"], "mine");
}

#[test]
fn a_plan_takes_a_fifth_of_a_second_at_most() {
    // Other tests run at the same time, so one fast try of many is sufficient.
    let is_fast = (0..50).any(|_| {
        let begun = Instant::now();
        let arguments = ["plan", "deepseek_v32-defaults", "--host", "1TiB", "--disk", "/d:30TiB"];
        assert!(run(&arguments).status.success());
        begun.elapsed() < Duration::from_millis(200)
    });
    assert!(is_fast);
}

#[test]
fn limits_of_this_machine_are_found_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let disk = format!("{}:1PiB", directory.path().display());
    let arguments = [
        "plan",
        "llama-3.1-8b",
        "--here",
        "--host",
        "512TiB",
        "--disk",
        &disk,
        "--check",
        "--json",
    ];
    // A limit of locked memory, set by the shell that starts the command.
    let script = format!("ulimit -l 64 && exec {PROGRAM} \"$@\"");
    let output = Command::new("sh").args(["-c", &script, "sh"]).args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let limits = plan["limits"].as_array().unwrap();
    let find =
        |part: &str| limits.iter().find(|limit| limit["limit"].as_str().unwrap().contains(part));
    assert_eq!(find("memlock").unwrap()["available"], 64 << 10);
    assert!(find("host memory").is_some() && find("free space in").is_some(), "{limits:?}");
    let pages = find("huge pages").unwrap();
    // The command sets the machine's total, so the pages in use are added.
    let number = |name: &str| -> u64 {
        let folder = Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
        fs::read_to_string(folder.join(name)).unwrap().trim().parse().unwrap()
    };
    let total = 268_435_456 + number("nr_hugepages") - number("free_hugepages");
    let sysctl = format!("sudo sysctl -w vm.nr_hugepages={total}");
    assert!(pages["remedy"].as_str().unwrap().contains(&sysctl), "{pages}");
    assert_eq!(run(&["plan", "llama-3.1-8b", "--host", "1GiB", "--check"]).status.code(), Some(0));
}

#[test]
fn a_page_needs_no_other_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.html");
    let arguments = [
        "plan",
        "deepseek_v32-defaults",
        "--gpu-mem",
        "60GiB",
        "--host",
        "512GiB",
        "--disk",
        "/a<b>:4TiB",
        "--machine",
        "h200",
        "--context",
        "32k",
        "--users",
        "8",
        "--html",
        file.to_str().unwrap(),
    ];
    assert!(run(&arguments).status.success());
    let page = fs::read_to_string(file).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
    for reference in ["src=", "href=", "@import", "url(", "<script", "<b>"] {
        assert!(!page.contains(reference), "{reference}");
    }
    // The scale, and a picture of each of two groups in three tiers.
    assert_eq!(page.matches("<svg ").count(), 7);
    assert!(page.contains("/a&lt;b&gt;") && page.contains("vm.nr_hugepages=262144"));
    for tag in ["table", "svg", "h2", "pre", "p", "tr", "td"] {
        let opened =
            page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let script = format!("{PROGRAM} plan --list | head -n 1");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// `terrane-plan` does not depend on the transfer crates, so its figures are a copy of these.
#[test]
fn the_rates_of_the_h200_are_those_of_the_built_in_calibration() {
    let calibration = Calibration::built_in();
    let machine = Machine::published("h200").unwrap();
    let rates = machine.rates.unwrap();
    for (direction, planned) in
        [(Direction::ToDevice, rates.to_device), (Direction::ToHost, rates.to_host)]
    {
        let (planned, cost) = (planned.unwrap(), calibration.cost(direction, CopyPath::Staged));
        let cost = cost.unwrap();
        assert_eq!(planned.fixed_seconds, cost.fixed.as_secs_f64(), "{direction:?}");
        assert_eq!(planned.bytes_per_second, cost.bytes_per_second, "{direction:?}");
    }
}
