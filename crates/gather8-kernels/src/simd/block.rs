//! Blocks of elements, widened to f32 and stored again.

use crate::scalar::{Elements, ElementsMut, bf16_to_f32, canonical, f32_to_bf16, f32_to_f16};

/// Elements in a block: an array of f32 of this length is 1 KiB, so that several stay in
/// the first cache. A multiple of every vector's length.
pub(super) const BLOCK: usize = 256;

/// A block in f32; past its end, in the last block of a tensor, whatever was there before.
pub(super) type Block = [f32; BLOCK];

/// Exact, without a branch. NaNs keep no particular payload.
#[inline(always)]
pub(super) const fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = (bits & 0x7fff) as u32;
    let sign = ((bits & 0x8000) as u32) << 16;
    // Another bias for numbers; all ones again for infinity and NaN.
    let normal = (magnitude << 13) + if magnitude >= 0x7c00 { 224 << 23 } else { 112 << 23 };
    // Multiples of 2^-24; via a signed integer, which every vector unit converts.
    let subnormal = (magnitude as i32 as f32 * f32::from_bits(103 << 23)).to_bits();
    f32::from_bits(sign | if magnitude < 0x0400 { subnormal } else { normal })
}

/// A type that elements are stored in.
pub(super) trait Stored {
    type Bits: Copy + Default;

    /// Exact.
    fn widen(bits: Self::Bits) -> f32;

    /// To nearest even; every NaN to the canonical one.
    fn narrow(x: f32) -> Self::Bits;
}

pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct F32;

impl Stored for Bf16 {
    type Bits = u16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        bf16_to_f32(bits)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        f32_to_bf16(x)
    }
}

impl Stored for F16 {
    type Bits = u16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f16_to_f32(bits)
    }

    /// One by one: no pass in vectors stores F16.
    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        f32_to_f16(x)
    }
}

impl Stored for F32 {
    type Bits = f32;

    #[inline(always)]
    fn widen(bits: f32) -> f32 {
        bits
    }

    #[inline(always)]
    fn narrow(x: f32) -> f32 {
        canonical(x)
    }
}

/// Widens at most a block.
#[inline(always)]
pub(super) fn widen(from: Elements<'_>, to: &mut Block) {
    match from {
        Elements::Bf16(bits) => widen_as::<Bf16>(bits, to),
        Elements::F16(bits) => widen_as::<F16>(bits, to),
        Elements::F32(values) => widen_as::<F32>(values, to),
    }
}

/// A whole block has a length that the compiler knows.
#[inline(always)]
pub(super) fn widen_as<T: Stored>(from: &[T::Bits], to: &mut Block) {
    if let Ok(from) = <&[T::Bits; BLOCK]>::try_from(from) {
        for (&x, y) in from.iter().zip(to) {
            *y = T::widen(x);
        }
    } else {
        for (&x, y) in from.iter().zip(to) {
            *y = T::widen(x);
        }
    }
}

/// Stores at most a block.
#[inline(always)]
pub(super) fn narrow(from: &Block, to: ElementsMut<'_>) {
    match to {
        ElementsMut::Bf16(bits) => narrow_as::<Bf16>(from, bits),
        ElementsMut::F16(bits) => narrow_as::<F16>(from, bits),
        ElementsMut::F32(values) => narrow_as::<F32>(from, values),
    }
}

/// Through a local array, which cannot overlap anything.
#[inline(always)]
fn narrow_as<T: Stored>(from: &Block, to: &mut [T::Bits]) {
    if let Ok(to) = <&mut [T::Bits; BLOCK]>::try_from(&mut *to) {
        let mut out = [T::Bits::default(); BLOCK];
        for (&x, y) in from.iter().zip(&mut out) {
            *y = T::narrow(x);
        }
        *to = out;
    } else {
        for (&x, y) in from.iter().zip(to) {
            *y = T::narrow(x);
        }
    }
}

/// Cuts the next block off the front; `None` at the end.
#[inline(always)]
pub(super) fn next<'a>(rest: &mut Elements<'a>) -> Option<Elements<'a>> {
    if rest.is_empty() {
        return None;
    }
    let (block, after) = rest.split_at(rest.len().min(BLOCK));
    *rest = after;
    Some(block)
}

/// As [`next`], to write.
#[inline(always)]
pub(super) fn next_mut<'a>(rest: &mut ElementsMut<'a>) -> Option<ElementsMut<'a>> {
    if rest.is_empty() {
        return None;
    }
    let all = std::mem::replace(rest, ElementsMut::F32(&mut []));
    let mid = all.len().min(BLOCK);
    let (block, after) = all.split_at(mid);
    *rest = after;
    Some(block)
}
