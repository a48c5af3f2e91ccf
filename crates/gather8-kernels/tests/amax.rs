//! The largest magnitude, as a word that survives an integer MAX.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod support;

use gather8_kernels::layout::TOUCHED;
use gather8_kernels::scalar::{Elements, amax_word, f16_to_f32};
use support::Random;

#[test]
fn the_word_orders_zero_finite_infinity_nan() {
    let words = [
        amax_word(Elements::F32(&[])),
        amax_word(Elements::F32(&[-1e-45, 0.0])),
        amax_word(Elements::F32(&[1.0, -2.0, 0.5])),
        amax_word(Elements::F32(&[f32::MIN, 1.0])),
        amax_word(Elements::F32(&[f32::NEG_INFINITY, 1.0])),
        amax_word(Elements::F32(&[f32::INFINITY, f32::from_bits(0xff80_0001), 1.0])),
    ];
    assert!(words.is_sorted_by(|a, b| a < b), "{words:x?}");
    assert_eq!(words[0], TOUCHED);
    assert_eq!(words[2], TOUCHED | 2.0_f32.to_bits());
    assert_eq!(words[5], TOUCHED | 0x7fc0_0000);
    // Untouched lies below them all.
    assert!(words.iter().all(|&word| word > 0));
}

#[test]
fn every_type_is_read_as_it_is_stored() {
    assert_eq!(amax_word(Elements::Bf16(&[0xc000, 0x3f80])), TOUCHED | 2.0_f32.to_bits());
    assert_eq!(amax_word(Elements::F16(&[0xc000, 0x3c00])), TOUCHED | 2.0_f32.to_bits());
    // Subnormals of f16 are ordinary in f32.
    assert_eq!(amax_word(Elements::F16(&[0x8001])), TOUCHED | 2.0_f32.powi(-24).to_bits());
    for nan in [0x7f81, 0xffff] {
        assert_eq!(amax_word(Elements::Bf16(&[nan, 0x7f80])), TOUCHED | 0x7fc0_0000);
    }
    for nan in [0x7c01, 0xffff] {
        assert_eq!(amax_word(Elements::F16(&[nan, 0x7c00])), TOUCHED | 0x7fc0_0000);
    }
    for bits in 0..=u16::MAX {
        let x = f16_to_f32(bits);
        let expected = if x.is_nan() { 0x7fc0_0000 } else { x.abs().to_bits() };
        assert_eq!(amax_word(Elements::F16(&[bits])), TOUCHED | expected);
    }
}

#[test]
fn against_a_fold_in_f64() {
    let mut random = Random(11);
    for len in [1, 2, 100, 5000] {
        let values: Vec<f32> = (0..len).map(|_| random.ordinary()).collect();
        let largest = values.iter().fold(0.0, |a: f64, &x| a.max(f64::from(x).abs()));
        assert_eq!(amax_word(Elements::F32(&values)), TOUCHED | (largest as f32).to_bits());
    }
}
