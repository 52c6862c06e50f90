//! Frames that nobody honest sends, and what their refusals have to say: made by hand, and as files.

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use terrane_wire::WireError;

/// A name, a frame, and what its refusal says; or one of several things, with `|` in between.
pub type Handmade = (&'static str, Vec<u8>, &'static str);

/// Has every frame refused: those made by hand, and those in this folder of `tests/corpus`.
///
/// What was ever found to be read wrongly is a file there, and so is every handmade frame, as it was when
/// the version was made.
pub fn refuse<T: Debug>(
    folder: &str,
    handmade: &[Handmade],
    read: impl Fn(&[u8]) -> Result<T, WireError>,
) {
    for (name, bytes, expected) in handmade {
        let error = read(bytes).expect_err(name);
        assert!(says(&error, expected), "{name}: {error}");
    }
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
