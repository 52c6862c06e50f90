//! Tests of `run.sh` over scripts with the output of libtest, the benchmarks and the example.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A bundle of shell scripts.
struct Bundle(TempDir);

impl Bundle {
    fn new() -> Self {
        let bundle = Self(tempfile::tempdir().unwrap());
        fs::create_dir(bundle.path().join("tests")).unwrap();
        bundle.program("run.sh", include_str!("run.sh"));
        bundle
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a program from a separate process. If this process wrote it, a process that another
    /// test starts could inherit the open file for a moment, and an open file cannot be executed.
    fn program(&self, name: &str, text: &str) -> &Self {
        let mut writer = Command::new("sh")
            .args(["-c", "cat >\"$0\" && chmod 755 \"$0\""])
            .arg(self.path().join(name))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success());
        self
    }

    /// Writes a test binary. Each test has a name and a script as its body. A body that sets
    /// `result` to a value other than `ok` fails. A body that exits ends the binary.
    fn tests(&self, name: &str, tests: &[(&str, &str)]) -> &Self {
        let mut text = String::from("#!/bin/sh\nif [ \"$1\" = --list ]; then\n");
        for (test, _) in tests {
            text.push_str(&format!("echo '{test}: test'\n"));
        }
        text.push_str("exit\nfi\nselected=\" $* \"\nstatus=0\nprintf '\\nrunning tests\\n'\n");
        for (test, body) in tests {
            text.push_str(&format!(
                "case $selected in *' {test} '*) printf 'test {test} ... '; result=ok\n{body}\n\
                 echo \"$result\"; if [ \"$result\" = FAILED ]; then status=101; fi ;; esac\n"
            ));
        }
        text.push_str("printf '\\nfailures:\\n    some_ok\\n\\ntest result: ok. 1 passed\\n'\n");
        text.push_str("exit $status\n");
        self.program(&format!("tests/{name}"), &text)
    }

    /// Standard output and the exit code.
    fn run(&self, arguments: &[&str]) -> (String, i32) {
        let output = Command::new(self.path().join("run.sh"))
            .args(["--logs", self.path().join("logs").to_str().unwrap()])
            .args(arguments)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(errors, "", "{text}");
        let sums = text.lines().filter(|line| line.contains(" passed, ") && !line.contains(':'));
        assert_eq!(sums.count(), 1, "{text}");
        (text, output.status.code().unwrap())
    }
}

fn last_line(text: &str) -> &str {
    text.lines().last().unwrap()
}

#[test]
fn passes_failures_and_skips_are_distinguished() {
    let bundle = Bundle::new();
    bundle.tests(
        "first",
        &[
            ("a::good", "echo 'it says ok'"),
            ("a::bad", "echo 'assertion failed: 1 == 2' >&2; result=FAILED"),
            ("a::skips", "echo 'skipped: a::skips: no device' >&2"),
            ("a::ignored", "result='ignored, takes an hour'"),
            ("a::child", "echo 'test a::child ... ok'; echo 'test result: ok. 1 passed'"),
        ],
    );
    bundle.tests("second", &[("b", ":")]);
    let (text, code) = bundle.run(&["--only", "tests"]);
    assert_eq!(last_line(&text), "3 passed, 1 failed, 2 skipped", "{text}");
    assert_eq!(code, 1);
    for said in [
        "== machine",
        "tests/first: 2 passed, 1 failed, 2 skipped, in",
        "tests/second: 1 passed, 0 failed, 0 skipped, in",
        "---- FAILED: a::bad\nassertion failed: 1 == 2\nFAILED\n",
        "skipped: a::skips: no device\n",
        "skipped: a::ignored: takes an hour\n",
    ] {
        assert!(text.contains(said), "nothing is said of {said:?}:\n{text}");
    }
    assert!(!text.contains("it says ok"), "{text}");
}

#[test]
fn a_filter_chooses_tests() {
    let bundle = Bundle::new();
    bundle.tests("some", &[("copies::one", ":"), ("fills", "result=FAILED")]).tests("none", &[]);
    let (text, code) = bundle.run(&["--only", "tests", "--filter", "copies"]);
    assert_eq!((last_line(&text), code), ("1 passed, 0 failed, 1 skipped", 0), "{text}");
    assert!(text.contains("skipped: tests/none: no test's name contains `copies`"), "{text}");
}

#[test]
fn after_a_crash_the_other_tests_run() {
    let bundle = Bundle::new();
    bundle.tests(
        "crashing",
        &[
            ("before", ":"),
            ("crash", "echo 'all is ok'; kill -SEGV $$"),
            // The script sees this status when `timeout` kills a program.
            ("hang", "exit 124"),
            ("after", ":"),
        ],
    );
    let (text, code) = bundle.run(&["--only", "tests"]);
    assert_eq!((last_line(&text), code), ("2 passed, 2 failed, 0 skipped", 1), "{text}");
    assert!(text.contains("---- FAILED: crash\nall is ok\n"), "{text}");
    assert!(text.contains("the test binary ended here with status 124"), "{text}");
}

#[test]
fn a_test_that_hangs_is_killed() {
    let bundle = Bundle::new();
    bundle.tests("hanging", &[("hang", "exec sleep 100000")]);
    let (text, code) = bundle.run(&["--only", "tests", "--timeout", "1"]);
    assert_eq!((last_line(&text), code), ("0 passed, 1 failed, 0 skipped", 1), "{text}");
}

#[test]
fn binaries_that_do_not_start_have_failed() {
    let bundle = Bundle::new();
    bundle.program("tests/broken", "#!/bin/sh\necho 'GLIBC_9.99 not found' >&2\nexit 1\n");
    bundle.program("tests/silent", "#!/bin/sh\n[ \"$1\" = --list ] && echo 'x: test'\nexit 0\n");
    let (text, code) = bundle.run(&["--only", "tests"]);
    assert_eq!((last_line(&text), code), ("0 passed, 2 failed, 0 skipped", 1), "{text}");
    assert!(text.contains("GLIBC_9.99 not found"), "{text}");
    assert!(text.contains("before a test began"), "{text}");
}

const NO_DEVICE: &str = "#!/bin/sh\n\
    printf 'error: a GPU is required\\n  caused by: there is no driver\\n' >&2\nexit 3\n";

#[test]
fn the_tests_of_the_python_package_are_counted_with_their_skips() {
    let bundle = Bundle::new();
    let pytest = |result: &str, code: u8| {
        let lines =
            format!("print('skipped: tests::x: no device'); print('test result: {result}')");
        bundle.program("site/pytest.py", &format!("import sys; {lines}; sys.exit({code})\n"));
        let packed = ["-czf", "python.tar.gz", "site"];
        assert!(
            Command::new("tar").current_dir(bundle.path()).args(packed).status().unwrap().success()
        );
    };
    fs::create_dir_all(bundle.path().join("site")).unwrap();
    for (result, code, expected) in [
        ("ok. 3 passed; 0 failed; 0 ignored", 0, ("3 passed, 0 failed, 1 skipped", 0)),
        ("FAILED. 3 passed; 2 failed; 0 ignored", 1, ("3 passed, 2 failed, 1 skipped", 1)),
        ("ok. 3 passed; 0 failed; 0 ignored", 139, ("3 passed, 1 failed, 1 skipped", 1)),
        ("ok. 0 passed; 0 failed; 0 ignored", 5, ("0 passed, 0 failed, 1 skipped", 0)),
    ] {
        pytest(result, code);
        let (text, code) = bundle.run(&["--only", "python"]);
        assert_eq!((last_line(&text), code), expected, "{text}");
    }
}

#[test]
fn programs_pass_fail_or_are_skipped() {
    let bundle = Bundle::new();
    bundle.tests("t", &[("t", ":")]);
    bundle.program("offload", NO_DEVICE).program("calibrate", "#!/bin/sh\necho fast\n");
    let (text, code) = bundle.run(&[]);
    // The example, and the tests of PyTorch and of the Python package, which only a complete bundle
    // has.
    assert_eq!((last_line(&text), code), ("2 passed, 0 failed, 3 skipped", 0), "{text}");
    let reason = "skipped: example: a GPU is required: there is no driver\n";
    assert!(text.contains(reason), "{text}");

    bundle.program("offload", "#!/bin/sh\necho 'a byte is wrong' >&2; exit 1\n");
    let (text, code) = bundle.run(&["--only", "example"]);
    assert_eq!((last_line(&text), code), ("0 passed, 1 failed, 0 skipped", 1), "{text}");
    assert!(text.contains("a byte is wrong"), "{text}");
}

#[test]
fn benchmarks_write_json_and_take_arguments() {
    let bundle = Bundle::new();
    bundle.program(
        "bench",
        "#!/bin/sh\necho '{\"arguments\":\"'\"$*\"'\"}'\necho 'skipped: gpu/peer: one' >&2\n",
    );
    let json = bundle.path().join("measured.json");
    let (text, code) = bundle.run(&[
        "--only",
        "bench",
        "--json",
        json.to_str().unwrap(),
        "--",
        "--filter",
        "one block",
    ]);
    assert_eq!((last_line(&text), code), ("1 passed, 0 failed, 1 skipped", 0), "{text}");
    let measured = fs::read_to_string(&json).unwrap();
    assert_eq!(measured, "{\"arguments\":\"--json --filter one block\"}\n");
    assert!(text.contains("bench: missed 0 of 0 targets\n"), "{text}");

    // The form of a suite's output.
    let line = r#"{"suite":"gpu","case":"a, b","value":1.0,"unit":"GB/s","baseline":2.0,"baseline_name":"c","ratio":0.5,"target":0.97,"ok":false}"#;
    bundle.program("bench", &format!("#!/bin/sh\necho '{line}'\n"));
    let (text, code) = bundle.run(&["--only", "bench", "--json", json.to_str().unwrap()]);
    assert_eq!((last_line(&text), code), ("1 passed, 0 failed, 0 skipped", 0), "{text}");
    let missed = "bench: missed 1 of 1 targets\nmissed: a, b: ratio 0.5 of 0.97\n";
    assert!(text.contains(missed), "{text}");

    // Without a device a benchmark reports that, and measures nothing.
    bundle.program("bench", "#!/bin/sh\necho 'skipped: gpu/all: no device' >&2\n");
    let (text, _) = bundle.run(&["--only", "bench"]);
    assert_eq!(last_line(&text), "0 passed, 0 failed, 1 skipped", "{text}");
}

/// Returns the output of a suite for a missed target.
fn missed(suite: &str, case: &str) -> String {
    format!(
        r#"{{"suite":"{suite}","case":"{case}","value":1.0,"unit":"ms","baseline":0.5,"baseline_name":"c","ratio":0.5,"target":0.98,"ok":false}}"#
    )
}

#[test]
fn both_benchmarks_write_json_take_arguments_and_report_missed_targets() {
    let bundle = Bundle::new();
    let [ours, nixl] = [missed("gpu", "a, b"), missed("nixl", "64 MiB, read")];
    let program = |line| format!("#!/bin/sh\necho \"$*\" >\"$0.arguments\"\necho '{line}'\n");
    bundle.program("bench", &program(&ours)).program("bench-nixl", &program(&nixl));
    bundle.program("kernel-rates", "#!/bin/sh\necho 'contiguous: 1 on the device'\n");
    let json = bundle.path().join("measured.json");
    let options = ["--json", json.to_str().unwrap(), "--", "--filter", "a b"];
    let (text, code) = bundle.run(&[&["--only", "bench-nixl"], &options[..]].concat());
    assert_eq!((last_line(&text), code), ("1 passed, 0 failed, 0 skipped", 0), "{text}");
    assert_eq!(fs::read_to_string(&json).unwrap(), format!("{nixl}\n"));
    let said = "bench-nixl: missed 1 of 1 targets\nmissed: 64 MiB, read: ratio 0.5 of 0.98\n";
    assert!(text.contains(said), "{text}");

    // Together, each reports its own missed targets.
    bundle.program("offload", NO_DEVICE).program("calibrate", NO_DEVICE);
    let (text, code) = bundle.run(&[&["--bench"], &options[..]].concat());
    assert_eq!((last_line(&text), code), ("3 passed, 0 failed, 4 skipped", 0), "{text}");
    assert_eq!(fs::read_to_string(&json).unwrap(), format!("{ours}\n{nixl}\n"));
    assert!(text.contains("bench: missed 1 of 1 targets\nmissed: a, b: "), "{text}");
    assert!(text.contains(said), "{text}");
    for name in ["bench.arguments", "bench-nixl.arguments"] {
        let arguments = fs::read_to_string(bundle.path().join(name)).unwrap();
        assert_eq!(arguments, "--json --filter a b\n", "{name}");
    }

    // The filter may match the other suite.
    bundle.program("bench-nixl", "#!/bin/sh\n");
    let (text, code) = bundle.run(&[&["--only", "bench-nixl"], &options[..]].concat());
    assert_eq!((last_line(&text), code), ("0 passed, 0 failed, 1 skipped", 0), "{text}");
    assert!(text.contains("skipped: bench-nixl: it measured nothing, "), "{text}");
}

#[test]
fn rates_of_the_kernels_are_shown_on_request() {
    let bundle = Bundle::new();
    let said = "contiguous: 1300 on the device";
    bundle.program("kernel-rates", &format!("#!/bin/sh\necho '{said}'\n"));
    let (text, code) = bundle.run(&["--only", "kernel-rates"]);
    assert_eq!((last_line(&text), code), ("1 passed, 0 failed, 0 skipped", 0), "{text}");
    assert!(text.contains(&format!("== kernel-rates\n{said}\n")), "{text}");
    assert!(!bundle.run(&["--filter", "none"]).0.contains("kernel-rates"), "it was not requested");

    bundle.program("kernel-rates", "#!/bin/sh\necho 'nothing to measure: there is no driver'\n");
    let (text, code) = bundle.run(&["--only", "kernel-rates"]);
    assert_eq!((last_line(&text), code), ("0 passed, 0 failed, 1 skipped", 0), "{text}");
    assert!(text.contains("skipped: kernel-rates: there is no driver\n"), "{text}");
}

#[test]
fn the_copies_by_pytorch_are_a_separate_result() {
    let bundle = Bundle::new();
    let run = |doctor: u8, json: &str, status: u8| {
        let text = format!(
            "#!/bin/sh\nif [ $1 = doctor ]; then\necho 'terrane: required: gpu'; exit {doctor}\nfi\n\
             cat <<'END'\n{json}\nEND\nexit {status}\n"
        );
        bundle.program("terrane", &text);
        let (text, code) = bundle.run(&["--only", "movers"]);
        (last_line(&text).to_owned(), code, text)
    };
    let check = |(last, code, text): (String, i32, String), expected: &str, said: &str| {
        assert_eq!((last.as_str(), code), (expected, i32::from(!expected.contains("0 failed"))));
        assert!(text.contains(said), "nothing is said of {said:?}:\n{text}");
    };
    // The form of the command's output.
    let missing = |reason: &str| {
        let case = "full attention: PyTorch";
        format!(
            "{{\n  \"not_measured\": [\n    {{\n      \"case\": \"{case}\",\n      \"reason\": \"{reason}\"\n    }}\n  ]\n}}"
        )
    };
    let measured = "      \"case\": \"full attention, to pinned: PyTorch, copy_ of each row\",";
    check(run(0, measured, 0), "2 passed, 0 failed, 0 skipped", "movers/pytorch: passed\n");
    check(run(0, "{}", 0), "1 passed, 1 failed, 0 skipped", "neither times nor a reason");
    let torch = "python3 cannot import torch: no module";
    let said = format!("skipped: movers/pytorch: {torch}\n");
    check(run(0, &missing(torch), 0), "1 passed, 0 failed, 1 skipped", &said);
    let wrong = "PyTorch 2.9: a way copied wrong bytes";
    let said = format!("movers/pytorch: FAILED: {wrong}\n");
    check(run(0, &missing(wrong), 0), "1 passed, 1 failed, 0 skipped", &said);
    check(run(0, measured, 1), "0 passed, 1 failed, 0 skipped", "movers: FAILED with status 1");
    check(
        run(3, "", 1),
        "0 passed, 0 failed, 1 skipped",
        "skipped: movers: terrane: required: gpu\n",
    );
    assert!(!bundle.run(&["--filter", "none"]).0.contains("movers"), "it was not requested");
}

#[test]
fn the_sanitizer_judges_only_the_kernels() {
    let bundle = Bundle::new();
    bundle.tests("t", &[("kernels::copy", ":"), ("other", "result=FAILED")]);
    let (text, code) = bundle.run(&["--only", "sanitize"]);
    // An installed sanitizer runs shell scripts, which have no kernels.
    let sums = ["0 passed, 0 failed, 2 skipped", "2 passed, 0 failed, 0 skipped"];
    assert!(sums.contains(&last_line(&text)), "{text}");
    assert_eq!(code, 0);
}

#[test]
fn unknown_options_are_refused() {
    let bundle = Bundle::new();
    for arguments in [&["--frobnicate"][..], &["--only", "everything"], &["--timeout", "1 h"]] {
        let output = Command::new(bundle.path().join("run.sh")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
}
