//! To float8 codes and back.

use super::Level;
use super::block::{BLOCK, Bf16, Block, F16, F32, Stored, widen_as};
use super::memory::{LINE, fence, prefetch, stream};
use crate::format::Format;
use crate::scalar::{self, Elements, ElementsMut, canonical, f32_to_bf16};

/// How far ahead of the source's stream lines are asked for.
const AHEAD: usize = 4096;
/// From so many codes on they are stored past the caches: what follows so large a pass would find
/// little of them there.
const STREAMED: usize = 1 << 18;

const INFINITY: u32 = 0x7f80_0000;
const ABS: u32 = 0x7fff_ffff;

leveled! {
    fn cast_as<T: Stored, R: Rounding>(
        src: &[T::Bits], scale: f32, dst: &mut [u8], streamed: bool
    ) -> u32 = cast_all;
    fn decode_bf16<R: Rounding>(src: &[u8], scale_inv: f32, dst: &mut [u16]) = decode_bf16_body;
    fn decode_f32<R: Rounding>(src: &[u8], scale_inv: f32, dst: &mut [f32]) = decode_f32_body;
}

/// [`scalar::cast`](crate::scalar::cast), bit for bit.
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn cast(level: Level, src: Elements<'_>, scale: f32, format: Format, dst: &mut [u8]) -> u32 {
    assert_eq!(src.len(), dst.len(), "cast: one code per element");
    let streamed = dst.len() >= STREAMED;
    let saturated = match (src, format) {
        (Elements::Bf16(bits), Format::E4m3) => {
            cast_as::<Bf16, E4m3>(level, bits, scale, dst, streamed)
        }
        (Elements::Bf16(bits), Format::E5m2) => {
            cast_as::<Bf16, E5m2>(level, bits, scale, dst, streamed)
        }
        (Elements::F16(bits), Format::E4m3) => {
            cast_as::<F16, E4m3>(level, bits, scale, dst, streamed)
        }
        (Elements::F16(bits), Format::E5m2) => {
            cast_as::<F16, E5m2>(level, bits, scale, dst, streamed)
        }
        (Elements::F32(values), Format::E4m3) => {
            cast_as::<F32, E4m3>(level, values, scale, dst, streamed)
        }
        (Elements::F32(values), Format::E5m2) => {
            cast_as::<F32, E5m2>(level, values, scale, dst, streamed)
        }
    };
    if streamed {
        fence();
    }
    saturated
}

/// What the branchless code needs to know of a format.
trait Rounding {
    const FORMAT: Format;
    /// Mantissa bits.
    const MANTISSA: u32;
    /// Exponent of the smallest normal number.
    const MIN_EXPONENT: i32;
    /// Bits of the magnitude below which rounding ends at the largest value without a clamp, and
    /// above which a value is saturated.
    const BOUND: u32 = Self::FORMAT.saturation_bound().to_bits();
}

struct E4m3;
struct E5m2;

impl Rounding for E4m3 {
    const FORMAT: Format = Format::E4m3;
    const MANTISSA: u32 = 3;
    const MIN_EXPONENT: i32 = -6;
}

impl Rounding for E5m2 {
    const FORMAT: Format = Format::E5m2;
    const MANTISSA: u32 = 2;
    const MIN_EXPONENT: i32 = -14;
}

/// The code of a value below the bound. Adding 2^(23 - M) times the value's power of two
/// (or that of the smallest normal number, for anything below) makes the sum's last place the
/// code's last place, so that the addition rounds to nearest even; what it adds to the sum's bits
/// is the mantissa with its leading one, and the exponent is counted on top of that.
#[inline(always)]
fn code_within<R: Rounding>(y: f32) -> u8 {
    let bits = y.to_bits();
    let abs = bits & ABS;
    let smallest = ((127 + R::MIN_EXPONENT) as u32) << 23;
    let power = (abs & INFINITY).max(smallest) + ((23 - R::MANTISSA) << 23);
    let sum = (f32::from_bits(abs) + f32::from_bits(power)).to_bits();
    let exponent = power >> (23 - R::MANTISSA);
    let base = (smallest + ((23 - R::MANTISSA) << 23)) >> (23 - R::MANTISSA);
    // What lies outside the bound wraps here, and is thrown away.
    let code = sum.wrapping_sub(power).wrapping_add(exponent - base);
    (code | ((bits >> 24) & 0x80)) as u8
}

/// Codes of one block, and the largest magnitude of the products as bits.
#[inline(always)]
fn encode_within<R: Rounding>(products: &Block, codes: &mut [u8; BLOCK]) -> u32 {
    let mut largest = 0;
    for (&y, code) in products.iter().zip(codes) {
        largest = (y.to_bits() & ABS).max(largest);
        *code = code_within::<R>(y);
    }
    largest
}

/// The same for any products: clamped first, NaNs put in last.
#[inline(always)]
fn encode_any<R: Rounding>(products: &Block, codes: &mut [u8; BLOCK]) {
    let largest = R::FORMAT.max();
    for (&y, code) in products.iter().zip(codes) {
        // A NaN fails both comparisons and becomes the largest; its code is replaced below.
        let magnitude = if y.abs() < largest { y.abs() } else { largest };
        let clamped = code_within::<R>(magnitude.copysign(y));
        *code = if y.is_nan() { 0x7f } else { clamped };
    }
}

/// Finite sources whose products lie above the bound.
#[inline(always)]
fn count_saturated<R: Rounding>(sources: &[f32], products: &[f32]) -> u32 {
    let mut count = 0;
    for (x, y) in sources.iter().zip(products) {
        let abs = y.to_bits() & ABS;
        let above = (abs > R::BOUND) & (abs <= INFINITY);
        count += (above & (x.to_bits() & ABS < INFINITY)) as u32;
    }
    count
}

#[inline(always)]
fn cast_all<T: Stored, R: Rounding>(
    src: &[T::Bits],
    scale: f32,
    dst: &mut [u8],
    streamed: bool,
) -> u32 {
    // Streamed blocks begin at a cache line of the destination.
    let head = if streamed { dst.as_ptr().align_offset(LINE).min(dst.len()) } else { 0 };
    let (src_head, src) = src.split_at(head);
    let (dst_head, dst) = dst.split_at_mut(head);
    let mut saturated = cast_part::<T, R>(src_head, scale, dst_head);

    let (blocks, src_rest) = src.as_chunks::<BLOCK>();
    let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
    for (src, dst) in blocks.iter().zip(dst_blocks) {
        prefetch(src, AHEAD);
        let mut products = [0.0; BLOCK];
        let mut codes = [0; BLOCK];
        for (&x, y) in src.iter().zip(&mut products) {
            *y = T::widen(x) * scale;
        }
        if encode_within::<R>(&products, &mut codes) >= R::BOUND {
            encode_any::<R>(&products, &mut codes);
            let sources = src.map(T::widen);
            saturated = saturated.wrapping_add(count_saturated::<R>(&sources, &products));
        }
        if streamed {
            stream(&codes, dst);
        } else {
            *dst = codes;
        }
    }
    saturated.wrapping_add(cast_part::<T, R>(src_rest, scale, dst_rest))
}

/// Less than a block.
#[inline(always)]
fn cast_part<T: Stored, R: Rounding>(src: &[T::Bits], scale: f32, dst: &mut [u8]) -> u32 {
    let mut sources = [0.0; BLOCK];
    for (&x, to) in src.iter().zip(&mut sources) {
        *to = T::widen(x);
    }
    let mut codes = [0; BLOCK];
    let products = sources.map(|x| x * scale);
    encode_any::<R>(&products, &mut codes);
    for (to, code) in dst.iter_mut().zip(codes) {
        *to = code;
    }
    let (sources, _) = sources.split_at(src.len());
    count_saturated::<R>(sources, &products)
}

/// Casts at most a block of weights, for the optimizer.
#[inline(always)]
pub(super) fn cast_block<T: Stored>(
    weights: &[T::Bits],
    scale: f32,
    format: Format,
    dst: &mut [u8],
) {
    let mut products = [0.0; BLOCK];
    widen_as::<T>(weights, &mut products);
    for y in &mut products {
        *y *= scale;
    }
    let codes = match format {
        Format::E4m3 => encode::<E4m3>(&products),
        Format::E5m2 => encode::<E5m2>(&products),
    };
    if let Ok(dst) = <&mut [u8; BLOCK]>::try_from(&mut *dst) {
        *dst = codes;
    } else {
        for (to, code) in dst.iter_mut().zip(codes) {
            *to = code;
        }
    }
}

#[inline(always)]
fn encode<R: Rounding>(products: &Block) -> [u8; BLOCK] {
    let mut codes = [0; BLOCK];
    if encode_within::<R>(products, &mut codes) >= R::BOUND {
        encode_any::<R>(products, &mut codes);
    }
    codes
}

/// [`scalar::decode`](crate::scalar::decode), bit for bit.
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn decode(level: Level, src: &[u8], format: Format, scale_inv: f32, dst: ElementsMut<'_>) {
    assert_eq!(src.len(), dst.len(), "decode: one element per code");
    match (dst, format) {
        (ElementsMut::Bf16(bits), Format::E4m3) => decode_bf16::<E4m3>(level, src, scale_inv, bits),
        (ElementsMut::Bf16(bits), Format::E5m2) => decode_bf16::<E5m2>(level, src, scale_inv, bits),
        (ElementsMut::F32(values), Format::E4m3) => {
            decode_f32::<E4m3>(level, src, scale_inv, values);
        }
        (ElementsMut::F32(values), Format::E5m2) => {
            decode_f32::<E5m2>(level, src, scale_inv, values);
        }
        // No job has this destination.
        (dst @ ElementsMut::F16(_), _) => scalar::decode(src, format, scale_inv, dst),
    }
}

/// A code's value; some NaN for a NaN.
#[inline(always)]
fn value<R: Rounding>(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    let sign = u32::from(code & 0x80) << 24;
    let normal = (magnitude << (23 - R::MANTISSA)) + (((126 + R::MIN_EXPONENT) as u32) << 23);
    // Multiples of the smallest; via a signed integer, which every vector unit converts.
    let unit = ((127 + R::MIN_EXPONENT - R::MANTISSA as i32) as u32) << 23;
    let subnormal = (magnitude as i32 as f32 * f32::from_bits(unit)).to_bits();
    let number = if magnitude < 1 << R::MANTISSA { subnormal } else { normal };
    let bits = match R::FORMAT {
        Format::E4m3 if magnitude == 0x7f => ABS,
        // Infinity, or a NaN.
        Format::E5m2 if magnitude >= 0x7c => INFINITY | ((magnitude & 3) << 21),
        _ => number,
    };
    f32::from_bits(sign | bits)
}

#[inline(always)]
fn decode_bf16_body<R: Rounding>(src: &[u8], scale_inv: f32, dst: &mut [u16]) {
    decode_all(src, |code| f32_to_bf16(value::<R>(code) * scale_inv), dst);
}

#[inline(always)]
fn decode_f32_body<R: Rounding>(src: &[u8], scale_inv: f32, dst: &mut [f32]) {
    decode_all(src, |code| canonical(value::<R>(code) * scale_inv), dst);
}

#[inline(always)]
fn decode_all<T: Copy + Default>(src: &[u8], value: impl Fn(u8) -> T + Copy, dst: &mut [T]) {
    let (blocks, src_rest) = src.as_chunks::<BLOCK>();
    let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
    for (src, dst) in blocks.iter().zip(dst_blocks) {
        let mut values = [T::default(); BLOCK];
        for (&code, to) in src.iter().zip(&mut values) {
            *to = value(code);
        }
        *dst = values;
    }
    for (&code, to) in src_rest.iter().zip(dst_rest) {
        *to = value(code);
    }
}
