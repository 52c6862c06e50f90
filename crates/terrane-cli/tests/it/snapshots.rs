//! Compares outputs with files. `TERRANE_SNAPSHOTS=write` writes the files; read the difference
//! before a commit.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{json, text};

#[expect(clippy::disallowed_methods, reason = "the developer's choice")]
pub fn check(name: &str, found: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/snapshots").join(name);
    if std::env::var_os("TERRANE_SNAPSHOTS").is_some_and(|value| value == "write") {
        fs::write(&file, found).unwrap();
    }
    let expected = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    assert!(expected == found, "{file:?} differs; expected:\n{expected}\nfound:\n{found}");
}

const FULL: [&str; 18] = [
    "plan",
    "deepseek_v32-defaults",
    "--tp",
    "8",
    "--gpu-mem",
    "60GiB",
    "--host",
    "512GiB",
    "--disk",
    "/cache:4TiB",
    "--context",
    "128k",
    "--users",
    "64",
    "--machine",
    "h200",
    "--block",
    "64",
];

#[test]
fn plans_of_several_kinds_of_models_read_as_before() {
    check("plan-full.txt", &text(&FULL));
    check("plan-bare.txt", &text(&["plan", "qwen3-32b"]));
    let hybrid = [
        "plan",
        "qwen3_next-defaults",
        "--host",
        "64GiB",
        "--kv-dtype",
        "fp8",
        "--machine",
        "l40s",
    ];
    check("plan-hybrid.txt", &text(&hybrid));
    let windows = [
        "plan",
        "gpt-oss-20b",
        "--host",
        "64GiB",
        "--context",
        "32k",
        "--users",
        "100",
        "--machine",
        "cpu",
    ];
    check("plan-windows.txt", &text(&windows));
}

#[test]
fn layouts_read_as_before() {
    let latent = ["layout", "deepseek-v3", "--block", "64", "--tiers", "device,host"];
    check("layout-latent.txt", &text(&latent));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    text(&["layout", "llama-3.2-1b", "--tp", "8", "--tiers", "host", "--svg", path]);
    let svg: PathBuf = folder.path().join("group0-host.svg");
    check("layout.svg", &fs::read_to_string(svg).unwrap());
}

/// The path of each JSON value, with its type. All items of a list have one path.
fn form(value: &Value, path: &str, lines: &mut Vec<String>) {
    let mut add = |kind: &str| lines.push(format!("{path}: {kind}"));
    match value {
        Value::Null => add("null"),
        Value::Bool(_) => add("boolean"),
        Value::Number(number) if number.is_f64() => add("number"),
        Value::Number(_) => add("integer"),
        Value::String(_) => add("string"),
        Value::Array(items) => {
            add("list");
            items.iter().for_each(|item| form(item, &format!("{path}[]"), lines));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, item)| form(item, &format!("{path}.{name}"), lines));
        }
    }
}

#[test]
fn the_json_of_a_plan_has_the_documented_form() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    fs::write(&trace, "a b c\na b d\n").unwrap();
    let mut arguments = FULL.to_vec();
    arguments.extend(["--json", "--trace", trace.to_str().unwrap()]);
    let mut lines = Vec::new();
    let plan = json(&arguments);
    assert_eq!(plan["schema"], "terrane.plan/1");
    form(&plan, "plan", &mut lines);
    lines.sort();
    lines.dedup();
    check("plan.form.txt", &(lines.join("\n") + "\n"));
}

#[test]
fn completions_know_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script =
            String::from_utf8(crate::support::run(&["completions", shell]).stdout).unwrap();
        for word in ["plan", "doctor", "layout", "bench", "gpu-mem", "require"] {
            assert!(script.contains(word), "{shell} lacks {word}");
        }
    }
}
