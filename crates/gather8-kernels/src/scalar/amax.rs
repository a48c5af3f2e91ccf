//! The largest magnitude of a tensor.

use super::elements::{CANONICAL_NAN, Elements};
use crate::layout::TOUCHED;

/// The bits of |x|; 0x7fc00000 for any NaN. As unsigned integers they order as the magnitudes do,
/// with infinity above every finite value and NaN above infinity.
#[inline]
pub const fn abs_bits(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    if bits > 0x7f80_0000 { CANONICAL_NAN } else { bits }
}

/// A slot's word for a tensor: [`TOUCHED`] and the bits of its largest magnitude as an f32. An
/// empty tensor gives `TOUCHED | 0`: a rank without rows has touched the slot all the same.
pub fn amax_word(src: Elements<'_>) -> u32 {
    TOUCHED | src.iter().map(abs_bits).max().unwrap_or(0)
}
