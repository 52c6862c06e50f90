//! Forged frames and their expected errors: handmade, and as files.

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use terrane_wire::WireError;

/// A name, a frame, and its expected error; alternatives are separated by `|`.
pub type Handmade = (&'static str, Vec<u8>, &'static str);

/// Checks that every frame is refused: the handmade ones, and those in this folder of `tests/corpus`.
///
/// The folder has a file for each former defect, and one for each handmade frame, written when the
/// version was introduced.
pub fn refuse<T: Debug>(
    folder: &str,
    handmade: &[Handmade],
    read: impl Fn(&[u8]) -> Result<T, WireError>,
) {
    let mut other_errors = Vec::new();
    for (name, bytes, expected) in handmade {
        let error = read(bytes).expect_err(name);
        if !says(&error, expected) {
            other_errors.push(format!("{name}: {error} instead of {expected}"));
        }
    }
    assert!(other_errors.is_empty(), "{}", other_errors.join("\n"));
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(folder);
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        let error = read(&fs::read(&path).unwrap()).expect_err(&path.display().to_string());
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if let Some((_, _, expected)) = handmade.iter().find(|(known, ..)| *known == name) {
            assert!(says(&error, expected), "{name}: {error}");
        }
        names.push(name);
    }
    for (name, bytes, _) in handmade {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(names.iter().any(|found| found == name), "no {folder}/{name}.bin: {hex}");
    }
}

fn says(error: &WireError, expected: &str) -> bool {
    let text = error.to_string();
    expected.split('|').any(|alternative| text.contains(alternative))
}
