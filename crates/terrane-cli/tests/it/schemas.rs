//! Checks the JSON output of each command against its schema in `docs/schemas`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::store::{open, put};
use crate::support::json;

/// Checks a value against a schema of `docs/schemas`.
pub fn check(name: &str, value: &Value) {
    let errors = errors(name, value);
    assert!(errors.is_empty(), "{name}: {}", errors.join("\n"));
}

/// The differences between a value and a schema. Unknown and missing fields are errors.
fn errors(name: &str, value: &Value) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas");
    let text = fs::read(folder.join(format!("{name}.json"))).unwrap();
    let schema: Value = serde_json::from_slice(&text).unwrap();
    jsonschema::meta::validate(&schema).unwrap_or_else(|error| panic!("{name}: {error}"));
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors = validator.iter_errors(value);
    errors.map(|error| format!("{}: {error}", error.instance_path())).collect()
}

#[test]
fn a_schema_refuses_a_field_that_is_missing_or_unknown() {
    let errors = |value: &str| errors("store-why", &serde_json::from_str(value).unwrap());
    assert!(errors(r#"{"schema": "terrane.store.why/1", "as_of": 1, "block": null}"#).is_empty());
    for wrong in [
        r#"{"schema": "terrane.store.why/1", "as_of": 1}"#,
        r#"{"schema": "terrane.store.why/1", "as_of": 1, "block": null, "more": 1}"#,
        r#"{"schema": "terrane.store.why/2", "as_of": 1, "block": null}"#,
        r#"{"schema": "terrane.store.why/1", "as_of": -1, "block": null}"#,
    ] {
        assert_eq!(errors(wrong).len(), 1, "{wrong}");
    }
}

/// The command refuses the same values.
#[test]
fn a_schema_refuses_rates_and_times_that_cannot_be() {
    let set = |name: &str, value: &Value, path: &str, wrong: f64| {
        let mut value = value.clone();
        *value.pointer_mut(path).unwrap() = wrong.into();
        errors(name, &value).len()
    };
    let machine = json(&["plan", "--show-machine", "h200"]);
    for (path, wrong) in [
        ("/rates/to_host/fixed_seconds", -1e-6),
        ("/rates/to_host/bytes_per_second", 0.5),
        ("/device/memory_bytes_per_second", 0.0),
        ("/device/memory_bytes", -1.0),
    ] {
        assert_eq!(set("machine", &machine, path, wrong), 1, "{path}");
        assert_eq!(set("machine", &machine, path, 1.0), 0, "{path}");
    }
    let report = json(&["doctor", "--measure", "--size", "4MiB", "--json"]);
    for path in ["/seconds", "/measured/0/seconds", "/measured/0/bytes_per_second"] {
        assert_eq!(set("doctor", &report, path, -1.0), 1, "{path}");
    }
    let suite =
        json(&["bench", "host", "llama-3.2-1b", "--size", "4MiB", "--passes", "1", "--json"]);
    for (path, wrong) in
        [("/passes", 0.0), ("/cases/0/value/median", -1.0), ("/cases/0/ratio", -1.0)]
    {
        assert_eq!(set("bench", &suite, path, wrong), 1, "{path}");
    }
}

#[test]
fn plans_and_machines_have_the_form_of_their_schemas() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    fs::write(&trace, "a b c\na b d\n").unwrap();
    let trace = trace.to_str().unwrap();
    let full = ["--gpu-mem", "60GiB", "--host", "512GiB", "--disk", "/d:4TiB", "--trace", trace];
    let users = ["--context", "32k", "--users", "8", "--json"];
    for model in ["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b", "qwen3_next-defaults"] {
        check("plan", &json(&["plan", model, "--json"]));
        for machine in [&["--machine", "h200"][..], &["--machine", "cpu"], &["--here"]] {
            check("plan", &json(&[&["plan", model], machine, &full, &users].concat()));
        }
    }
    for machine in ["h200", "gb200", "cpu"] {
        check("machine", &json(&["plan", "--show-machine", machine]));
    }
}

#[test]
fn a_report_of_the_doctor_and_its_machine_have_the_form_of_their_schemas() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().to_str().unwrap(), folder.path().join("machine.json"));
    check("doctor", &json(&["doctor", path, "/no/such", "--json"]));
    let file = file.to_str().unwrap();
    let measured = ["doctor", path, "--measure", "--size", "8MiB", "--machine-file", file];
    check("doctor", &json(&[&measured[..], &["--json"]].concat()));
    check("machine", &serde_json::from_slice(&fs::read(file).unwrap()).unwrap());
}

#[test]
fn reports_of_suites_have_the_form_of_their_schema() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let small = ["llama-3.2-1b", "--size", "4MiB", "--passes", "2", "--json"];
    for suite in [&["bench", "host"][..], &["bench", "disk", path], &["bench", "store", path]] {
        check("bench", &json(&[suite, &small].concat()));
    }
}

#[test]
fn answers_about_a_store_have_the_form_of_their_schemas() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let store = open(folder.path(), "llama");
    put(&store, "prefix-1", 1);
    check("store-ls", &json(&["store", "ls", path, "--json"]));
    let watched = ["--over", "0.1", "--drive-tbw", "600TB", "--json"];
    check("store-stat", &json(&[&["store", "stat", path][..], &watched].concat()));
    check("store-why", &json(&["store", "why", path, "prefix-1", "--json"]));
    check("store-why", &json(&["store", "why", path, "prefix-2", "--json"]));
    check("store-verify", &json(&["store", "verify", path, "--json"]));
    drop(store);
    check("store-stat", &json(&["store", "stat", path, "--json"]));
    check("store-verify", &json(&["store", "scrub", path, "--json"]));
    check("store-clear", &json(&["store", "clear", path, "--yes", "--json"]));
}
