//! To float8 codes and back.

use super::elements::{Elements, ElementsMut};
use crate::format::Format;

/// Codes of `f32(x) * scale`, one f32 product, clamped to the format's largest value (infinities
/// too), rounded to nearest even. Returns the number of saturated values, modulo 2^32: finite
/// values whose scaled magnitude lies above [`Format::saturation_bound`], products that overflow
/// to infinity included. An infinity in `src` is clamped but not counted.
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn cast(src: Elements<'_>, scale: f32, format: Format, dst: &mut [u8]) -> u32 {
    assert_eq!(src.len(), dst.len(), "cast: one code per element");
    let mut saturated = 0_u32;
    for (x, code) in src.iter().zip(dst) {
        let y = x * scale;
        saturated =
            saturated.wrapping_add((x.is_finite() && y.abs() > format.saturation_bound()) as u32);
        *code = format.encode(y);
    }
    saturated
}

/// Values of codes: `f32(code) * scale_inv`, one f32 product, to nearest even in `dst`'s type.
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn decode(src: &[u8], format: Format, scale_inv: f32, mut dst: ElementsMut<'_>) {
    assert_eq!(src.len(), dst.len(), "decode: one element per code");
    for (i, &code) in src.iter().enumerate() {
        dst.set(i, format.decode(code) * scale_inv);
    }
}

/// `dst[c * rows + r] = src[r * cols + c]`.
///
/// # Panics
/// If `src` or `dst` does not hold `rows * cols` bytes.
pub fn transpose(src: &[u8], dst: &mut [u8], rows: usize, cols: usize) {
    assert_eq!(Some(src.len()), rows.checked_mul(cols), "transpose: rows * cols bytes");
    assert_eq!(src.len(), dst.len(), "transpose: as many bytes");
    if src.is_empty() {
        return;
    }
    for (r, row) in src.chunks_exact(cols).enumerate() {
        for (&code, column) in row.iter().zip(dst.chunks_exact_mut(rows)) {
            if let Some(to) = column.get_mut(r) {
                *to = code;
            }
        }
    }
}
