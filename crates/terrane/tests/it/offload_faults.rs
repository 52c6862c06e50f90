//! The errors of the example when it cannot run, and the files that it leaves.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::run::{errors, files, offload, output, without_a_driver};

/// The run exits with this code. Standard error contains these texts, and standard output is empty.
fn fails(arguments: &[&str], code: i32, says: &[&str]) {
    let output = output(&[arguments, &["--json"]].concat());
    let text = errors(&output);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
    for said in says {
        assert!(text.contains(said), "{arguments:?} does not print {said:?}: {text}");
    }
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

#[test]
fn options_that_make_no_sense() {
    fails(&["--model", "llama-9"], 2, &["llama-9", "llama-3.1-8b", "gpt-oss-20b"]);
    fails(&["--tensor-parallel", "3"], 2, &["num_key_value_heads is 8", "3 tensor-parallel ranks"]);
    fails(&["--tensor-parallel", "0"], 2, &["--tensor-parallel"]);
    fails(&["--blocks", "0"], 2, &["--blocks"]);
    fails(&["--blocks", "4294967295"], 2, &["4294967295 blocks", "use fewer"]);
    fails(&["--page-size", "0"], 2, &["--page-size"]);
    fails(&["--frobnicate"], 2, &["--frobnicate"]);
}

/// The reason is typed: a missing library, an old driver, or no device.
#[test]
fn a_gpu_that_is_required_and_missing() {
    let run = |arguments: &[&str]| without_a_driver(arguments).output().unwrap();
    let refused = run(&["--require", "gpu", "--json"]);
    let text = errors(&refused);
    assert_eq!(refused.status.code(), Some(3), "{text}");
    assert!(text.contains("a GPU is required, but none can be used"), "{text}");
    let reasons = ["libcuda.so.1 cannot be loaded", "reports no device", "install a newer driver"];
    assert!(reasons.iter().any(|reason| text.contains(reason)), "{text}");
    assert!(refused.stdout.is_empty());

    let without = run(&["--blocks", "2", "--rounds", "1"]);
    let text = String::from_utf8(without.stdout).unwrap();
    assert!(without.status.success(), "{text}");
    assert!(text.contains("compute tier: system memory (no device: "), "{text}");
    fails(&["--require", "gpu", "--without", "gpu"], 2, &["cannot be used with"]);
}

#[test]
fn models_that_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let rwkv = write("rwkv.json", r#"{"model_type": "rwkv"}"#);
    fails(&["--model", &rwkv], 2, &["model_type is \"rwkv\"", "supported are", "llama"]);
    let empty = write("empty.json", "");
    fails(&["--model", &empty], 2, &["not a JSON object"]);
    let cut = write("cut.json", r#"{"model_type": "llama", "torch_dtype": "bfloat16"}"#);
    fails(&["--model", &cut], 2, &["missing", "llama"]);
    fails(&["--model", directory.path().to_str().unwrap()], 2, &["cannot read"]);
}

#[test]
fn more_blocks_than_memory() {
    fails(&["--blocks", "100000000"], 3, &["100000000 blocks", "are available", "would fit"]);
    fails(&["--page-size", "400000000"], 3, &["not one block fits"]);
}

#[test]
fn directories_that_cannot_be_used() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    fails(&["--disk-path", missing.to_str().unwrap()], 3, &["missing", "create it"]);
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    fails(&["--disk-path", file.to_str().unwrap()], 3, &["cannot hold the disk tier"]);
    // Root may write everywhere except where the kernel refuses it.
    fails(&["--disk-path", "/proc"], 3, &["cannot hold the disk tier", "/proc"]);
}

/// The reader of the output may close the pipe.
#[test]
fn a_closed_pipe_is_no_panic() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = offload(&["--blocks", "2", "--rounds", "1"]).stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    assert_eq!(errors(&output), "");
}

#[test]
fn a_kill_in_the_middle_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let mut child = offload(&["--blocks", "16", "--rounds", "1000", "--json", "--disk-path", path])
        .args(["--without", "gpu"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Wait until both files exist: the tier's file and the limits' file. If the file system has no
    // unnamed files, a file has a name for a moment.
    while nameless_files(child.id(), directory.path()) < 2 {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before the kill");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(files(directory.path()), [] as [PathBuf; 0]);
}

/// The number of files in `directory` that a process has open and that have no name any more.
fn nameless_files(process: u32, directory: &Path) -> usize {
    let targets = open_files(process, directory).into_iter();
    let targets = targets.filter_map(|path| fs::read_link(path).ok());
    let nameless = targets.filter(|target| target.to_string_lossy().ends_with(" (deleted)"));
    nameless.collect::<BTreeSet<_>>().len()
}

/// The files in `directory` that a process has open, with or without a name, as paths that open
/// them again.
fn open_files(process: u32, directory: &Path) -> Vec<PathBuf> {
    let descriptors = Path::new("/proc").join(process.to_string()).join("fd");
    let Ok(entries) = fs::read_dir(descriptors) else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let leads_there =
        |path: &PathBuf| fs::read_link(path).is_ok_and(|to| to.starts_with(directory));
    paths.filter(leads_there).collect()
}

/// Another thread overwrites the scratch files during the run. The run reports wrong bytes and fails.
#[test]
fn wrong_bytes_are_found() {
    // On a busy machine, a run can end before it reads an overwritten byte. Then a run with more
    // rounds is started.
    let mut outputs = ["40", "200", "1000"].into_iter().map(scribbled_into);
    let output = outputs.find(|output| !output.status.success());
    let output = output.expect("no run found any wrong byte");
    let text = errors(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("error: ") && text.contains("hops produced wrong bytes"), "{text}");
    assert!(text.contains("expected") && text.contains("found 0x5a"), "{text}");
    let lines = String::from_utf8(output.stdout).unwrap();
    assert!(lines.contains(r#""hop":"host to disk""#), "{lines}");
    assert!(lines.contains(r#""verified":false"#), "{lines}");
}

/// A run of this many rounds while a thread overwrites its files.
fn scribbled_into(rounds: &str) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let child = offload(&["--blocks", "4", "--rounds", rounds, "--json", "--disk-path", path])
        .args(["--without", "gpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (process, ended) = (child.id(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for path in open_files(process, directory.path()) {
                    // Descriptors close meanwhile, and then the file cannot be opened.
                    if let Ok(file) = fs::OpenOptions::new().write(true).open(path) {
                        let _ = file.write_at(&[0x5A; 4096], 3 << 20);
                    }
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let output = child.wait_with_output();
        ended.store(true, Ordering::Relaxed);
        output.unwrap()
    })
}

/// A tmpfs of 8 MiB can store neither the blocks nor, at first, more than its size.
#[test]
fn a_full_disk_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=8m", "terrane-test", path])
        .stderr(Stdio::null())
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("skipped: a_full_disk_is_an_error: a tmpfs cannot be mounted here (needs root)");
        return;
    }
    let full = output(&["--blocks", "16", "--json", "--disk-path", path]);
    let fits = output(&["--blocks", "1", "--json", "--rounds", "1", "--disk-path", path]);
    let left = files(directory.path());
    let unmounted = Command::new("umount").arg(path).status().unwrap();
    assert!(unmounted.success());

    assert_eq!(full.status.code(), Some(3), "{}", errors(&full));
    for said in ["cannot allocate the disk tier", "free space or choose another directory"] {
        assert!(errors(&full).contains(said), "{said:?} is not printed: {}", errors(&full));
    }
    assert!(fits.status.success(), "{}", errors(&fits));
    assert_eq!(left, [] as [PathBuf; 0]);
}
