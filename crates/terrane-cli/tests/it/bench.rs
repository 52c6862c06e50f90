//! Runs the user-facing suites with few bytes.

use std::fs;
use std::process::Command;

use crate::support::{PROGRAM, json, refused, run, text};

const SMALL: [&str; 6] = ["llama-3.2-1b", "--size", "4MiB", "--passes", "2", "--json"];

#[test]
fn the_suite_of_the_host_has_limits_and_ratios() {
    let report = json(&[&["bench", "host"][..], &SMALL].concat());
    assert_eq!((&report["schema"], &report["suite"]), (&"terrane.bench/1".into(), &"host".into()));
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let number = |field: &str| case[field].as_f64().unwrap();
        assert!(number("limit") > 0.0 && number("ratio") > 0.0, "{case}");
        let value = &case["value"];
        assert!(
            value["min"].as_f64() <= value["median"].as_f64()
                && value["median"].as_f64() <= value["max"].as_f64()
        );
    }
}

#[test]
fn the_suite_of_a_disk_leaves_nothing_behind_and_says_whether_fio_ran() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let report = json(&[&["bench", "disk", path][..], &SMALL].concat());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let names: Vec<&str> = report["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| case["case"].as_str().unwrap())
        .collect();
    let has_fio = names.iter().any(|name| name.contains("fio"));
    let limits = |text: &str| report["cases"].to_string().contains(text);
    assert!(has_fio != limits("raw loop (fio: "), "{report:#}");
    assert!(
        names.contains(&"full attention: write")
            && names.contains(&"full attention: read of one block")
    );
}

/// The only directory in PATH has no programs.
#[test]
fn without_fio_the_column_of_the_limit_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let arguments = ["bench", "disk", path, "llama-3.2-1b", "--size", "4MiB", "--passes", "1"];
    let output = Command::new(PROGRAM).args(arguments).env("PATH", path).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // The column is narrow, so the text is on several lines.
    for word in ["raw loop", "(fio:", "installed)"] {
        assert!(text.contains(word), "{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn the_suite_of_the_store_puts_and_gets_all_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let report = json(&[&["bench", "store", path][..], &SMALL].concat());
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 3);
    assert!(cases.iter().all(|case| case["ratio"].as_f64().unwrap() > 0.0), "{report:#}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn two_reports_are_compared_and_plotted() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, page] = ["a.json", "b.json", "page.html"]
        .map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    for file in [&a, &b] {
        let output = run(&[&["bench", "host", "--html", &page][..], &SMALL].concat());
        fs::write(file, output.stdout).unwrap();
    }
    let table = text(&["bench", "--compare", &a, &b]);
    assert!(table.contains("full attention: one block") && table.contains("BETTER BY"), "{table}");
    let page = fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("<svg ").count(), 2);
    assert!(page.contains("full attention: one block") && !page.contains("href="));
}

#[test]
fn a_gpu_is_measured_or_its_absence_is_one_line() {
    let output = run(&[&["bench", "gpu"][..], &SMALL].concat());
    if output.status.success() {
        return eprintln!("skipped: a_gpu_is_measured_or_its_absence_is_one_line: there is a GPU");
    }
    let (error, status) = refused(&["bench", "movers", "llama-3.2-1b"]);
    assert_eq!((error.lines().count(), status), (1, 1), "{error}");
    assert!(error.contains("install NVIDIA's driver"), "{error}");
}
