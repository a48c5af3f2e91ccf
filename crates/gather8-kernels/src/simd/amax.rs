//! The largest magnitude: an integer maximum over the bits without their sign.

use super::Level;
use super::block::f16_to_f32;
use super::memory::{LINE, prefetch};
use crate::layout::TOUCHED;
use crate::scalar::{Elements, abs_bits, bf16_to_f32};

/// Pages that are read at the same time: processors fetch ahead within a page only, so a single
/// stream waits at the start of each.
const PAGES: usize = 8;
const PAGE: usize = 4096;
/// How far ahead of each stream lines are asked for.
const AHEAD: usize = 512;

leveled! {
    fn largest_u16(src: &[u16]) -> u16 = largest_u16_body;
    fn largest_f32(src: &[f32]) -> u32 = largest_f32_body;
}

/// [`scalar::amax_word`](crate::scalar::amax_word), bit for bit.
pub fn amax_word(level: Level, src: Elements<'_>) -> u32 {
    // The bits of magnitudes order as the magnitudes do in every type, NaNs above infinity; one
    // conversion of the largest is enough.
    TOUCHED
        | match src {
            Elements::Bf16(bits) => abs_bits(bf16_to_f32(largest_u16(level, bits))),
            Elements::F16(bits) => abs_bits(f16_to_f32(largest_u16(level, bits))),
            Elements::F32(values) => abs_bits(f32::from_bits(largest_f32(level, values))),
        }
}

#[inline(always)]
fn largest_u16_body(src: &[u16]) -> u16 {
    largest(src, |x| x & 0x7fff)
}

#[inline(always)]
fn largest_f32_body(src: &[f32]) -> u32 {
    largest(src, |x| x.to_bits() & 0x7fff_ffff)
}

#[inline(always)]
fn largest<T: Copy, M: Copy + Ord + Default>(src: &[T], magnitude: impl Fn(T) -> M + Copy) -> M {
    let per_page = PAGE / size_of::<T>();
    let per_turn = 2 * LINE / size_of::<T>();
    let mut largest = M::default();
    let groups = src.chunks_exact(PAGES * per_page);
    let rest = groups.remainder();
    for group in groups {
        let mut pages = [group; PAGES];
        for (page, values) in pages.iter_mut().zip(group.chunks_exact(per_page)) {
            *page = values;
        }
        for _ in 0..per_page / per_turn {
            for page in &mut pages {
                let (turn, after) = page.split_at(per_turn);
                prefetch(turn, AHEAD);
                largest = largest.max(maximum(turn, magnitude));
                *page = after;
            }
        }
    }
    largest.max(maximum(rest, magnitude))
}

#[inline(always)]
fn maximum<T: Copy, M: Copy + Ord + Default>(values: &[T], magnitude: impl Fn(T) -> M) -> M {
    values.iter().fold(M::default(), |largest, &x| largest.max(magnitude(x)))
}
