//! Compares the position of every element of every format with NumPy's.
//!
//! `oracle.py` contains the tensors' shapes and no strides. Its output for the small sizes is in
//! `expected.txt`, so that the comparison needs no Python. If Python has NumPy, a test compares the
//! file with the script's output, and another test compares other sizes.

use std::path::{Path, PathBuf};
use std::process::Command;

use terrane_layout::{Geometry, RegionOffset, Section, verify};

use terrane_testkit::formats::{self as cases, SMALL, Sizes};

/// The script's output for [`SMALL`].
pub const EXPECTED: &str = include_str!("expected.txt");

const SCRIPT: &str = "tests/formats/oracle.py";

/// The script encodes a region as this many bytes in its positions.
const REGION: u64 = 1_000_000;

/// A format in the oracle's output.
#[derive(Debug)]
pub struct Format {
    pub name: String,
    pub regions: Vec<u64>,
    pub sections: Vec<Placed>,
}

/// A section in the oracle's output.
#[derive(Debug)]
pub struct Placed {
    pub name: String,
    /// Layers, heads (0 if they are not stated), tokens, elements and bytes of an element.
    pub shape: [u32; 5],
    /// The positions, in the order block, layer, head, token, element.
    pub places: Vec<RegionOffset>,
}

/// Parses the script's output.
pub fn parse(text: &str) -> Vec<Format> {
    let mut formats: Vec<Format> = Vec::new();
    for line in text.lines() {
        let mut words = line.split(' ').peekable();
        match *words.peek().unwrap() {
            "format" => formats.push(Format {
                name: words.nth(1).unwrap().to_owned(),
                regions: Vec::new(),
                sections: Vec::new(),
            }),
            "regions" => {
                let last = formats.last_mut().unwrap();
                last.regions = words.skip(1).map(|word| word.parse().unwrap()).collect();
            }
            "section" => {
                let name = words.nth(1).unwrap().to_owned();
                let shape: Vec<u32> = words.map(|word| word.parse().unwrap()).collect();
                let shape = shape.try_into().unwrap();
                let last = formats.last_mut().unwrap();
                last.sections.push(Placed { name, shape, places: Vec::new() });
            }
            _ => {
                let section = formats.last_mut().unwrap().sections.last_mut().unwrap();
                section.places = words
                    .map(|word| {
                        let place: u64 = word.parse().unwrap();
                        let region = u32::try_from(place / REGION).unwrap();
                        RegionOffset { region, offset: place % REGION }
                    })
                    .collect();
            }
        }
    }
    formats
}

/// The indices of every element, in the oracle's order.
pub fn indices(blocks: u32, section: &Section) -> impl Iterator<Item = ([u32; 2], [u32; 3])> {
    let shape = section.shape();
    let heads = shape.heads.unwrap_or(1);
    (0..blocks).flat_map(move |block| {
        (0..shape.layers).flat_map(move |layer| {
            (0..heads).flat_map(move |head| {
                (0..shape.tokens).flat_map(move |token| {
                    (0..shape.elements).map(move |element| ([block, layer], [head, token, element]))
                })
            })
        })
    })
}

fn compare(sizes: Sizes, text: &str) {
    let (cases, formats) = (cases::all(sizes), parse(text));
    let names: Vec<&str> = cases.iter().map(|(name, _)| *name).collect();
    let expected: Vec<&str> = formats.iter().map(|format| format.name.as_str()).collect();
    assert_eq!(names, expected);
    for ((name, geometry), format) in cases.into_iter().zip(&formats) {
        let geometry = geometry.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(geometry.num_blocks(), sizes.blocks);
        compare_one(&geometry, format);
    }
}

fn compare_one(geometry: &Geometry, format: &Format) {
    let name = &format.name;
    let regions: Vec<_> =
        (0..geometry.region_count()).map(|region| geometry.region_bytes(region)).collect();
    let lengths: Vec<u64> = regions.iter().map(|bytes| bytes.get()).collect();
    assert_eq!(lengths, format.regions, "{name}");
    assert_eq!(geometry.sections().len(), format.sections.len(), "{name}");
    for (section, expected) in geometry.sections().iter().zip(&format.sections) {
        let shape = section.shape();
        let heads = shape.heads.unwrap_or(0);
        assert_eq!(section.name().as_str(), expected.name, "{name}");
        let shape = [shape.layers, heads, shape.tokens, shape.elements, shape.element_bytes];
        assert_eq!(shape, expected.shape, "{name}, {}", section.name());
        let mut places = expected.places.iter();
        for (outside, inside) in indices(geometry.num_blocks(), section) {
            let found = section.place(outside, inside);
            let place = places.next().unwrap();
            assert_eq!(found, *place, "{name}, {}, {outside:?} {inside:?}", section.name());
        }
        assert!(places.next().is_none(), "{name}");
    }
    verify(geometry, &regions).unwrap_or_else(|error| panic!("{name}: {error}"));
}

/// The script's output, or the reason why it cannot run.
fn ask(sizes: Sizes) -> Result<String, String> {
    // `cargo xtask interop` installs NumPy there.
    let installed = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("interop").join("site");
    #[expect(clippy::disallowed_methods, reason = "the script's modules may be there")]
    let given = std::env::var_os("PYTHONPATH").unwrap_or_default();
    let paths = std::env::split_paths(&given).chain([installed]).filter(|path| path.is_dir());
    let output = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(SCRIPT))
        .args([sizes.blocks, sizes.layers, sizes.heads, sizes.tokens, sizes.elements].map(text))
        .arg(sizes.width.to_string())
        .env("PYTHONPATH", std::env::join_paths(paths).unwrap())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .map_err(|error| format!("no python3: {error}"))?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if errors.contains("No module named 'numpy'") {
        return Err("python3 has no NumPy; `cargo xtask interop` installs it".to_owned());
    }
    assert!(output.status.success(), "{errors}");
    Ok(String::from_utf8(output.stdout).unwrap())
}

fn text(number: u32) -> String {
    number.to_string()
}

#[test]
fn every_element_is_at_the_oracles_address() {
    compare(SMALL, EXPECTED);
}

#[test]
fn the_oracle_says_what_is_checked_in() {
    match ask(SMALL) {
        Ok(text) if text == EXPECTED => {}
        Ok(text) => {
            let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("expected.txt");
            std::fs::write(&path, text).unwrap();
            panic!(
                "expected.txt differs from the output of {SCRIPT}, which is in {}",
                path.display()
            );
        }
        Err(reason) => {
            eprintln!("skipped: oracle::the_oracle_says_what_is_checked_in: {reason}");
        }
    }
}

/// No two sizes are equal, so that a test notices swapped dimensions. The sizes include an odd
/// width, and one.
#[test]
fn other_sizes_agree_with_the_oracle() {
    let all = [
        Sizes { blocks: 12, layers: 5, heads: 3, tokens: 8, elements: 10, width: 2 },
        Sizes { blocks: 2, layers: 4, heads: 7, tokens: 6, elements: 8, width: 3 },
        Sizes { blocks: 2, layers: 1, heads: 1, tokens: 2, elements: 12, width: 1 },
    ];
    for sizes in all {
        match ask(sizes) {
            Ok(text) => compare(sizes, &text),
            Err(reason) => {
                eprintln!("skipped: oracle::other_sizes_agree_with_the_oracle: {reason}");
                return;
            }
        }
    }
}
