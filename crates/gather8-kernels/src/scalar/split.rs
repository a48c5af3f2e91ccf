//! A 32-bit master as a BF16 weight and a 16-bit remainder.
//!
//! The weight is the master rounded half away from zero, the remainder is the master's low half,
//! read as a signed number: together they are the master again, bit for bit.

use super::elements::{CANONICAL_BF16_NAN, bf16_to_f32};

/// Weight and remainder of a master; a NaN gives the canonical pair (0x7fc0, 0).
#[inline(always)]
pub const fn split(master: f32) -> (u16, u16) {
    if master.is_nan() {
        // Rounding up the largest NaN would wrap to zero and hide it.
        return (CANONICAL_BF16_NAN, 0);
    }
    let bits = master.to_bits();
    let low = bits as u16;
    let high = (bits >> 16) as u16;
    // No wrap: the high half of a number is at most 0xff80, and then its low half is 0.
    (high + (low >> 15), low)
}

/// The master of a weight and a remainder: undoes [`split`] for every number. The pairs that
/// [`is_corrupt`] names give NaNs.
#[inline(always)]
pub const fn join(weight: u16, remainder: u16) -> f32 {
    let high = weight.wrapping_sub(remainder >> 15);
    f32::from_bits(((high as u32) << 16) | remainder as u32)
}

/// True for a pair that no master splits to: a zero of either sign with a negative remainder.
#[inline]
pub const fn is_corrupt(weight: u16, remainder: u16) -> bool {
    weight & 0x7fff == 0 && remainder & 0x8000 != 0
}

/// [`split`] of every element.
///
/// # Panics
/// If lengths differ.
pub fn split_all(masters: &[f32], weights: &mut [u16], remainders: &mut [u16]) {
    assert_eq!(masters.len(), weights.len(), "split: one weight per master");
    assert_eq!(masters.len(), remainders.len(), "split: one remainder per master");
    for ((&master, weight), remainder) in masters.iter().zip(weights).zip(remainders) {
        (*weight, *remainder) = split(master);
    }
}

/// [`join`] of every element.
///
/// # Panics
/// If lengths differ.
pub fn join_all(weights: &[u16], remainders: &[u16], masters: &mut [f32]) {
    assert_eq!(masters.len(), weights.len(), "join: one weight per master");
    assert_eq!(masters.len(), remainders.len(), "join: one remainder per master");
    for ((&weight, &remainder), master) in weights.iter().zip(remainders).zip(masters) {
        *master = join(weight, remainder);
    }
}

/// The index of the first corrupt pair, if there is one; see [`is_corrupt`].
///
/// # Panics
/// If lengths differ.
pub fn validate_all(weights: &[u16], remainders: &[u16]) -> Option<usize> {
    assert_eq!(weights.len(), remainders.len(), "validate: one remainder per weight");
    weights.iter().zip(remainders).position(|(&weight, &remainder)| is_corrupt(weight, remainder))
}

/// The magnitude of a weight as the amax sees it.
#[inline]
pub(super) const fn weight_abs_bits(weight: u16) -> u32 {
    super::amax::abs_bits(bf16_to_f32(weight))
}
