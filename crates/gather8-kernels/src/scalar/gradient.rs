//! Gradients: division, accumulation, the norm, and the decision about the step.

use super::elements::{Elements, ElementsMut, canonical};
use crate::layout::{
    ControlRecord, GroupRecord, NORM_FINAL_LANES, NORM_LANES, NORM_TILE, NormRecord,
};

/// `dst = f32(src) / divisor`, an IEEE division, to nearest even in `dst`'s type.
///
/// # Panics
/// If lengths differ.
pub fn divide(src: Elements<'_>, divisor: f32, mut dst: ElementsMut<'_>) {
    assert_eq!(src.len(), dst.len(), "divide: as many elements");
    for (i, x) in src.iter().enumerate() {
        dst.set(i, x / divisor);
    }
}

/// [`divide`] where source and destination are the same memory.
pub fn divide_in_place(mut values: ElementsMut<'_>, divisor: f32) {
    for i in 0..values.len() {
        values.set(i, values.get(i) / divisor);
    }
}

/// `dst = dst + f32(src)` in f32; NaNs are stored canonical.
///
/// # Panics
/// If lengths differ.
pub fn accumulate(src: Elements<'_>, dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len(), "accumulate: as many elements");
    for (x, sum) in src.iter().zip(dst) {
        *sum = canonical(*sum + x);
    }
}

/// The norm's record of one tile of at most [`NORM_TILE`] elements. Lane `l` of [`NORM_LANES`]
/// adds the squares (f64, exact) of the finite elements of groups `l`, `l + 256`, … of 4 elements,
/// in order; then the lanes are added pairwise, `s[i] += s[i + h]` for h = 128, 64, … 1.
///
/// # Panics
/// If there are more than [`NORM_TILE`] elements.
pub fn norm_tile(elements: Elements<'_>) -> NormRecord {
    assert!(elements.len() as u64 <= NORM_TILE, "norm: at most one tile");
    let mut lanes = [0.0_f64; NORM_LANES];
    let mut non_finite = 0_u32;
    let mut rest = elements;
    while !rest.is_empty() {
        for lane in &mut lanes {
            let (group, after) = rest.split_at(rest.len().min(4));
            rest = after;
            for x in group.iter() {
                if x.is_finite() {
                    *lane += f64::from(x) * f64::from(x);
                } else {
                    non_finite += 1;
                }
            }
        }
    }
    NormRecord { sum_of_squares: halving_sum(&mut lanes), non_finite: f64::from(non_finite) }
}

/// [`norm_tile`] of every tile of a tensor.
///
/// # Panics
/// If `tiles` does not hold one record per started tile.
pub fn norm(src: Elements<'_>, tiles: &mut [NormRecord]) {
    assert_eq!(
        tiles.len() as u64,
        crate::layout::norm_tiles(src.len() as u64),
        "norm: one record per tile"
    );
    let mut rest = src;
    for tile in tiles {
        let (elements, after) = rest.split_at(rest.len().min(NORM_TILE as usize));
        *tile = norm_tile(elements);
        rest = after;
    }
}

/// The sum of tiles' records: lane `l` of [`NORM_FINAL_LANES`] adds the tiles `l`, `l + 1024`, …
/// in order; then the lanes are added pairwise, h = 512, … 1.
pub fn sum_norms(tiles: &[NormRecord]) -> NormRecord {
    let mut sums = [0.0_f64; NORM_FINAL_LANES];
    let mut counts = [0.0_f64; NORM_FINAL_LANES];
    for round in tiles.chunks(NORM_FINAL_LANES) {
        for ((tile, sum), count) in round.iter().zip(&mut sums).zip(&mut counts) {
            *sum += tile.sum_of_squares;
            *count += tile.non_finite;
        }
    }
    NormRecord { sum_of_squares: halving_sum(&mut sums), non_finite: halving_sum(&mut counts) }
}

/// Adds a power of two of lanes: `s[i] += s[i + h]` for i < h, h halving down to 1.
fn halving_sum(lanes: &mut [f64]) -> f64 {
    let mut half = lanes.len() / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (a, b) in low.iter_mut().zip(high) {
            *a += *b;
        }
        half /= 2;
    }
    lanes.first().copied().unwrap_or(0.0)
}

/// `base^exponent` by squaring, in f64, from the lowest bit of the exponent up: with r = 1 and
/// s = base, for every bit: r = r * s if it is set, then s = s * s while higher bits remain. A
/// library's pow would differ between devices.
pub const fn power(base: f64, exponent: u64) -> f64 {
    let mut result = 1.0;
    let mut square = base;
    let mut left = exponent;
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        left >>= 1;
        if left > 0 {
            square *= square;
        }
    }
    result
}

/// Decides the step, as [`Control`](crate::job::Control) states it:
///
/// - `norm = sqrt(sum) * inverse_loss_scale` in f64, over the finite elements.
/// - `factor = inverse_loss_scale * clip` in f64, rounded once to f32, where
///   `clip = max_norm / (norm + 1e-6)` if `max_norm > 0` and that is below 1, else 1.
/// - Found-inf: the count of non-finite elements is not 0 and skipping is on. Then `skipped`
///   counts up, and `step` and corrections stay.
/// - Else `step` counts up, and every group's corrections are `1 - beta^step` ([`power`]) in f64,
///   rounded once.
pub fn control(total: &NormRecord, control: &mut ControlRecord, groups: &mut [GroupRecord]) {
    let inverse = f64::from(control.inverse_loss_scale);
    control.norm = total.sum_of_squares.sqrt() * inverse;
    let ratio = f64::from(control.max_norm) / (control.norm + 1e-6);
    let clip = if control.max_norm > 0.0 && ratio < 1.0 { ratio } else { 1.0 };
    control.factor = (inverse * clip) as f32;

    let found_inf = total.non_finite != 0.0 && control.skip_on_found_inf != 0;
    control.found_inf = found_inf as u32;
    if found_inf {
        control.skipped = control.skipped.wrapping_add(1);
        return;
    }
    control.step = control.step.wrapping_add(1);
    for group in groups {
        group.correction1 = (1.0 - power(group.beta1, control.step)) as f32;
        group.correction2 = (1.0 - power(group.beta2, control.step)) as f32;
    }
}
