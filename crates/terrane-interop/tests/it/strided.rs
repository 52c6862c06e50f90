//! Tensors of any strides as layouts.

use std::ptr::NonNull;
use std::sync::Arc;

use proptest::prelude::*;
use terrane_core::{ByteCount, HostAddress, Location, Memory, Region, StorageKind};
use terrane_interop::dlpack::{ElementType, ImportError, TensorShape};
use terrane_interop::tensors::{
    StridedError, StridedError as E, StridedForm, StridedTensor, adopt_strided,
};
use terrane_layout::{Axis, GeometryError, LayoutError, PhysicalLayout, SectionName, TensorAxis};
use terrane_testkit::memory::HeapAllocator;

use crate::kv::import_of;

const KV: [SectionName; 2] = [SectionName::K, SectionName::V];

/// Bytes of another library, and their owner.
type Owner = Arc<Vec<u64>>;

fn owner(bytes: u64) -> Owner {
    Arc::new(vec![0; usize::try_from(bytes.div_ceil(8)).unwrap()])
}

fn base(owner: &Owner) -> u64 {
    HostAddress::new(NonNull::from(&owner[0])).get()
}

/// A tensor that begins this many bytes into the memory of `owner`.
fn tensor(
    owner: &Owner,
    offset: u64,
    element: u32,
    sizes: &[i64],
    strides: &[i64],
) -> Result<StridedTensor, StridedError> {
    let first = Location::Host(HostAddress::new(NonNull::from(&owner[0])));
    let at = first.checked_add(ByteCount::new(offset)).unwrap();
    let (sizes, strides) = (sizes.iter().copied(), strides.iter().copied());
    // SAFETY: no test uses the bytes, and the owner keeps all of them alive.
    unsafe {
        StridedTensor::from_raw((StorageKind::System, at), element, sizes, strides, owner.clone())
    }
}

fn build(form: &StridedForm, tensors: &[StridedTensor]) -> Result<PhysicalLayout, StridedError> {
    Ok(adopt_strided(form, tensors)?.unregistered().build().unwrap())
}

/// The address of an element of a section.
fn address(layout: &PhysicalLayout, name: SectionName, outer: [u32; 2], inner: [u32; 3]) -> u64 {
    let section = layout.geometry().section(name).unwrap();
    layout.location_at(section.place(outer, inner)).unwrap().as_host().unwrap().get()
}

fn form(dims: &[TensorAxis]) -> StridedForm {
    dims.iter().fold(StridedForm::new(&KV), |form, &axis| form.dim(axis))
}

#[test]
fn rows_of_k_and_v_side_by_side() {
    // [3 blocks, 2 heads, 4 tokens, 2 · 8 elements] of two bytes; a block has 4,608 bytes.
    let owner = owner(3 * 4608);
    let strides = [2304, 4 * 16, 16, 1];
    let whole = base(&owner);
    let halves = [0, 16].map(|at| tensor(&owner, at, 2, &[3, 2, 4, 8], &strides).unwrap());
    let form = StridedForm::new(&KV)
        .tensors(TensorAxis::Outer, 2)
        .dim(Axis::Block)
        .dim(Axis::Head)
        .dim(Axis::Token)
        .dim(Axis::Element);
    let layout = build(&form, &halves).unwrap();
    // Their bytes interleave, so they are one region.
    assert_eq!(layout.regions().len(), 1);
    assert_eq!(layout.geometry().block_bytes().get(), 2 * 2 * 4 * 8 * 2);
    for (name, begin) in KV.into_iter().zip([0, 16]) {
        let at = address(&layout, name, [2, 0], [1, 3, 5]);
        assert_eq!(at, whole + begin + 2 * (2 * 2304 + 64 + 3 * 16 + 5));
    }
    assert_eq!(layout.verify().unwrap().pieces, 3 * 2 * 8);
}

#[test]
fn layers_of_one_tensor_and_of_several() {
    // [2 blocks, 3 layers, K and V, 4 tokens, 8 elements], as a view for each layer.
    let owner = owner(2 * 3 * 2 * 32);
    let strides = [3 * 64, 32, 8, 1];
    let views: Vec<_> = (0..3)
        .map(|layer| tensor(&owner, layer * 64, 1, &[2, 2, 4, 8], &strides).unwrap())
        .collect();
    let axes = [Axis::Block.into(), TensorAxis::Outer, Axis::Token.into(), Axis::Element.into()];
    let form = form(&axes).tensors(Axis::Layer, 3);
    let layout = build(&form, &views).unwrap();
    assert_eq!((layout.regions().len(), layout.geometry().num_layers()), (1, 3));
    let at = address(&layout, SectionName::V, [1, 2], [0, 3, 7]);
    assert_eq!(at, base(&owner) + 192 + 128 + 32 + 24 + 7);
    // In another order, no single stride connects them.
    let swapped = [views[0].clone(), views[2].clone(), views[1].clone()];
    assert!(matches!(build(&form, &swapped), Err(StridedError::Uneven { .. })));

    let owners: Vec<Owner> = (0..3).map(|_| self::owner(128)).collect();
    let strides = [64, 32, 8, 1];
    let apart: Vec<_> =
        owners.iter().map(|owner| tensor(owner, 0, 1, &[2, 2, 4, 8], &strides).unwrap()).collect();
    let layout = build(&form, &apart).unwrap();
    assert_eq!(layout.regions().len(), 3);
    for (layer, owner) in (0..).zip(&owners) {
        assert_eq!(address(&layout, SectionName::K, [1, layer], [0, 1, 2]), base(owner) + 74);
    }
    drop((views, apart));
    assert_eq!(Arc::strong_count(&owners[2]), 2);
    drop(layout);
    assert_eq!(Arc::strong_count(&owners[2]), 1);
}

#[test]
fn split_and_joined_dimensions() {
    // Keys of paged attention: [3 blocks, 2 heads, 4 of D/x, 5 tokens, 8 of x].
    let owner = owner(3 * 2 * 4 * 5 * 8 * 2);
    let sizes = [3, 2, 4, 5, 8];
    let keys = tensor(&owner, 0, 2, &sizes, &[320, 160, 40, 8, 1]).unwrap();
    let form = StridedForm::new(&[SectionName::K])
        .dim(Axis::Block)
        .dim(Axis::Head)
        .dim(Axis::Element)
        .dim(Axis::Token)
        .dim(Axis::Element);
    let layout = build(&form, &[keys]).unwrap();
    let at = address(&layout, SectionName::K, [2, 0], [1, 3, 8 + 5]);
    assert_eq!(at, base(&owner) + 2 * (2 * 320 + 160 + 40 + 3 * 8 + 5));

    // Slots of 6 tokens: [30 slots, 1, 16 elements], in groups of 8 bytes with a scale.
    let slots = tensor(&owner, 0, 1, &[30, 1, 16], &[16, 16, 1]).unwrap();
    let form = StridedForm::new(&[SectionName::LATENT])
        .joined(Axis::Block, Axis::Token, 6)
        .one()
        .dim(Axis::Element);
    let layout = build(&form.clone().grouped(8), std::slice::from_ref(&slots)).unwrap();
    let shape = layout.geometry().sections()[0].shape();
    assert_eq!((layout.geometry().num_blocks(), shape.tokens), (5, 6));
    assert_eq!((shape.elements, shape.element_bytes), (2, 8));
    let refused = build(&form.grouped(5), std::slice::from_ref(&slots)).unwrap_err();
    assert!(matches!(refused, StridedError::Groups { bytes: 16, unit: 5 }), "{refused}");
    let form = StridedForm::new(&[SectionName::LATENT]).joined(Axis::Block, Axis::Token, 7).one();
    let refused = build(&form.dim(Axis::Element), &[slots]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "dimension 0 has 30 positions, and the form requires a multiple of 7; correct the form or \
         the tensor"
    );
}

#[test]
fn hostile_sizes_and_strides_are_typed_errors() {
    let owner = owner(1 << 10);
    let tensor = |sizes: &[i64], strides: &[i64]| tensor(&owner, 0, 2, sizes, strides);
    let refused = |sizes: &[i64], strides: &[i64]| tensor(sizes, strides).unwrap_err();
    assert!(matches!(refused(&[4, -1], &[8, 1]), E::NegativeSize { dimension: 1, size: -1 }));
    assert!(matches!(refused(&[0, 8], &[8, 1]), E::ZeroSize { dimension: 0 }));
    assert!(matches!(refused(&[4, 8], &[-8, 1]), E::NegativeStride { dimension: 0, stride: -8 }));
    assert!(matches!(refused(&[4, 8], &[8]), E::Rank { expected: 2, found: 1 }));
    for huge in [i64::MAX, i64::MAX / 2, 1 << 61] {
        assert!(matches!(refused(&[4, 8], &[huge, 1]), E::TooLarge { dimension: 0 }), "{huge}");
        assert!(matches!(refused(&[huge, 8], &[8, 1]), E::TooLarge { dimension: 0 }), "{huge}");
    }
    let memory = HeapAllocator::system();
    let memory = terrane_core::Allocate::allocate(
        &memory,
        &terrane_core::RegionRequest::new(ByteCount::new(63)),
    );
    let short = StridedTensor::from_memory(memory.unwrap(), 2, [4, 8], [1 << 20, 1]).unwrap_err();
    assert!(matches!(short, E::TooShort { .. }), "{short}");

    let form = StridedForm::new(&[SectionName::K]).dim(Axis::Block).dim(Axis::Element);
    let adopt = |stride| build(&form, &[tensor(&[4, 8], &[stride, 1]).unwrap()]);
    assert!(adopt(8).is_ok());
    for overlapping in [7, 1, 0] {
        let error = adopt(overlapping).unwrap_err();
        let E::Layout(LayoutError::Geometry(GeometryError::NotNested { .. })) = &error else {
            panic!("{error}")
        };
    }
    let (of_two, of_three) = (tensor(&[4, 8], &[8, 1]).unwrap(), tensor(&[4, 8, 1], &[8, 1, 1]));
    assert!(matches!(build(&form, &[]), Err(E::TensorCount { expected: 1, found: 0 })));
    assert!(matches!(build(&form, &[of_three.unwrap()]), Err(E::Rank { expected: 2, found: 3 })));
    let layers = form.clone().tensors(Axis::Layer, 2);
    let wider = tensor(&[4, 8], &[9, 1]).unwrap();
    assert!(matches!(build(&layers, &[of_two.clone(), wider]), Err(E::Differs { tensor: 1 })));
    let twice = build(&layers, &[of_two.clone(), of_two.clone()]).unwrap_err();
    assert!(matches!(twice, E::Layout(_)), "{twice}");
    let outers = StridedForm::new(&KV).dim(Axis::Block).dim(Axis::Element);
    assert!(matches!(build(&outers, &[of_two]), Err(E::Dimension { times: 0, .. })));
}

/// The importer owns only the elements of a DLPack tensor.
#[test]
fn gaps_of_imported_tensors_need_a_promise() {
    let region = Region::new(
        terrane_core::Allocate::allocate(
            &HeapAllocator::system(),
            &terrane_core::RegionRequest::new(ByteCount::new(4096)),
        )
        .unwrap(),
    );
    let import = |at: u64, sizes: &[u64], strides: &[u64]| {
        let shape = TensorShape::strided(ElementType::U8, sizes, strides).unwrap();
        import_of(region.view(ByteCount::new(at), shape.bytes()).unwrap(), shape)
    };
    let form = StridedForm::new(&[SectionName::LATENT]).dim(Axis::Block).dim(Axis::Element);
    let gaps = import(0, &[4, 8], &[16, 1]);
    let refused = build(&form, &[StridedTensor::from_imported(&gaps).unwrap()]).unwrap_err();
    let E::Memory { tensor: 0, source: ImportError::Gaps { .. } } = &refused else {
        panic!("{refused}")
    };
    // SAFETY: the test owns the region, and no code uses it.
    let memory = unsafe { gaps.memory_with_gaps() }.unwrap();
    let promised = StridedTensor::from_memory(memory, 1, [4, 8], [16, 1]).unwrap();
    assert_eq!(promised.span().length, ByteCount::new(3 * 16 + 8));
    build(&form, &[promised]).unwrap();
    // The gaps of one layer are elements of another layer.
    let layers = [0, 8].map(|at| import(at, &[4, 8], &[16, 1]));
    let layers = layers.each_ref().map(|layer| StridedTensor::from_imported(layer).unwrap());
    let layout = build(&form.tensors(Axis::Layer, 2), &layers).unwrap();
    assert_eq!(layout.regions()[0].length(), ByteCount::new(64));
}

proptest! {
    /// Dimensions in any order, with gaps between positions: every element has the tensor's
    /// address.
    #[test]
    fn every_element_is_where_the_tensor_has_it(
        order in Just([0_usize, 1, 2, 3, 4]).prop_shuffle(),
        sizes in prop::array::uniform5(1_u32..4),
        gaps in prop::array::uniform5(0_i64..3),
        layers in 1_u32..4,
    ) {
        let axes: [TensorAxis; 5] = [
            Axis::Block.into(), TensorAxis::Outer, Axis::Head.into(), Axis::Token.into(),
            Axis::Element.into(),
        ];
        let mut sizes = sizes.map(i64::from);
        sizes[1] = 2;
        // Strides from the innermost dimension of `order` on.
        let (mut strides, mut span) = ([0_i64; 5], 1);
        for &dimension in &order {
            strides[dimension] = span + gaps[dimension];
            span += strides[dimension] * (sizes[dimension] - 1);
        }
        let bytes = u64::try_from(span * 2).unwrap();
        let owners: Vec<Owner> = (0..layers).map(|_| owner(bytes)).collect();
        let tensors: Vec<_> =
            owners.iter().map(|owner| tensor(owner, 0, 2, &sizes, &strides).unwrap()).collect();
        let layout = match build(&form(&axes).tensors(Axis::Layer, layers), &tensors) {
            Ok(layout) => layout,
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        let counts = sizes.map(|size| u32::try_from(size).unwrap());
        let [blocks, _, heads, tokens, elements] = counts;
        for (layer, owner) in (0..layers).zip(&owners) {
            for index in 0..blocks * 2 * heads * tokens * elements {
                let mut rest = index;
                let mut at = [0_u32; 5];
                for (position, count) in at.iter_mut().zip(counts) {
                    *position = rest % count;
                    rest /= count;
                }
                let far: i64 =
                    at.iter().zip(strides).map(|(&at, stride)| i64::from(at) * stride).sum();
                let [block, outer, head, token, element] = at;
                let name = KV[usize::try_from(outer).unwrap()];
                let found = address(&layout, name, [block, layer], [head, token, element]);
                prop_assert_eq!(found, base(owner) + 2 * u64::try_from(far).unwrap());
            }
        }
        layout.verify().unwrap();
    }
}
