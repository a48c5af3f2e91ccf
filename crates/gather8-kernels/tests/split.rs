//! Splitting a master into weight and remainder, and joining them.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod support;

use gather8_kernels::scalar::{
    f32_to_bf16, is_corrupt, join, join_all, split, split_all, validate_all,
};
use support::Random;

/// The rule, in words: the bf16 nearest to the master, halves away from zero, by comparing
/// distances in f64.
fn nearest_half_away(master: f32) -> u16 {
    let down = (master.to_bits() >> 16) as u16;
    let up = down.wrapping_add(1);
    let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    // Above the largest bf16 the next code is infinity; as a number it would be 2^128.
    let above =
        if up & 0x7fff == 0x7f80 { 2.0_f64.powi(128).copysign(master.into()) } else { value(up) };
    let x = f64::from(master);
    if (x - value(down)).abs() < (above - x).abs() { down } else { up }
}

fn check(bits: u32) {
    let master = f32::from_bits(bits);
    let (weight, remainder) = split(master);
    if master.is_nan() {
        assert_eq!((weight, remainder), (0x7fc0, 0), "{bits:#010x}");
        return;
    }
    assert_eq!(join(weight, remainder).to_bits(), bits, "{bits:#010x}");
    assert!(!is_corrupt(weight, remainder), "{bits:#010x}");
    assert_eq!(remainder, bits as u16, "{bits:#010x}");
    if master.is_finite() {
        assert_eq!(weight, nearest_half_away(master), "{bits:#010x}");
    } else {
        assert_eq!(weight, (bits >> 16) as u16);
    }
}

#[test]
fn every_tie_rounds_away_from_zero_and_joins_back() {
    // Sign and exponent and mantissa of every finite bf16, with exactly half of its last place.
    let mut other_than_even = 0;
    for high in (0..=0x7f7f_u32).chain(0x8000..=0xff7f) {
        let bits = high << 16 | 0x8000;
        check(bits);
        let (weight, _) = split(f32::from_bits(bits));
        assert_eq!(u32::from(weight), high + 1, "{bits:#010x}");
        other_than_even += (weight != f32_to_bf16(f32::from_bits(bits))) as u32;
        check(bits - 1);
        check(bits + 1);
        check(high << 16);
        check(high << 16 | 0xffff);
    }
    assert_eq!(other_than_even, 32_640);
}

#[test]
fn special_values_split_and_join() {
    for bits in [
        0,
        0x8000_0000,
        1,
        0x8000_0001,
        0x7fff,
        0x8000,
        0xffff,
        0x007f_ffff,
        0x0080_0000,
        0x7f7f_7fff,
        0x7f7f_8000,
        0x7f7f_ffff,
        0xff7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7f80_0001,
        0x7f80_8000,
        0x7fc0_0000,
        0x7fff_ffff,
        0xff80_0001,
        0xffc0_0000,
        0xffff_ffff,
        0xffff_8000,
        0x7fff_8000,
    ] {
        check(bits);
    }
    // The largest numbers round to infinity and still come back.
    assert_eq!(split(f32::MAX), (0x7f80, 0xffff));
    assert_eq!(join(0x7f80, 0xffff), f32::MAX);
}

#[test]
fn a_zero_with_a_negative_remainder_is_corrupt_and_nothing_else_is() {
    for weight in 0..=u16::MAX {
        for remainder in [0, 1, 0x7fff, 0x8000, 0xffff] {
            let expected = (weight == 0 || weight == 0x8000) && remainder >= 0x8000;
            assert_eq!(is_corrupt(weight, remainder), expected, "{weight:#06x} {remainder:#06x}");
            if expected {
                assert!(join(weight, remainder).is_nan());
            }
        }
    }
    let weights = [0x3f80, 0x0000, 0x8000, 0x0000];
    assert_eq!(validate_all(&weights, &[0x8000, 0x7fff, 0x8001, 0xffff]), Some(2));
    assert_eq!(validate_all(&weights, &[0x8000, 0x7fff, 0x0001, 0]), None);
    assert_eq!(validate_all(&[], &[]), None);
}

#[test]
fn slices_as_single_values() {
    let mut random = Random(2);
    let masters: Vec<f32> = (0..1000).map(|_| random.any_f32()).collect();
    let mut weights = vec![0; 1000];
    let mut remainders = vec![0; 1000];
    split_all(&masters, &mut weights, &mut remainders);
    let mut joined = vec![0.0; 1000];
    join_all(&weights, &remainders, &mut joined);
    for (((&master, &weight), &remainder), &back) in
        masters.iter().zip(&weights).zip(&remainders).zip(&joined)
    {
        assert_eq!((weight, remainder), split(master));
        assert_eq!(back.to_bits(), support::canonical_bits(master));
    }
}

/// `cargo test --profile release-test -- --ignored`.
#[test]
#[ignore = "2^32 values"]
fn every_f32_splits_and_joins() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let blocks = (0..256).skip(thread).step_by(threads);
            scope.spawn(move || {
                for block in blocks {
                    (0..1 << 24).for_each(|low| check(block << 24 | low));
                }
            });
        }
    });
}
