//! Pictures of small layouts, and of layouts too large to be drawn in full.

use crate::formats::vllm::PackedOrder;
use crate::formats::{model, paged, sglang, vllm};
use crate::{
    Axis, AxisSteps, ElementFormat, Geometry, LayoutConfig, LayoutKind, Section, SectionName, Step,
};

fn config(layers: u32, heads: u32) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(3)
        .num_layers(layers)
        .outer_dim(2)
        .page_size(2)
        .inner_dim(heads * 4)
        .num_heads(heads)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

#[test]
fn one_region_a_layer() {
    let text = vllm::hnd(&config(2, 2)).unwrap().picture().to_string();
    assert_eq!(
        text,
        "\
3 blocks of 128 bytes in 2 regions
k: 2 layers, 2 heads, 2 tokens, 4 elements of 2 bytes
   strides: layer 1 region, block 32, head 16, token 8, element 2
v: 2 layers, 2 heads, 2 tokens, 4 elements of 2 bytes
   strides: layer 1 region, block 32, head 16, token 8, element 2
block 0 in region 0 of 192 bytes:
              0        32  k, layer 0
             96        32  v, layer 0
block 0 in region 1 of 192 bytes:
              0        32  k, layer 1
             96        32  v, layer 1
"
    );
}

#[test]
fn rows_apart_and_split_axes() {
    let text = sglang::page_head(&config(2, 1)).unwrap().picture().to_string();
    let lines: Vec<&str> = text.lines().skip(6).collect();
    assert_eq!(
        lines,
        [
            "              0         8  k, layer 0, token 0",
            "              8         8  k, layer 1, token 0",
            "             16         8  k, layer 0, token 1",
            "             24         8  k, layer 1, token 1",
            "             96         8  v, layer 0, token 0",
            "            104         8  v, layer 1, token 0",
            "            112         8  v, layer 0, token 1",
            "            120         8  v, layer 1, token 1",
        ]
    );
    let text = paged::pairs_of_tensors(&config(1, 1), 2).unwrap().picture().to_string();
    assert!(text.contains("k: 1 layer, 1 head, 2 tokens, 4 elements of 2 bytes\n"), "{text}");
    assert!(text.contains("strides: block 16, element/2 8, token 4, element 2\n"), "{text}");
    assert!(text.contains("              0        16  k\n"), "{text}");
}

#[test]
fn sections_of_one_page() {
    let text = model::indexer([2, 1, 4], 8, 4).unwrap().picture().to_string();
    assert_eq!(
        text,
        "\
2 blocks of 48 bytes in 1 region
values: 1 layer, 4 tokens, 8 elements of 1 byte
        strides: block 48, token 8, element 1
scales: 1 layer, 4 tokens, 1 element of 4 bytes
        strides: block 48, token 4
block 0 in region 0 of 96 bytes:
              0        32  values
             32        16  scales
"
    );
}

#[test]
fn an_svg_of_two_pieces() {
    let svg = model::indexer([2, 1, 4], 8, 4).unwrap().picture().to_svg();
    assert_eq!(svg, include_str!("indexer.svg"));
}

#[test]
fn a_split_of_blocks_into_chunks_and_padding() {
    let svg = vllm::page_padded(&config(2, 1), PackedOrder::Lbnhc, 100).unwrap().picture().to_svg();
    assert!(svg.contains("<title>268 bytes of other blocks or padding</title>"), "{svg}");
    assert!(svg.contains("<title>v, layer 1, token 1: 8 bytes from 324 on</title>"), "{svg}");
    let chunks =
        vllm::offload_rows(&config(2, 1).with_num_blocks(4).unwrap(), PackedOrder::Lbnhc, 2, None);
    let text = chunks.unwrap().picture().to_string();
    assert!(
        text.contains("strides: block/2 128, layer 64, block 32, token 16, element 2"),
        "{text}"
    );
}

/// The picture of a large layout is small, and drawn fast.
#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri, and has no unsafe code")]
fn pictures_are_bounded() {
    let large = LayoutConfig::builder()
        .num_blocks(1 << 20)
        .num_layers(200)
        .outer_dim(2)
        .page_size(4096)
        .inner_dim(128 * 128)
        .num_heads(128)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap();
    let mut geometries = vec![
        vllm::packed(&large, PackedOrder::Bhlnc).unwrap(),
        sglang::page_first(&large).unwrap(),
        vllm::hnd(&large).unwrap(),
        Geometry::opaque(u32::MAX, 1 << 30).unwrap(),
    ];
    for kind in LayoutKind::ALL {
        geometries.push(Geometry::new(&large, kind).unwrap());
    }
    let heads = AxisSteps::spread(1 << 10, 1, Step::ONE);
    let many = (0..16_u32).map(|number| {
        let name = SectionName::new(&format!("s{number}")).unwrap();
        let section = Section::new(name, u32::MAX).at(0, u64::from(number) << 40);
        section.axis(Axis::Head, heads).axis(Axis::Element, AxisSteps::new(100, 1 << 33))
    });
    geometries.push(Geometry::from_sections(many).unwrap());
    for geometry in geometries {
        let picture = geometry.picture();
        let (text, svg) = (picture.to_string(), picture.to_svg());
        assert!(text.len() < 10_000, "{text}");
        assert!(svg.len() < 40_000 && svg.ends_with("</svg>\n"), "{svg}");
        let x = svg.split(" x=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse().ok());
        assert!(x.max().unwrap_or(0_u64) < 960, "{svg}");
    }
}
