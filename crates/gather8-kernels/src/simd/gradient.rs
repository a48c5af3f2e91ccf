//! Division, accumulation, and the norm in its fixed order.

use super::Level;
use super::block::{BLOCK, Block, narrow, next, next_mut, widen};
use crate::layout::{NORM_LANES, NORM_TILE, NormRecord, norm_tiles};
use crate::scalar::{Elements, ElementsMut, canonical};

leveled! {
    fn divide_at(src: Elements<'_>, divisor: f32, dst: ElementsMut<'_>) = divide_all;
    fn divide_in_place_at(values: ElementsMut<'_>, divisor: f32) = divide_in_place_all;
    fn accumulate_at(src: Elements<'_>, dst: &mut [f32]) = accumulate_all;
    fn norm_at(src: Elements<'_>, tiles: &mut [NormRecord]) = norm_all;
}

/// [`scalar::divide`](crate::scalar::divide), bit for bit.
///
/// # Panics
/// If lengths differ.
pub fn divide(level: Level, src: Elements<'_>, divisor: f32, dst: ElementsMut<'_>) {
    assert_eq!(src.len(), dst.len(), "divide: as many elements");
    divide_at(level, src, divisor, dst);
}

#[inline(always)]
fn divide_all(mut src: Elements<'_>, divisor: f32, mut dst: ElementsMut<'_>) {
    let mut values = [0.0; BLOCK];
    while let (Some(from), Some(to)) = (next(&mut src), next_mut(&mut dst)) {
        widen(from, &mut values);
        divide_block(&mut values, divisor);
        narrow(&values, to);
    }
}

/// [`scalar::divide_in_place`](crate::scalar::divide_in_place), bit for bit.
pub fn divide_in_place(level: Level, values: ElementsMut<'_>, divisor: f32) {
    divide_in_place_at(level, values, divisor);
}

#[inline(always)]
fn divide_in_place_all(mut rest: ElementsMut<'_>, divisor: f32) {
    let mut values = [0.0; BLOCK];
    while let Some(block) = next_mut(&mut rest) {
        widen(block.as_elements(), &mut values);
        divide_block(&mut values, divisor);
        narrow(&values, block);
    }
}

#[inline(always)]
fn divide_block(values: &mut Block, divisor: f32) {
    for x in values {
        *x /= divisor;
    }
}

/// [`scalar::accumulate`](crate::scalar::accumulate), bit for bit.
///
/// # Panics
/// If lengths differ.
pub fn accumulate(level: Level, src: Elements<'_>, dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len(), "accumulate: as many elements");
    accumulate_at(level, src, dst);
}

#[inline(always)]
fn accumulate_all(mut src: Elements<'_>, dst: &mut [f32]) {
    let mut values = [0.0; BLOCK];
    for sums in dst.chunks_mut(BLOCK) {
        let Some(from) = next(&mut src) else { return };
        widen(from, &mut values);
        if let Ok(sums) = <&mut Block>::try_from(&mut *sums) {
            let mut out = *sums;
            for (sum, x) in out.iter_mut().zip(&values) {
                *sum = canonical(*sum + *x);
            }
            *sums = out;
        } else {
            for (sum, x) in sums.iter_mut().zip(&values) {
                *sum = canonical(*sum + *x);
            }
        }
    }
}

/// [`scalar::norm_tile`](crate::scalar::norm_tile), bit for bit.
///
/// # Panics
/// If there are more than [`NORM_TILE`] elements.
pub fn norm_tile(level: Level, elements: Elements<'_>) -> NormRecord {
    assert!(elements.len() as u64 <= NORM_TILE, "norm: at most one tile");
    let mut record = [NormRecord::default()];
    norm_at(level, elements, &mut record);
    let [record] = record;
    record
}

/// [`scalar::norm`](crate::scalar::norm), bit for bit.
///
/// # Panics
/// If `tiles` does not hold one record per started tile.
pub fn norm(level: Level, src: Elements<'_>, tiles: &mut [NormRecord]) {
    assert_eq!(tiles.len() as u64, norm_tiles(src.len() as u64), "norm: one record per tile");
    norm_at(level, src, tiles);
}

#[inline(always)]
fn norm_all(mut rest: Elements<'_>, tiles: &mut [NormRecord]) {
    for record in tiles {
        let (elements, after) = rest.split_at(rest.len().min(NORM_TILE as usize));
        *record = tile(elements);
        rest = after;
    }
}

/// Lanes that a block of [`BLOCK`] elements feeds: one group of 4 each.
const FED: usize = BLOCK / 4;
const _: () = assert!(NORM_LANES.is_multiple_of(FED));

#[inline(always)]
fn tile(elements: Elements<'_>) -> NormRecord {
    let mut lanes = [0.0_f64; NORM_LANES];
    let mut non_finite = 0;
    let mut rest = elements;
    while !rest.is_empty() {
        for lanes in lanes.as_chunks_mut::<FED>().0 {
            let Some(block) = next(&mut rest) else { break };
            // Zeros behind the end leave a sum as it is.
            let mut values = [0.0; BLOCK];
            widen(block, &mut values);
            non_finite += add_squares(&values, lanes);
        }
    }
    let mut half = NORM_LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (a, b) in low.iter_mut().zip(high) {
            *a += *b;
        }
        half /= 2;
    }
    let [sum_of_squares, ..] = lanes;
    NormRecord { sum_of_squares, non_finite: f64::from(non_finite) }
}

/// Adds each group's squares to its lane, in the order of the elements; returns how many were not
/// finite.
#[inline(always)]
fn add_squares(values: &Block, lanes: &mut [f64; FED]) -> u32 {
    let mut out = *lanes;
    let mut non_finite = 0;
    for x in values {
        non_finite += !x.is_finite() as u32;
    }
    for (group, lane) in values.as_chunks::<4>().0.iter().zip(&mut out) {
        let [a, b, c, d] = group.map(|x| {
            let x = if x.is_finite() { f64::from(x) } else { 0.0 };
            x * x
        });
        *lane = *lane + a + b + c + d;
    }
    *lanes = out;
    non_finite
}
