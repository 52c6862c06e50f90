//! The live view of a store.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::snapshots::check;
use crate::store::{open, put};
use crate::support::{refused, text};

/// The metrics of a store after one hit and one miss.
pub fn metrics(directory: &Path) -> String {
    let store = open(directory, "llama");
    put(&store, "prefix-1", 1);
    let mut text = String::new();
    store.snapshot().write_openmetrics(&mut text).unwrap();
    text
}

#[test]
fn totals_of_a_file_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.txt");
    fs::write(&file, metrics(&folder.path().join("store"))).unwrap();
    let text = text(&["top", file.to_str().unwrap(), "--once", "--totals"]);
    let (title, tables) = text.split_once('\n').unwrap();
    assert!(title.ends_with("totals; q ends"), "{title}");
    for part in ["TIER", "CAPACITY", "disk", "FILLED", "REASON", "absent", "JOBS RUNNING"] {
        assert!(tables.contains(part), "{part}: {text}");
    }
}

/// Serves two requests.
fn serve(listener: &TcpListener, answers: [String; 2]) {
    for answer in answers {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 1024];
        let length = stream.read(&mut request).unwrap();
        assert!(request[..length].starts_with(b"GET /metrics HTTP/1.0\r\n"));
        let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n";
        stream.write_all(format!("{head}{answer}").as_bytes()).unwrap();
    }
}

fn example(factor: u64) -> String {
    let mut text = String::new();
    for (tier, hits, bytes) in
        [("device", 900, 90_000_000), ("host", 300, 30_000_000), ("disk", 100, 10_000_000)]
    {
        text += &format!(
            "terrane_store_tier_hits_total{{tier=\"{tier}\"}} {}\nterrane_store_tier_read_bytes_total{{tier=\"{tier}\"}} {}\n\
             terrane_store_tier_capacity_bytes{{tier=\"{tier}\"}} 64000000000\n\
             terrane_store_tier_slots{{tier=\"{tier}\",group=\"0\"}} 32768\nterrane_store_tier_blocks{{tier=\"{tier}\",group=\"0\"}} 16384\n",
            hits * factor,
            bytes * factor,
        );
    }
    for (reason, count) in [("absent", 60), ("evicted", 40), ("wrong_length", 0)] {
        text += &format!("terrane_store_misses_total{{reason=\"{reason}\"}} {}\n", count * factor);
    }
    text + "terrane_store_jobs_running 3\nterrane_store_jobs_waiting_for_room 1\n\
            terrane_transfer_queue_depth{path=\"direct kernel\"} 12\n# EOF\n"
}

#[test]
fn the_view_of_totals_reads_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.txt");
    fs::write(&file, example(1)).unwrap();
    let text = text(&["top", file.to_str().unwrap(), "--once", "--totals"]);
    check("top.txt", text.split_once('\n').unwrap().1);
}

#[test]
fn an_endpoint_gives_rates_between_two_readings() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/metrics", listener.local_addr().unwrap());
    let text = thread::scope(|scope| {
        scope.spawn(|| serve(&listener, [example(1), example(2)]));
        text(&["top", &url, "--once", "--interval", "0.1"])
    });
    assert!(
        text.contains("HITS/s") && text.lines().next().unwrap().contains("rates; q ends"),
        "{text}"
    );
    // The shares of the hits do not depend on the time between the readings: 900 of 1,400.
    let device = text.lines().find(|line| line.starts_with("device")).unwrap();
    assert!(device.contains("64.3 %"), "{text}");
}

#[test]
fn sources_that_are_no_metrics_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("page.html");
    fs::write(&file, "<html>\n").unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let closed = format!("http://{closed}/metrics");
    // The system accepts the connection, but sends no response.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_url = format!("http://{}/metrics", silent.local_addr().unwrap());
    for (arguments, status, part) in [
        (&["top", file.to_str().unwrap(), "--once"][..], 2, "is not a metric"),
        (&["top", "/no/such", "--once"], 1, "check the path"),
        (&["top", "https://here/metrics"], 2, "use http"),
        (&["top", &closed, "--once"], 1, "check the host, the port"),
        (&["top", &silent_url, "--once"], 1, "check the host, the port"),
        (&["top", "/no/such", "--interval", "0"], 2, "--interval 0 is out of range"),
    ] {
        let (error, found) = refused(arguments);
        assert_eq!((error.lines().count(), found), (1, status), "{error}");
        assert!(error.contains(part), "{error}");
    }
}

/// The example `store` of the facade, next to this test's folder. `None`, with a printed skip, if
/// it is not built.
fn example_store(test: &str) -> Option<PathBuf> {
    let binary = std::env::current_exe().unwrap();
    let example = binary.ancestors().nth(2).unwrap().join("examples/store");
    if !example.is_file() {
        eprintln!(
            "skipped: {test}: the example is not built; `cargo build --example store` does so"
        );
        return None;
    }
    Some(example)
}

#[test]
fn the_metrics_of_the_example_store_are_shown() {
    let Some(example) = example_store("the_metrics_of_the_example_store_are_shown") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (folder.path().join("store"), folder.path().join("metrics"));
    fs::create_dir(&store).unwrap();
    let small = ["--sessions", "2", "--turns", "3", "--blocks", "2", "--shared", "2"];
    let ended = Command::new(example)
        .args(small)
        .args(["--host-blocks", "6", "--disk-blocks", "20", "--directory"])
        .args([&store, Path::new("--metrics"), &file])
        .output()
        .unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let text = text(&["top", file.to_str().unwrap(), "--once", "--totals"]);
    let hits = text.lines().find(|line| line.starts_with("host ")).unwrap();
    assert!(hits.contains("12.58 MB"), "six blocks of 2 MiB: {text}");
    assert!(text.lines().any(|line| line.starts_with("disk ")), "{text}");
}
