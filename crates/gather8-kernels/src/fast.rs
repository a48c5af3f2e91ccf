//! The passes as they run: [`simd`] at the widest level that the processor has, the
//! same bits as [`scalar`](crate::scalar), the same arguments.

use crate::format::Format;
use crate::layout::NormRecord;
use crate::scalar::{Adam, Elements, ElementsMut, Shard};
use crate::simd::{self, Level};

pub use crate::scalar::transpose;

/// See [`scalar::amax_word`](crate::scalar::amax_word).
pub fn amax_word(src: Elements<'_>) -> u32 {
    simd::amax_word(Level::best(), src)
}

/// See [`scalar::cast`](crate::scalar::cast).
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn cast(src: Elements<'_>, scale: f32, format: Format, dst: &mut [u8]) -> u32 {
    simd::cast(Level::best(), src, scale, format, dst)
}

/// See [`scalar::decode`](crate::scalar::decode).
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn decode(src: &[u8], format: Format, scale_inv: f32, dst: ElementsMut<'_>) {
    simd::decode(Level::best(), src, format, scale_inv, dst);
}

/// See [`scalar::divide`](crate::scalar::divide).
///
/// # Panics
/// If lengths differ.
pub fn divide(src: Elements<'_>, divisor: f32, dst: ElementsMut<'_>) {
    simd::divide(Level::best(), src, divisor, dst);
}

/// See [`scalar::divide_in_place`](crate::scalar::divide_in_place).
pub fn divide_in_place(values: ElementsMut<'_>, divisor: f32) {
    simd::divide_in_place(Level::best(), values, divisor);
}

/// See [`scalar::accumulate`](crate::scalar::accumulate).
///
/// # Panics
/// If lengths differ.
pub fn accumulate(src: Elements<'_>, dst: &mut [f32]) {
    simd::accumulate(Level::best(), src, dst);
}

/// See [`scalar::norm_tile`](crate::scalar::norm_tile).
///
/// # Panics
/// If there is more than a tile.
pub fn norm_tile(elements: Elements<'_>) -> NormRecord {
    simd::norm_tile(Level::best(), elements)
}

/// See [`scalar::norm`](crate::scalar::norm).
///
/// # Panics
/// If `tiles` does not hold one record per started tile.
pub fn norm(src: Elements<'_>, tiles: &mut [NormRecord]) {
    simd::norm(Level::best(), src, tiles);
}

/// See [`scalar::optimize`](crate::scalar::optimize).
///
/// # Panics
/// If lengths differ.
pub fn optimize(adam: &Adam, shard: Shard<'_>) -> u32 {
    simd::optimize(Level::best(), adam, shard)
}
