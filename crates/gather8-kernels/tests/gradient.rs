//! Division, accumulation, the norm's fixed order, and the decision about the step.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod support;

use gather8_kernels::layout::{ControlRecord, GroupRecord, NORM_TILE, NormRecord, norm_tiles};
use gather8_kernels::scalar::{
    Elements, ElementsMut, accumulate, bf16_to_f32, control, divide, divide_in_place, f32_to_bf16,
    norm, norm_tile, power, sum_norms,
};
use support::{Random, canonical_bits};

#[test]
fn divide_is_an_ieee_division_in_every_pair_of_types() {
    let mut random = Random(1);
    let wide: Vec<f32> = (0..5000).map(|_| random.any_f32()).collect();
    let narrow: Vec<u16> = (0..5000).map(|_| random.word() as u16).collect();
    for divisor in [1.0_f32, 3.0, 8.0, 7e-39, 1e30] {
        let mut f32_out = vec![0.0; 5000];
        let mut bf16_out = vec![0; 5000];
        divide(Elements::F32(&wide), divisor, ElementsMut::F32(&mut f32_out));
        divide(Elements::F32(&wide), divisor, ElementsMut::Bf16(&mut bf16_out));
        for i in 0..5000 {
            assert_eq!(f32_out[i].to_bits(), canonical_bits(wide[i] / divisor));
            assert_eq!(bf16_out[i], f32_to_bf16(wide[i] / divisor));
        }
        divide(Elements::Bf16(&narrow), divisor, ElementsMut::F32(&mut f32_out));
        divide(Elements::Bf16(&narrow), divisor, ElementsMut::Bf16(&mut bf16_out));
        for i in 0..5000 {
            let quotient = bf16_to_f32(narrow[i]) / divisor;
            assert_eq!(f32_out[i].to_bits(), canonical_bits(quotient));
            assert_eq!(bf16_out[i], f32_to_bf16(quotient));
        }
        let mut in_place = narrow.clone();
        divide_in_place(ElementsMut::Bf16(&mut in_place), divisor);
        assert_eq!(in_place, bf16_out);
        let mut in_place = wide.clone();
        divide_in_place(ElementsMut::F32(&mut in_place), divisor);
        divide(Elements::F32(&wide), divisor, ElementsMut::F32(&mut f32_out));
        assert_eq!(in_place.map_bits(), f32_out.map_bits());
    }
}

trait MapBits {
    fn map_bits(&self) -> Vec<u32>;
}

impl MapBits for Vec<f32> {
    fn map_bits(&self) -> Vec<u32> {
        self.iter().map(|x| x.to_bits()).collect()
    }
}

#[test]
fn accumulate_adds_in_f32_and_keeps_one_nan() {
    let mut random = Random(2);
    let narrow: Vec<u16> = (0..3000).map(|_| random.word() as u16).collect();
    let wide: Vec<f32> = (0..3000).map(|_| random.any_f32()).collect();
    let start: Vec<f32> = (0..3000).map(|_| random.any_f32()).collect();
    let mut sums = start.clone();
    accumulate(Elements::Bf16(&narrow), &mut sums);
    for i in 0..3000 {
        assert_eq!(sums[i].to_bits(), canonical_bits(start[i] + bf16_to_f32(narrow[i])));
    }
    let mut sums = start.clone();
    accumulate(Elements::F32(&wide), &mut sums);
    for i in 0..3000 {
        assert_eq!(sums[i].to_bits(), canonical_bits(start[i] + wide[i]));
    }
    let mut sums = [f32::INFINITY];
    accumulate(Elements::F32(&[f32::NEG_INFINITY]), &mut sums);
    assert_eq!(sums[0].to_bits(), 0x7fc0_0000);
}

/// The order of a tile, by element index: element i belongs to group i / 4, and that to lane
/// (i / 4) % 256; the tree is written recursively.
fn tile_by_index(values: &[f32]) -> (f64, f64) {
    fn tree(lanes: &[f64], i: usize, width: usize) -> f64 {
        // What lane i holds once `width` lanes are left.
        if width == lanes.len() {
            lanes[i]
        } else {
            tree(lanes, i, width * 2) + tree(lanes, i + width, width * 2)
        }
    }
    let mut lanes = vec![0.0; 256];
    let mut non_finite = 0.0;
    for (i, &x) in values.iter().enumerate() {
        if x.is_finite() {
            lanes[i / 4 % 256] += f64::from(x).powi(2);
        } else {
            non_finite += 1.0;
        }
    }
    (tree(&lanes, 0, 1), non_finite)
}

#[test]
fn a_tile_is_summed_in_the_order_of_its_lanes() {
    let mut random = Random(3);
    for len in (0..40).chain([255, 1023, 1024, 1025, 4099, 8191, 8192]) {
        let values: Vec<f32> = (0..len)
            .map(|_| if random.below(50) == 0 { random.any_f32() } else { random.ordinary() })
            .collect();
        let record = norm_tile(Elements::F32(&values));
        let (sum, non_finite) = tile_by_index(&values);
        assert_eq!(record.sum_of_squares.to_bits(), sum.to_bits(), "{len}");
        assert_eq!(record.non_finite, non_finite);
        let narrow: Vec<u16> = values.iter().map(|&x| f32_to_bf16(x)).collect();
        let widened: Vec<f32> = narrow.iter().map(|&x| bf16_to_f32(x)).collect();
        assert_eq!(norm_tile(Elements::Bf16(&narrow)), norm_tile(Elements::F32(&widened)));
    }
    // Another order gives another sum: the order is worth fixing.
    let values: Vec<f32> = (0..8192).map(|_| random.ordinary()).collect();
    let straight: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
    let (sum, _) = tile_by_index(&values);
    assert_ne!(sum.to_bits(), straight.to_bits());
    assert!((sum / straight - 1.0).abs() < 1e-12);
}

#[test]
fn tiles_of_a_tensor_and_their_sum() {
    let mut random = Random(4);
    let len = 3 * NORM_TILE as usize + 17;
    let values: Vec<f32> = (0..len).map(|_| random.ordinary()).collect();
    let mut tiles = vec![NormRecord::default(); norm_tiles(len as u64) as usize];
    assert_eq!(tiles.len(), 4);
    norm(Elements::F32(&values), &mut tiles);
    for (tile, values) in tiles.iter().zip(values.chunks(NORM_TILE as usize)) {
        assert_eq!(*tile, norm_tile(Elements::F32(values)));
    }
    norm(Elements::F32(&[]), &mut []);

    // Lane l adds tiles l, l + 1024, …: an order that shows in the last bits.
    let many: Vec<NormRecord> = (0..5000)
        .map(|i| NormRecord {
            sum_of_squares: f64::from(random.ordinary()).abs(),
            non_finite: f64::from(i % 3),
        })
        .collect();
    let mut lanes = vec![0.0; 1024];
    for (i, tile) in many.iter().enumerate() {
        lanes[i % 1024] += tile.sum_of_squares;
    }
    for h in [512, 256, 128, 64, 32, 16, 8, 4, 2, 1] {
        for i in 0..h {
            lanes[i] += lanes[i + h];
        }
    }
    let total = sum_norms(&many);
    assert_eq!(total.sum_of_squares.to_bits(), f64::to_bits(lanes[0]));
    assert_eq!(total.non_finite, many.iter().map(|tile| tile.non_finite).sum::<f64>());
    assert_eq!(sum_norms(&[]), NormRecord::default());
}

#[test]
fn power_by_squaring() {
    assert_eq!(power(0.9, 0), 1.0);
    assert_eq!(power(0.0, 5), 0.0);
    assert_eq!(power(2.0, 62), 2.0_f64.powi(62));
    for exponent in [1, 2, 3, 7, 100, 12345] {
        let exact = (0..exponent).fold(1.0, |product: f64, _| product * 0.999);
        assert!((power(0.999, exponent) / exact - 1.0).abs() < 1e-11, "{exponent}");
    }
    // 5 = 101b: r = s, s^2, s^4, r = s * s^4.
    let s: f64 = 0.95;
    let s2 = s * s;
    assert_eq!(power(s, 5).to_bits(), (s * (s2 * s2)).to_bits());
    assert_eq!(power(0.999, u64::MAX), 0.0);
}

fn groups() -> [GroupRecord; 2] {
    let record = |beta1, beta2| GroupRecord { beta1, beta2, ..GroupRecord::default() };
    [record(0.9, 0.95), record(0.8, 0.999)]
}

fn total(sum_of_squares: f64, non_finite: f64) -> NormRecord {
    NormRecord { sum_of_squares, non_finite }
}

#[test]
fn control_clips_as_torch_does_and_counts_steps() {
    let mut state = ControlRecord {
        max_norm: 1.0,
        inverse_loss_scale: 1.0 / 1024.0,
        skip_on_found_inf: 1,
        ..ControlRecord::default()
    };
    let mut groups = groups();
    // The norm is 4 after the loss scale is taken out.
    control(&total((4.0 * 1024.0_f64).powi(2), 0.0), &mut state, &mut groups);
    assert_eq!(state.norm, 4.0);
    assert_eq!(state.factor, (1.0 / 1024.0 * (1.0 / (4.0 + 1e-6))) as f32);
    assert_eq!((state.step, state.skipped, state.found_inf), (1, 0, 0));
    assert_eq!(groups[0].correction1, (1.0_f64 - 0.9) as f32);
    assert_eq!(groups[1].correction2, (1.0_f64 - 0.999) as f32);

    // Below the limit, and without one, only the loss scale counts.
    control(&total(0.25 * 1024.0 * 1024.0, 0.0), &mut state, &mut groups);
    assert_eq!((state.factor, state.norm, state.step), (1.0 / 1024.0, 0.5, 2));
    assert_eq!(groups[0].correction1, (1.0_f64 - 0.9 * 0.9) as f32);
    state.max_norm = 0.0;
    control(&total(1e30, 0.0), &mut state, &mut groups);
    assert_eq!((state.factor, state.step), (1.0 / 1024.0, 3));
    control(&total(0.0, 0.0), &mut state, &mut groups);
    assert_eq!((state.norm, state.factor), (0.0, 1.0 / 1024.0));
}

#[test]
fn found_inf_leaves_step_and_corrections() {
    let mut state =
        ControlRecord { inverse_loss_scale: 1.0, skip_on_found_inf: 1, ..ControlRecord::default() };
    let mut groups = groups();
    control(&total(1.0, 0.0), &mut state, &mut groups);
    let before = groups;
    control(&total(1.0, 2.0), &mut state, &mut groups);
    assert_eq!((state.found_inf, state.step, state.skipped), (1, 1, 1));
    assert_eq!(groups, before);
    control(&total(1.0, f64::NAN), &mut state, &mut groups);
    assert_eq!((state.found_inf, state.step, state.skipped), (1, 1, 2));
    // A clean step follows as if nothing had been.
    control(&total(1.0, 0.0), &mut state, &mut groups);
    assert_eq!((state.found_inf, state.step, state.skipped), (0, 2, 2));
    // And non-finite gradients pass if they are to.
    state.skip_on_found_inf = 0;
    control(&total(1.0, 1.0), &mut state, &mut groups);
    assert_eq!((state.found_inf, state.step, state.skipped), (0, 3, 2));
}
