//! Checks that the tests in `docs/parity.md` exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn page() -> String {
    fs::read_to_string(crates().join("../docs/parity.md")).unwrap()
}

/// The tests in a text: `crate/path/file.rs::function` between backticks, or the same for a Python
/// file.
fn named_tests(text: &str) -> Vec<(&str, &str)> {
    let names = text.split('`').filter_map(|code| code.split_once("::"));
    names.filter(|(file, _)| file.ends_with(".rs") || file.ends_with(".py")).collect()
}

#[test]
fn every_test_that_is_named_exists() {
    let page = page();
    let tests = named_tests(&page);
    assert!(tests.len() > 40, "only {} tests are named", tests.len());
    for (file, function) in tests {
        let path = crates().join(file);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let keyword = if file.ends_with(".py") { "def" } else { "fn" };
        assert!(
            text.contains(&format!("{keyword} {function}(")),
            "{path:?} has no test {function}"
        );
    }
}

#[test]
fn every_row_is_there_once_and_proved_or_open() {
    let page = page();
    let counts = [12, 9, 12, 8, 10, 14, 7, 8, 5];
    let sections: Vec<(char, u32)> = "ABCDEFGHJ".chars().zip(counts).collect();
    let expected: BTreeSet<String> = sections
        .iter()
        .flat_map(|&(part, rows)| (1..=rows).map(move |row| format!("{part}{row}")))
        .collect();
    let mut found = BTreeSet::new();
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let row = line.split('|').nth(1).unwrap().trim().to_owned();
        if row == "row" {
            continue;
        }
        let is_open = line.contains("`open`");
        let is_proved = !named_tests(line).is_empty();
        let is_partly = line.contains("*partly*");
        assert!(is_open || is_proved, "{row} names no test and is not open");
        assert_eq!(is_open && is_proved, is_partly, "{row} must state what is open");
        assert!(found.insert(row.clone()), "{row} occurs twice");
    }
    assert_eq!(found, expected);
}
