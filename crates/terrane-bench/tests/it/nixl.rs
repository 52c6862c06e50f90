//! The suite `nixl` over the real library, with small amounts.

use std::collections::BTreeSet;
use std::process::Command;

use terrane_bench::Record;

use crate::{succeeds, text};

/// The factor by which the bindings alone may be faster.
const TARGET: f64 = 1.0 / 1.02;

/// The minimum saving from joining pieces of 4 KiB.
const JOINED: f64 = 2.0;

/// The cases that need a device.
const OF_DEVICES: [&str; 3] = [
    "16 MiB of pinned memory registered",
    "16 MiB of device memory registered",
    "16 MiB of device memory registered with GDS",
];

/// The expected case, unit, baseline and target of a record.
type Expected = (String, &'static str, String, Option<f64>);

#[test]
fn every_case_of_the_suite_nixl_runs() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nixl"));
    // Logs of UCX must not mix with the figures.
    command.args(["--smoke", "--json"]).env("UCX_LOG_LEVEL", "info").env_remove("UCX_LOG_FILE");
    let output = succeeds(command);
    let said = text(&output.stderr);
    assert!(said.contains("UCX"), "UCX logs nothing");
    let lines = text(&output.stdout);
    let records: Vec<Record> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut expected = expected();
    // A case that needs a device is measured, or skipped with the reason.
    for case in OF_DEVICES {
        if said.contains(&format!("skipped: nixl/{case}: ")) {
            expected.retain(|(expected, ..)| expected != case);
        }
    }
    let names = |cases: &mut dyn Iterator<Item = &String>| cases.cloned().collect::<BTreeSet<_>>();
    assert_eq!(
        names(&mut records.iter().map(|record| &record.case)),
        names(&mut expected.iter().map(|(case, ..)| case)),
    );
    assert_eq!(records.len(), expected.len(), "a case is reported twice");
    for (case, unit, baseline, target) in &expected {
        let record = records.iter().find(|record| record.case == *case).unwrap();
        assert_eq!((&record.suite[..], &record.unit[..]), ("nixl", *unit), "{record:?}");
        assert_eq!(record.baseline_name.as_ref(), Some(baseline), "{record:?}");
        for number in [record.value, record.baseline, record.ratio] {
            assert!(number.is_some_and(|number| number > 0.0), "{record:?}");
        }
        // Parsing the JSON may round the number.
        let promised = record.target.map(|target| (target * 1e6).round());
        assert_eq!(promised, target.map(|target| (target * 1e6).round()), "{record:?}");
        // A smoke run has no time targets, but `ok` must agree with the ratio.
        assert_eq!(record.ok, record.target <= record.ratio, "{record:?}");
    }
}

fn expected() -> Vec<Expected> {
    let mut all = Vec::new();
    // The amount, the piece and the number of pieces.
    for (moved, pieces, count, target, over_each) in [
        ("2 MiB", "32 KiB", 64, None, None),
        ("2 MiB", "32 KiB, 3 ms apart", 64, None, None),
        ("16 MiB", "4 KiB", 4096, Some(TARGET), Some(JOINED)),
        ("16 MiB", "32 KiB", 512, Some(TARGET), Some(TARGET)),
        ("16 MiB", "1 MiB", 16, Some(TARGET), Some(TARGET)),
        ("16 MiB", "whole blocks of 2 MiB", 8, Some(TARGET), Some(TARGET)),
    ] {
        for way in ["write", "read"] {
            let case = format!("{moved} in {pieces}, {way}");
            let listed = "nixl-sys, descriptors listed again".to_owned();
            let prepared = "nixl-sys, descriptors prepared".to_owned();
            let each = format!("nixl-sys, {count} descriptors");
            let joined = "nixl-sys, joined by hand".to_owned();
            all.extend([
                (format!("{case}, scattered"), "ms", listed, target),
                (format!("{case}, scattered, by number"), "ms", prepared, target),
                (format!("{case}, neighbours"), "ms", each, over_each),
                (format!("{case}, neighbours, joined"), "ms", joined, target),
            ]);
        }
    }
    for case in [
        "export of 80 layers",
        "import of 80 layers, connecting",
        "import of 80 layers, connected, with new keys",
        "import of 80 layers, all of it known",
    ] {
        all.push((case.to_owned(), "ms", "limit".to_owned(), Some(1.0)));
    }
    let first = "import of 80 layers, the agent's first connection".to_owned();
    all.push((first, "ms", "nixl-sys".to_owned(), Some(TARGET)));
    for how in ["connecting", "connected, with new keys"] {
        let case = format!("import of 80 layers, {how}, compared with NIXL");
        all.push((case, "ms", "nixl-sys".to_owned(), None));
    }
    for case in OF_DEVICES.into_iter().chain(["16 MiB registered"]) {
        all.push((case.to_owned(), "us", "nixl-sys and 1 us".to_owned(), Some(1.0)));
    }
    all
}
