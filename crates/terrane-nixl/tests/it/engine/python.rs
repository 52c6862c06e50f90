//! A NIXL agent in Python without Terrane, in a child process.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use terrane_core::{RemoteSpace, StorageKind};
use terrane_layout::Geometry;
use terrane_nixl::ForeignLayout;
use terrane_wire::RegionDescriptor;

/// The variable that names the folder of NIXL for Python, which `cargo xtask test` sets.
const SITE: &str = "TERRANE_TEST_PYTHON_SITE";

/// Returns the folder, or prints the skip of `test`.
#[expect(clippy::disallowed_methods, reason = "tests find out what they run with")]
pub fn site(test: &str) -> Option<PathBuf> {
    let site = std::env::var_os(SITE);
    if site.is_none() {
        eprintln!(
            "skipped: {test}: no NIXL for Python ({SITE}), which `cargo xtask test` installs"
        );
    }
    site.map(PathBuf::from)
}

pub struct Python {
    pub child: Child,
    output: BufReader<ChildStdout>,
    name: String,
}

impl Python {
    /// Starts an agent of this name with this many bytes of registered memory.
    pub fn start(site: &PathBuf, name: &str, bytes: usize) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/engine/python/peer.py");
        let mut child = Command::new("python3")
            .args([script, name, &bytes.to_string()])
            .env("PYTHONPATH", site)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            // Python's NIXL finds the libraries of its own wheel.
            .env_remove("LD_LIBRARY_PATH")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut python = Self { child, output, name: name.to_owned() };
        assert_eq!(python.read_answer(), "ready");
        python
    }

    /// The answer to a command.
    pub fn ask(&mut self, command: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        self.read_answer()
    }

    /// As above, in bytes.
    pub fn bytes(&mut self, command: &str) -> Vec<u8> {
        let answer = self.ask(command);
        let digits = answer.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
        digits.map(|two| u8::from_str_radix(two, 16).unwrap()).collect()
    }

    /// The next line that is an answer: NIXL and UCX may write other lines.
    fn read_answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the other process has ended");
            if let Some((_, text)) = line.trim_end().split_once('@') {
                return text.to_owned();
            }
        }
    }

    /// Its memory as a layout of one region.
    pub fn layout<'a>(
        &mut self,
        geometry: Geometry,
        metadata: &'a [&'a [u8]],
    ) -> ForeignLayout<'a> {
        let address = self.ask("address").parse().unwrap();
        let length = geometry.region_bytes(0);
        ForeignLayout {
            geometry,
            storage: StorageKind::System,
            agent: self.name.as_str().into(),
            metadata,
            regions: vec![RegionDescriptor::new(RemoteSpace::Host, address, length, [])],
        }
    }

    /// Kills the process, whatever it is doing.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
