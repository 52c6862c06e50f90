//! KV tensors, one of which was changed, and layouts with changed sections.

use std::sync::Arc;

use proptest::prelude::*;
use terrane_core::{ByteCount, Region};
use terrane_interop::dlpack::{ElementType, TensorShape};
use terrane_interop::tensors::{KvAxis, KvAxisOrder, KvError, KvTensors, adopt_kv, kv_views};
use terrane_layout::{
    Axis, Geometry, LayoutBuilder, LayoutKind, PhysicalLayout, SectionName, TensorAxis, TensorForm,
    TokenOrder,
};
use terrane_testkit::memory::HeapAllocator;

use crate::kv::{FORMS, config, import, import_of, layout};

/// Layers of sections with these names, `[S, B, N, H, D]`.
fn of_sections(names: &[SectionName]) -> PhysicalLayout {
    let form = TensorForm::new(names, 2)
        .tensors(Axis::Layer, 2)
        .dim(TensorAxis::Outer, u32::try_from(names.len()).unwrap())
        .dim(Axis::Block, 3)
        .dim(Axis::Token, 4)
        .dim(Axis::Head, 2)
        .dim(Axis::Element, 8);
    let builder = LayoutBuilder::from_geometry(Geometry::from_form(&form).unwrap());
    builder.allocate(&HeapAllocator::system()).unregistered().build().unwrap()
}

#[test]
fn sections_other_than_k_and_v_in_order_have_no_views() {
    const K: SectionName = SectionName::K;
    const V: SectionName = SectionName::V;
    let views = |names: &[SectionName], axis_order| {
        kv_views(&of_sections(names), &axis_order, ElementType::BF16)
    };
    for axis_order in [KvAxisOrder::SGLANG, KvAxisOrder::VLLM] {
        assert!(views(&[K, V], axis_order).is_ok());
        for single in [K, V, SectionName::LATENT] {
            assert!(views(&[single], axis_order).is_ok());
        }
        for names in [&[V, K][..], &[K, SectionName::STATE], &[K, V, SectionName::STATE]] {
            let error = views(names, axis_order).unwrap_err();
            assert!(matches!(error, KvError::Sections { .. }), "{names:?}: {error}");
            assert!(error.to_string().contains("K and V in this order"), "{error}");
        }
    }
}

proptest! {
    /// One tensor of a cache has another shape or another address. It is refused, or the layout has
    /// its pieces at the addresses of the tensors.
    #[test]
    fn changed_tensors_are_refused_or_adopted_where_they_are(
        kind in prop::sample::select(LayoutKind::ALL.to_vec()),
        order in prop::sample::select(TokenOrder::ALL.to_vec()),
        axis_order in prop::sample::select(FORMS.to_vec()),
        (which, axis) in (0_usize..6, 0_usize..6),
        (size, stride, shift) in (-1_i64..=1, -8_i64..=8, 0_u64..64),
    ) {
        let config = config(2, order);
        let layout = layout(config, kind);
        let Ok(views) = kv_views(&layout, &axis_order, ElementType::BF16) else { return Ok(()) };
        let (which, axis) = (which % views.len(), axis % axis_order.axes().len());
        let mut tensors: Vec<_> = views.iter().map(import).collect();
        let (view, shape) = (&views[which], &views[which].shape);
        let changed = |numbers: &[i64], change: i64| -> Option<Vec<u64>> {
            let change = |(at, &number)| number + if at == axis { change } else { 0 };
            numbers.iter().enumerate().map(change).map(|n| u64::try_from(n).ok()).collect()
        };
        let sizes_and_strides = changed(shape.sizes(), size).zip(changed(shape.strides(), stride));
        let Some((sizes, strides)) = sizes_and_strides else { return Ok(()) };
        let shape = TensorShape::strided(ElementType::BF16, &sizes, &strides);
        let Ok(shape) = shape else { return Ok(()) };
        let whole = Region::from_arc(Arc::clone(view.region.memory()));
        let from = view.region.offset().checked_add(ByteCount::new(2 * shift)).unwrap();
        let Ok(region) = whole.view(from, shape.bytes()) else { return Ok(()) };
        tensors[which] = import_of(region, shape);
        let is_apart = !axis_order.has_outer();
        let keys: Vec<_> = tensors.iter().step_by(2).cloned().collect();
        let values: Vec<_> = tensors.iter().skip(1).step_by(2).cloned().collect();
        let given = match is_apart {
            true => KvTensors::Apart { keys: &keys, values: &values },
            false => KvTensors::Together(&tensors),
        };
        let builder = match adopt_kv(&config, &axis_order, given) {
            Ok(builder) => builder,
            Err(error) => {
                prop_assert!((size, stride, shift) != (0, 0, 0), "{error}");
                return Ok(());
            }
        };
        // Tensors that overlap are found there.
        let Ok(back) = builder.unregistered().build() else { return Ok(()) };
        back.verify().unwrap();
        for (number, tensor) in (0_u32..).zip(&tensors) {
            let (layer, section) = if is_apart { (number / 2, number % 2) } else { (number, 0) };
            for block in 0..config.num_blocks() {
                for outer in 0..if is_apart { 1 } else { 2 } {
                    let steps = axis_order.axes().iter().zip(tensor.shape().strides());
                    let elements: i64 = steps
                        .map(|(axis, stride)| match axis {
                            KvAxis::Block => i64::from(block) * stride,
                            KvAxis::Slot => i64::from(block * config.page_size()) * stride,
                            KvAxis::Outer => i64::from(outer) * stride,
                            _ => 0,
                        })
                        .sum();
                    let bytes = ByteCount::new(u64::try_from(2 * elements).unwrap());
                    let place = tensor.location().checked_add(bytes).unwrap();
                    prop_assert_eq!(back.location(block, layer, section + outer).unwrap(), place);
                }
            }
        }
    }
}
