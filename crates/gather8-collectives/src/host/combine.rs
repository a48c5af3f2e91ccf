//! Sums and maxima over the ranks' bytes, in rank order.

use crate::communicator::Reduce;

/// The only f32 NaN that is ever stored.
const NAN_F32: u32 = 0x7fc0_0000;
/// The only BF16 NaN that is ever stored.
const NAN_BF16: u16 = 0x7fc0;

/// `out[i]` = the reduction of `sources[0][i]`, `sources[1][i]`, … in this order. BF16 is added in
/// f32 and rounded once, to nearest even. A NaN sum is stored as the canonical NaN. Sources that
/// are shorter than `out` leave its tail as zeros.
pub(crate) fn reduce(reduce: Reduce, sources: &[&[u8]], out: &mut [u8]) {
    match reduce {
        Reduce::MaxU32 => fold(sources, out, u32::from_le_bytes, u32::max, u32::to_le_bytes),
        Reduce::SumF32 => fold(
            sources,
            out,
            f32::from_le_bytes,
            |a, b| a + b,
            |sum| {
                if sum.is_nan() { NAN_F32.to_le_bytes() } else { sum.to_le_bytes() }
            },
        ),
        Reduce::SumF64 => fold(
            sources,
            out,
            f64::from_le_bytes,
            |a, b| a + b,
            |sum| {
                if sum.is_nan() { f64::NAN.to_le_bytes() } else { sum.to_le_bytes() }
            },
        ),
        Reduce::SumBf16 => fold(
            sources,
            out,
            |bytes: [u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16),
            |a, b| a + b,
            |sum| round_bf16(sum).to_le_bytes(),
        ),
    }
}

/// How many elements are folded at once: few enough for the sums to stay in the first cache.
const BLOCK: usize = 1024;

fn fold<const SIZE: usize, T: Copy + Default>(
    sources: &[&[u8]],
    out: &mut [u8],
    load: impl Fn([u8; SIZE]) -> T,
    add: impl Fn(T, T) -> T,
    store: impl Fn(T) -> [u8; SIZE],
) {
    let Some((first, others)) = sources.split_first() else {
        out.fill(0);
        return;
    };
    let mut sums = [T::default(); BLOCK];
    for (block, out) in out.chunks_mut(BLOCK * SIZE).enumerate() {
        let at = block * BLOCK * SIZE;
        for (sum, bytes) in sums.iter_mut().zip(elements::<SIZE>(first, at)) {
            *sum = load(*bytes);
        }
        for source in others {
            for (sum, bytes) in sums.iter_mut().zip(elements::<SIZE>(source, at)) {
                *sum = add(*sum, load(*bytes));
            }
        }
        for (bytes, sum) in out.as_chunks_mut::<SIZE>().0.iter_mut().zip(&sums) {
            *bytes = store(*sum);
        }
    }
}

/// The elements of a source from byte `at` on.
fn elements<const SIZE: usize>(source: &[u8], at: usize) -> &[[u8; SIZE]] {
    source.get(at..).unwrap_or_default().as_chunks::<SIZE>().0
}

/// To nearest even; every NaN to the canonical one.
fn round_bf16(x: f32) -> u16 {
    if x.is_nan() {
        return NAN_BF16;
    }
    let bits = x.to_bits();
    let half = 0x7fff + ((bits >> 16) & 1);
    ((bits + half) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of<T: bytemuck::Pod>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }

    #[test]
    fn adds_in_rank_order() {
        // 1e8 + 1 - 1e8 is 0 in f32 in this order, 1 in any order that adds the large ones first.
        let ranks = [bytes_of(&[1e8_f32]), bytes_of(&[1.0_f32]), bytes_of(&[-1e8_f32])];
        let sources = ranks.iter().map(Vec::as_slice).collect::<Vec<_>>();
        let mut out = [0; 4];
        reduce(Reduce::SumF32, &sources, &mut out);
        assert_eq!(f32::from_le_bytes(out), 0.0);
    }

    #[test]
    fn bf16_is_rounded_once() {
        // 256 + 1 + 1 is 258 in f32; rounded after each addition it would stay 256 (ties to even).
        let ranks = [0x4380_u16, 0x3f80, 0x3f80].map(|bits| bits.to_le_bytes().to_vec());
        let sources = ranks.iter().map(Vec::as_slice).collect::<Vec<_>>();
        let mut out = [0; 2];
        reduce(Reduce::SumBf16, &sources, &mut out);
        assert_eq!(u16::from_le_bytes(out), 0x4381);
    }

    #[test]
    fn nan_is_canonical_and_max_keeps_it() {
        let nan = f32::from_bits(0xffc1_2345);
        let (a, b) = (bytes_of(&[nan, 1.0]), bytes_of(&[1.0_f32, 2.0]));
        let mut out = [0; 8];
        reduce(Reduce::SumF32, &[&a, &b], &mut out);
        assert_eq!(out[..4], NAN_F32.to_le_bytes());
        assert_eq!(out[4..], 3.0_f32.to_le_bytes());

        let (a, b) = (bytes_of(&[0xffc0_0000_u32]), bytes_of(&[0x8000_0001_u32]));
        let mut out = [0; 4];
        reduce(Reduce::MaxU32, &[&b, &a], &mut out);
        assert_eq!(u32::from_le_bytes(out), 0xffc0_0000);
    }

    #[test]
    fn blocks_meet_without_a_seam() {
        let n = 3 * BLOCK + 17;
        let a = (0..n).map(|i| i as f64).collect::<Vec<_>>();
        let b = (0..n).map(|i| 2.0 * i as f64).collect::<Vec<_>>();
        let (a, b) = (bytes_of(&a), bytes_of(&b));
        let mut out = vec![0; n * 8];
        reduce(Reduce::SumF64, &[&a, &b], &mut out);
        for (i, sum) in out.as_chunks::<8>().0.iter().enumerate() {
            assert_eq!(f64::from_le_bytes(*sum), 3.0 * i as f64);
        }
    }

    #[test]
    fn bf16_rounding_matches_half() {
        for bits in (0..=u32::MAX).step_by(65_521) {
            let x = f32::from_bits(bits);
            if !x.is_nan() {
                assert_eq!(round_bf16(x), half::bf16::from_f32(x).to_bits(), "{bits:#x}");
            }
        }
    }
}
