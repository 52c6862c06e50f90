//! Compares the picture in the docs with the output of the library.

use std::path::Path;

use terrane_layout::formats::vllm::{self, PackedOrder};

use terrane_testkit::formats::{SMALL, Sizes, keys_and_values};

#[test]
fn the_picture_of_the_docs_is_current() {
    let sizes = Sizes { blocks: 100, layers: 2, elements: 128, ..SMALL };
    let geometry = vllm::packed(&keys_and_values(sizes), PackedOrder::Lbnhc).unwrap();
    let drawn = geometry.picture().to_svg();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/layout.svg");
    let kept = std::fs::read_to_string(&path).unwrap();
    if kept != drawn {
        let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("layout.svg");
        std::fs::write(&new, drawn).unwrap();
        panic!("{} differs from the drawn picture, which is in {}", path.display(), new.display());
    }
}
