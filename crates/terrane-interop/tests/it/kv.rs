//! KV tensors of every axis order, as views of every layout, and adopted as layouts again.

use proptest::prelude::*;
use terrane_core::{Alignment, ByteCount, Memory, Region};
use terrane_interop::dlpack::{
    ElementType, ImportError, ImportedTensor, Importer, TensorExport, TensorShape,
};
use terrane_interop::tensors::{
    KvAxis, KvAxisOrder, KvError, KvTensors, KvView, StridedForm, StridedTensor, TensorName,
    adopt_kv, adopt_strided, kv_views,
};
use terrane_layout::{
    Axis, BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout,
    SectionName, TensorAxis, TokenOrder,
};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::Endpoint;

use crate::peer::{Deleted, Fields};

const OUTER_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
pub const BLOCK_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
pub const FORMS: [KvAxisOrder; 6] = KvAxisOrder::KNOWN;

/// 3 layers, 5 blocks of 4 tokens of 2 heads of 8 elements of 2 bytes.
pub fn config(outer_dim: u32, order: TokenOrder) -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(5).num_layers(3).outer_dim(outer_dim);
    let config = config.page_size(4).inner_dim(16).num_heads(2).token_order(order);
    config.element(ElementFormat::Width(2)).build().unwrap()
}

pub fn layout(config: LayoutConfig, kind: LayoutKind) -> PhysicalLayout {
    let allocator = HeapAllocator::system();
    LayoutBuilder::new(config).kind(kind).allocate(&allocator).unregistered().build().unwrap()
}

/// A view as a tensor of another library.
pub fn import(view: &KvView) -> ImportedTensor {
    import_of(view.region.clone(), view.shape.clone())
}

pub fn import_of(region: Region, shape: TensorShape) -> ImportedTensor {
    // SAFETY: no test accesses the bytes.
    let tensor = unsafe { TensorExport::new(region, shape) }.unwrap().into_versioned().unwrap();
    // SAFETY: as above, and no other code has the tensor.
    unsafe { Importer::new().versioned(tensor.into_raw().as_ptr()) }.unwrap()
}

/// The config of a layout.
pub fn config_of(layout: &PhysicalLayout) -> LayoutConfig {
    layout.geometry().origin().unwrap().0
}

/// The address of an element in the layout: in piece (block, layer, outer), of a token and a head.
fn element_at(layout: &PhysicalLayout, at: [u64; 6]) -> u64 {
    let [block, layer, outer, token, head, dim] = at;
    let config = config_of(layout);
    let small = |index: u64| u32::try_from(index).unwrap();
    let piece = layout.host_address(small(block), small(layer), small(outer)).unwrap().get();
    let (page, heads) = (u64::from(config.page_size()), u64::from(config.num_heads().unwrap()));
    let dims = u64::from(config.head_dim().unwrap());
    let index = match config.token_order() {
        TokenOrder::TokenMajor => (token * heads + head) * dims + dim,
        TokenOrder::HeadMajor => (head * page + token) * dims + dim,
    };
    piece + 2 * index
}

/// Compares the address of every element in the view with its address in the layout.
fn check_view(layout: &PhysicalLayout, axis_order: &KvAxisOrder, view: &KvView) {
    let (layer, of_outer) = match view.name {
        TensorName::Layer(layer) => (layer, None),
        TensorName::Key(layer) => (layer, Some(0)),
        TensorName::Value(layer) => (layer, Some(1)),
        other => panic!("{other}"),
    };
    let config = config_of(layout);
    let (page, dims) = (u64::from(config.page_size()), u64::from(config.head_dim().unwrap()));
    let base = view.region.location().as_host().unwrap().get();
    let sizes: Vec<u64> = view.shape.sizes().iter().map(|&size| size.try_into().unwrap()).collect();
    assert_eq!(view.region.length(), view.shape.bytes());
    for number in 0..sizes.iter().product() {
        let mut rest: u64 = number;
        let (mut address, mut at) = (base, [0, u64::from(layer), of_outer.unwrap_or(0), 0, 0, 0]);
        let axes = axis_order.axes().iter().zip(&sizes).zip(view.shape.strides());
        for ((axis, size), &stride) in axes.rev() {
            let index = rest % size;
            rest /= size;
            address += 2 * index * u64::try_from(stride).unwrap();
            match axis {
                KvAxis::Outer => at[2] = index,
                KvAxis::Block => at[0] = index,
                KvAxis::Token => at[3] = index,
                KvAxis::Slot => (at[0], at[3]) = (index / page, index % page),
                KvAxis::Head => at[4] = index,
                KvAxis::Dim => at[5] = index,
                KvAxis::Row => (at[4], at[5]) = (index / dims, index % dims),
                _ => {}
            }
        }
        assert_eq!(address, element_at(layout, at), "{axis_order:?}, {at:?}");
    }
}

fn adopted(
    config: &LayoutConfig,
    axis_order: &KvAxisOrder,
    views: &[KvView],
) -> Result<PhysicalLayout, KvError> {
    let tensors: Vec<ImportedTensor> = views.iter().map(import).collect();
    let apart = views.iter().any(|view| matches!(view.name, TensorName::Key(_)));
    let builder = if apart {
        let keys: Vec<_> = tensors.iter().step_by(2).cloned().collect();
        let values: Vec<_> = tensors.iter().skip(1).step_by(2).cloned().collect();
        adopt_kv(config, axis_order, KvTensors::Apart { keys: &keys, values: &values })?
    } else {
        adopt_kv(config, axis_order, KvTensors::Together(&tensors))?
    };
    Ok(builder.unregistered().build().unwrap())
}

/// Checks that both have the same shape and every piece at the same address.
fn assert_same_places(one: &PhysicalLayout, other: &PhysicalLayout) {
    let geometry = one.geometry();
    for block in 0..geometry.num_blocks() {
        for layer in 0..geometry.num_layers() {
            for section in 0..geometry.section_count() {
                assert_eq!(
                    one.location(block, layer, section).unwrap(),
                    other.location(block, layer, section).unwrap()
                );
            }
        }
    }
    other.verify().unwrap();
    for (one, other) in geometry.sections().iter().zip(other.geometry().sections()) {
        assert_eq!(
            (one.name(), one.shape().piece_bytes()),
            (other.name(), other.shape().piece_bytes())
        );
        if one.states_heads() && other.states_heads() {
            assert_eq!(one.shape(), other.shape());
        }
    }
}

#[test]
fn every_form_of_every_layout_is_right_or_refused() {
    let mut right = 0;
    for outer_dim in [1, 2] {
        for order in TokenOrder::ALL {
            for kind in LayoutKind::ALL {
                let layout = layout(config(outer_dim, order), kind);
                for axis_order in FORMS {
                    match kv_views(&layout, &axis_order, ElementType::BF16) {
                        Ok(views) => {
                            let split = outer_dim == 2 && !axis_order.has_outer();
                            assert_eq!(views.len(), if split { 6 } else { 3 });
                            for view in &views {
                                check_view(&layout, &axis_order, view);
                            }
                            let back = adopted(&config_of(&layout), &axis_order, &views).unwrap();
                            assert_same_places(&layout, &back);
                            right += 1;
                        }
                        Err(KvError::NotJoined { axis: KvAxis::Slot, .. }) => {
                            let one_piece = matches!(kind, OUTER_FIRST)
                                || (outer_dim == 1 && kind == BLOCK_FIRST);
                            assert!(!one_piece || order == TokenOrder::HeadMajor);
                        }
                        Err(KvError::NotJoined { axis: KvAxis::Row, .. }) => {
                            assert_eq!(order, TokenOrder::HeadMajor);
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        }
    }
    assert!(right > 40, "{right}");
}

#[test]
fn shapes_are_those_of_the_engines() {
    let shape = |kind, axis_order, order| {
        let views =
            kv_views(&layout(config(2, order), kind), &axis_order, ElementType::F16).unwrap();
        (views[0].shape.sizes().to_vec(), views[0].shape.strides().to_vec())
    };
    let nhd = TokenOrder::TokenMajor;
    let (sizes, strides) = shape(OUTER_FIRST, KvAxisOrder::VLLM, nhd);
    assert_eq!((sizes, strides), (vec![2, 5, 4, 2, 8], vec![320, 64, 16, 8, 1]));
    // vLLM's shape does not change, and its strides are HND.
    let (sizes, strides) = shape(OUTER_FIRST, KvAxisOrder::VLLM, TokenOrder::HeadMajor);
    assert_eq!((sizes, strides), (vec![2, 5, 4, 2, 8], vec![320, 64, 8, 32, 1]));
    let (sizes, strides) = shape(BLOCK_FIRST, KvAxisOrder::FLASHINFER_NHD, nhd);
    assert_eq!((sizes, strides), (vec![5, 2, 4, 2, 8], vec![128, 64, 16, 8, 1]));
    let (sizes, strides) = shape(BLOCK_FIRST, KvAxisOrder::FLASHINFER_HND, TokenOrder::HeadMajor);
    assert_eq!((sizes, strides), (vec![5, 2, 2, 4, 8], vec![128, 64, 32, 8, 1]));
    let (sizes, strides) = shape(OUTER_FIRST, KvAxisOrder::SGLANG, nhd);
    assert_eq!((sizes, strides), (vec![20, 2, 8], vec![16, 8, 1]));
    // If all layers are contiguous, the blocks of one layer are apart.
    let (_, strides) = shape(LayoutKind::FullyContiguous, KvAxisOrder::FLASHINFER_NHD, nhd);
    assert_eq!(strides, [384, 64, 16, 8, 1]);
}

/// The error of adopting vLLM's tensors after a change of the second one.
fn refused(change: impl FnOnce(&PhysicalLayout, &mut Vec<ImportedTensor>)) -> KvError {
    let layout = layout(config(2, TokenOrder::TokenMajor), OUTER_FIRST);
    let views = kv_views(&layout, &KvAxisOrder::VLLM, ElementType::BF16).unwrap();
    let mut tensors: Vec<_> = views.iter().map(import).collect();
    change(&layout, &mut tensors);
    adopt_kv(&config_of(&layout), &KvAxisOrder::VLLM, KvTensors::Together(&tensors)).unwrap_err()
}

fn other_shape(
    element: ElementType,
    sizes: &[u64],
) -> impl Fn(&PhysicalLayout, &mut Vec<ImportedTensor>) {
    let shape = TensorShape::compact(element, sizes).unwrap();
    move |layout, tensors| tensors[1] = import_of(layout.regions()[1].clone(), shape.clone())
}

#[test]
fn errors_name_tensor_axis_expected_and_found() {
    let bf16 = ElementType::BF16;
    let size = refused(other_shape(bf16, &[2, 5, 4, 1, 8]));
    assert_eq!(
        size.to_string(),
        "the tensor of layer 1, axis 3 (heads): 2 expected, 1 found; correct the tensor or the \
         configuration"
    );
    let rank = refused(other_shape(bf16, &[2, 5, 4, 16]));
    assert_eq!(
        rank.to_string(),
        "the tensor of layer 1 has 4 axes, and the axis order has 5; name each axis of the tensor \
         once"
    );
    let mixed = refused(other_shape(ElementType::F16, &[2, 5, 4, 2, 8]));
    assert!(matches!(mixed, KvError::MixedElements { tensor: TensorName::Layer(1), .. }));
    let strides = refused(|layout, tensors| {
        let shape = TensorShape::strided(bf16, &[2, 5, 4, 2, 8], &[320, 64, 8, 32, 1]).unwrap();
        tensors[1] = import_of(layout.regions()[1].clone(), shape);
    });
    assert_eq!(
        strides.to_string(),
        "the tensors cannot be adopted: tensor 1 differs in sizes, strides or elements from the \
         first tensor of its section; all must be equal"
    );
    let count = refused(|_, tensors| drop(tensors.pop()));
    assert!(matches!(count, KvError::TensorCount { expected: 3, found: 2, .. }), "{count}");
    // Two layers at the same address.
    let layout = layout(config(2, TokenOrder::TokenMajor), OUTER_FIRST);
    let views = kv_views(&layout, &KvAxisOrder::VLLM, bf16).unwrap();
    let tensors = [import(&views[0]), import(&views[0]), import(&views[2])];
    let tensors = KvTensors::Together(&tensors);
    let failed = adopt_kv(&config_of(&layout), &KvAxisOrder::VLLM, tensors).unwrap_err();
    assert!(failed.to_string().contains("at equal distances"), "{failed}");
}

#[test]
fn padded_elements_are_refused() {
    let config = LayoutConfig::builder().num_blocks(5).num_layers(1).outer_dim(1).page_size(4);
    let config = config.inner_dim(16).num_heads(2).element(ElementFormat::Width(1));
    let config = config.build().unwrap();
    let mut bytes = vec![0_u8; 2 * 5 * 4 * 16];
    // Pairs of 4 bits: each in a separate byte, and both in one byte.
    for (padded, flags) in [(true, 4), (false, 0)] {
        let fields = Fields { flags, dtype: (17, 4, 2), ..Fields::over(&mut bytes, &[20, 2, 8]) };
        let deleted = Deleted::default();
        // SAFETY: the bytes outlive the tensor, and no code uses them until then.
        let tensor = unsafe { Importer::new().versioned(fields.versioned(&deleted)) }.unwrap();
        assert_eq!(tensor.shape().is_padded(), padded);
        let tensors = [tensor];
        let adopted = adopt_kv(&config, &KvAxisOrder::SGLANG, KvTensors::Together(&tensors));
        match adopted {
            Err(error) => assert!(padded && error.to_string().contains("padded"), "{error}"),
            Ok(_) => assert!(!padded),
        }
    }
}

#[test]
fn layers_of_one_tensor_have_to_lie_in_their_order() {
    let layout = layout(config(2, TokenOrder::TokenMajor), LayoutKind::FullyContiguous);
    let views = kv_views(&layout, &KvAxisOrder::VLLM, ElementType::BF16).unwrap();
    let tensors = [import(&views[0]), import(&views[2]), import(&views[1])];
    let tensors = KvTensors::Together(&tensors);
    let refused = adopt_kv(&config_of(&layout), &KvAxisOrder::VLLM, tensors).unwrap_err();
    assert!(refused.to_string().contains("the tensors of the layer list are not in"), "{refused}");
}

#[test]
fn tensors_of_another_configuration_are_refused() {
    let layout = layout(config(2, TokenOrder::TokenMajor), OUTER_FIRST);
    let one = |axis_order, element| kv_views(&layout, &axis_order, element).unwrap_err();
    assert!(matches!(one(KvAxisOrder::VLLM, ElementType::F32), KvError::Element { .. }));
    let views = kv_views(&layout, &KvAxisOrder::SGLANG, ElementType::BF16).unwrap();
    let tensors: Vec<_> = views.iter().take(3).map(import).collect();
    let config = &config_of(&layout);
    let together =
        adopt_kv(config, &KvAxisOrder::SGLANG, KvTensors::Together(&tensors)).unwrap_err();
    assert!(matches!(together, KvError::Outers { has_outer: false, .. }), "{together}");
    let apart = KvTensors::Apart { keys: &tensors, values: &tensors };
    let outers = adopt_kv(config, &KvAxisOrder::VLLM, apart).unwrap_err();
    assert!(matches!(outers, KvError::Outers { has_outer: true, .. }), "{outers}");
    let unstated = LayoutConfig::builder().num_blocks(2).num_layers(1).outer_dim(1).page_size(4);
    let unstated = unstated.inner_dim(16).element(ElementFormat::Width(2)).build().unwrap();
    let unstated = self::layout(unstated, BLOCK_FIRST);
    let heads = kv_views(&unstated, &KvAxisOrder::SGLANG, ElementType::BF16).unwrap_err();
    assert!(matches!(heads, KvError::HeadsNotStated));
    assert!(kv_views(&unstated, &KvAxisOrder::VLLM_LATENT, ElementType::BF16).is_ok());
}

#[test]
fn rows_of_bytes_are_tensors_of_bytes() {
    // A latent of 512 quantised elements, its scales, and 64 of two bytes: 656 bytes a token.
    let config = LayoutConfig::builder().num_blocks(3).num_layers(2).outer_dim(1).page_size(4);
    let config = config.inner_dim(576).element(ElementFormat::RowBytes(656)).build().unwrap();
    let layout = layout(config, BLOCK_FIRST);
    let views = kv_views(&layout, &KvAxisOrder::VLLM_LATENT, ElementType::U8).unwrap();
    assert_eq!(views[0].shape.sizes(), [3, 4, 656]);
    let back = adopted(&config, &KvAxisOrder::VLLM_LATENT, &views).unwrap();
    assert_same_places(&layout, &back);
    let wide = kv_views(&layout, &KvAxisOrder::VLLM_LATENT, ElementType::F16).unwrap_err();
    assert!(matches!(wide, KvError::Element { .. }));
}

#[test]
fn padding_between_blocks_has_to_be_adopted_as_well() {
    let padded = config(2, TokenOrder::TokenMajor);
    let padded = padded.with_block_alignment(Alignment::SECTOR).unwrap();
    let axis_order = KvAxisOrder::FLASHINFER_NHD;
    // A tensor for each layer, and one tensor for all layers.
    for kind in [BLOCK_FIRST, LayoutKind::FullyContiguous] {
        let layout = layout(padded, kind);
        let views = kv_views(&layout, &axis_order, ElementType::BF16).unwrap();
        let refused = adopted(&padded, &axis_order, &views).unwrap_err();
        assert!(
            matches!(refused, KvError::Memory { source: ImportError::Gaps { .. }, .. }),
            "{refused}"
        );
        let strided = views.iter().map(import).map(|tensor| {
            // SAFETY: the layout owns the padding and outlives the adopted one; no code accesses
            // the padding.
            let memory = unsafe { tensor.memory_with_gaps() }.unwrap();
            let (sizes, strides) = (tensor.shape().sizes(), tensor.shape().strides());
            StridedTensor::from_memory(memory, 2, sizes.to_vec(), strides.to_vec()).unwrap()
        });
        let form = StridedForm::new(&[SectionName::K, SectionName::V])
            .tensors(Axis::Layer, padded.num_layers());
        let form = form.dim(Axis::Block).dim(TensorAxis::Outer).dim(Axis::Token).dim(Axis::Head);
        let form = form.dim(Axis::Element);
        let builder = adopt_strided(&form, &strided.collect::<Vec<_>>());
        let back = builder.unwrap().unregistered().build().unwrap();
        assert_same_places(&layout, &back);
    }
}

#[test]
fn layouts_keep_the_tensors() {
    let allocator = HeapAllocator::system();
    let config = config(2, TokenOrder::TokenMajor);
    let builder = LayoutBuilder::new(config).fully_contiguous().allocate(&allocator);
    let layout = builder.unregistered().build().unwrap();
    let views = kv_views(&layout, &KvAxisOrder::VLLM, ElementType::BF16).unwrap();
    let back = adopted(&config, &KvAxisOrder::VLLM, &views).unwrap();
    assert_eq!(back.regions().len(), 1);
    assert_eq!(back.regions()[0].length(), ByteCount::new(3 * 5 * 2 * 128));
    drop((layout, views));
    assert_eq!(allocator.live(), 1);
    drop(back);
    assert_eq!(allocator.live(), 0);
}

proptest! {
    /// Any configuration that an axis order can express is adopted with every piece at its address.
    #[test]
    fn layouts_come_back(
        (blocks, layers, outers) in (1_u32..6, 1_u32..4, 1_u32..3),
        (page, heads, dim, width) in (1_u32..5, 1_u32..4, 1_u32..5, prop::sample::select(vec![1_u8, 2, 4])),
        kind in prop::sample::select(LayoutKind::ALL.to_vec()),
        order in prop::sample::select(TokenOrder::ALL.to_vec()),
        axis_order in prop::sample::select(FORMS.to_vec()),
    ) {
        let config = LayoutConfig::builder().num_blocks(blocks).num_layers(layers);
        let config = config.outer_dim(outers).page_size(page).inner_dim(heads * dim);
        let config = config.num_heads(heads).token_order(order);
        let config = config.element(ElementFormat::Width(width)).build().unwrap();
        let layout = layout(config, kind);
        let element = match width {
            1 => ElementType::F8_E4M3FN,
            2 => ElementType::F16,
            _ => ElementType::F32,
        };
        // The bytes of one layer and outer in a block, and whether the next block is adjacent.
        let is_piece = match kind {
            LayoutKind::FullyContiguous => layers * outers == 1,
            BLOCK_FIRST => outers == 1,
            _ => true,
        };
        let is_token_major = order == TokenOrder::TokenMajor || heads == 1;
        let slots = blocks == 1 || page == 1 || (is_piece && is_token_major);
        let rows = page == 1 || is_token_major || dim == 1;
        let has = |axis| axis_order.axes().contains(&axis);
        match kv_views(&layout, &axis_order, element) {
            Ok(views) => {
                prop_assert!(slots || !has(KvAxis::Slot));
                prop_assert!(rows || !has(KvAxis::Row));
                assert_same_places(&layout, &adopted(&config, &axis_order, &views).unwrap());
            }
            Err(KvError::NotJoined { axis: KvAxis::Slot, .. }) => prop_assert!(!slots),
            Err(KvError::NotJoined { axis: KvAxis::Row, .. }) => prop_assert!(!rows),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn tensors_that_are_adopted_twice_are_one_endpoint_s() {
    let config = config(2, TokenOrder::TokenMajor);
    let layout = layout(config, BLOCK_FIRST);
    let axis_order = KvAxisOrder::VLLM_BLOCKS_FIRST;
    let tensors: Vec<_> = kv_views(&layout, &axis_order, ElementType::BF16).unwrap();
    let tensors: Vec<_> = tensors.iter().map(import).collect();
    let adopted = || {
        let builder = adopt_kv(&config, &axis_order, KvTensors::Together(&tensors)).unwrap();
        Endpoint::new(builder.unregistered().build().unwrap())
    };
    let first = adopted().unwrap();
    assert!(adopted().is_err(), "their transfers would not know of one another");
    drop(first);
    assert!(adopted().is_ok());
}
