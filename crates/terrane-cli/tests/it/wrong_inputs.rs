//! Wrong inputs: each causes one line that states the remedy.

use std::fs;

use crate::support::refused;

/// Arguments, the exit status, and the required parts of the line.
type Case<'a> = (&'a [&'a str], i32, &'a [&'a str]);

#[test]
fn every_wrong_input_gets_one_line_that_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let lacking = file("lacking.json", r#"{"name": "mine", "sources": [], "date": "2026-11-23"}"#);
    let broken = file("broken.json", "{");
    let unknown = file("unknown.json", r#"{"model_type": "lama", "hidden_size": 8}"#);
    let no_layers = file(
        "no-layers.json",
        r#"{"model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096}"#,
    );
    let trace = file("trace.txt", "a b\n{\"ids\": 1}\n");
    let empty = file("empty.txt", "\n");
    let page = folder.path().join("none/page.html");
    let page = page.to_str().unwrap();
    let model = "llama-3.1-8b";
    let cases: &[Case<'_>] = &[
        (&["plan", "lama-3.1-8b"], 2, &["did you mean \"llama-3.1-8b\"", "terrane plan --list"]),
        (&["plan"], 2, &["no model was named", "--list"]),
        (&["plan", "missing.json"], 1, &["missing.json", "check the path"]),
        (&["plan", &broken], 2, &["broken.json", "not a JSON object", "config.json"]),
        (&["plan", &unknown], 2, &["model_type is \"lama\"", "supported are"]),
        (&["plan", &no_layers], 2, &["num_hidden_layers is missing"]),
        (&["plan", model, "--tp", "3"], 2, &["cannot be divided among 3", "use a number of ranks"]),
        (&["plan", model, "--tp", "0"], 2, &["use at least 1"]),
        (&["plan", model, "--host", "12 gigs"], 2, &["not a size", "256GiB"]),
        (&["plan", model, "--disk", "/cache"], 2, &["/mnt/nvme:2TiB"]),
        (&["plan", model, "--context", "many"], 2, &["not a number", "128k"]),
        (&["plan", model, "--context", "128k"], 2, &["without the number of users", "pass both"]),
        (&["plan", model, "--block", "0"], 2, &["the block size is 0", "1 to 65,536"]),
        (&["plan", model, "--chunk", "100"], 2, &["the chunk size is 100", "multiple"]),
        (&["plan", model, "--host", "1MiB"], 2, &["the tier host has 1 MiB", "takes 2 MiB"]),
        (&["plan", model, "--machine", "h20"], 2, &["did you mean \"h200\""]),
        (&["plan", model, "--machine", &lacking], 2, &["missing field `title`", "--show-machine"]),
        (&["plan", model, "--machine", "h200", "--here"], 2, &["--here"]),
        (&["plan", model, "--trace", &trace], 2, &["line 2 of the trace", "hash_ids"]),
        (&["plan", model, "--trace", &empty], 2, &["the trace has no key"]),
        (&["plan", model, "--html", page], 1, &["cannot be written", "check the path"]),
        (&["plan", model, "--kv-dtype", "int7"], 2, &["fp8"]),
        (&["plam", model], 2, &["plan"]),
        (&["doctor", "--require", "direct_io"], 2, &["direct-io"]),
        (&["doctor", "--machine-file", page], 1, &["cannot be written"]),
        (&["layout", model, "--group", "1"], 2, &["there is no group 1", "counted from 0"]),
        (&["layout", model, "--blocks", "0"], 2, &["1..=64"]),
        (&["bench"], 2, &["no suite was named", "disk DIR"]),
        (&["bench", "host", model, "--size", "1MiB"], 2, &["1 MiB", "as --size"]),
        (&["bench", "disk", "/no/such", model], 1, &["/no/such", "does not exist"]),
        (&["bench", "--compare", &broken, &broken], 2, &["broken.json", "--json"]),
        (&["store", "ls", "/no/such"], 1, &["/no/such", "check the path"]),
        (&["store", "why", "/tmp", "0x1", "--namespace", "n"], 2, &["even number of digits"]),
        (&["store", "stat", "/tmp", "--namespace", "n", "--over", "0"], 2, &["0.001 to 86400"]),
        (&["store", "stat", "/tmp", "--drive-tbw", "600TB"], 2, &["--over"]),
        (&["completions", "shell"], 2, &["bash"]),
    ];
    assert!(cases.len() >= 20);
    for (arguments, status, parts) in cases {
        let (error, found) = refused(arguments);
        assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
        assert!(error.starts_with("terrane: "), "{arguments:?}: {error}");
        assert_eq!(found, *status, "{arguments:?}: {error}");
        for part in *parts {
            assert!(error.contains(part), "{arguments:?} lacks {part:?}: {error}");
        }
    }
}
