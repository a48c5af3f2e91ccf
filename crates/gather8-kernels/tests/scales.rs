//! Scales against the rule in f64, written once more and differently.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod support;

use gather8_kernels::scale::ScaleRule;
use gather8_kernels::{Error, Format};
use support::Random;

/// Rounds a positive f64 to f32 by integer arithmetic, to nearest even, into the normal range.
fn to_f32(x: f64) -> f32 {
    if x >= f64::from(f32::MAX) {
        return f32::MAX;
    }
    if x <= f64::from(f32::MIN_POSITIVE) {
        return f32::MIN_POSITIVE;
    }
    let bits = x.to_bits();
    let mut kept = bits >> 29;
    let rest = bits & ((1 << 29) - 1);
    let half = 1 << 28;
    if rest > half || (rest == half && kept & 1 == 1) {
        kept += 1;
    }
    // The exponent field counts from 1023 in f64 and from 127 in f32.
    f32::from_bits((kept - ((1023 - 127) << 23)) as u32).min(f32::MAX)
}

/// The largest power of two that is at most `x`.
fn power_below(x: f32) -> f32 {
    let mut power = f32::MIN_POSITIVE;
    while power <= x / 2.0 {
        power *= 2.0;
    }
    power
}

fn expected(format: Format, amax: f32, margin: i32, power_of_two: bool) -> f32 {
    let largest = if format == Format::E4m3 { 448.0_f64 } else { 57344.0 };
    let amax = if f64::from(amax) < 1e-12 { 1e-12 } else { f64::from(amax) };
    let scale = to_f32(largest / amax / 2.0_f64.powi(margin));
    if power_of_two { power_below(scale) } else { scale }
}

fn rule(margin: u32, power_of_two: bool) -> ScaleRule {
    ScaleRule { margin, power_of_two }
}

fn check(format: Format, amax: f32, margin: u32, power_of_two: bool) {
    let found = rule(margin, power_of_two).scale(format, amax).unwrap();
    let wanted = expected(format, amax, margin as i32, power_of_two);
    assert_eq!(
        found.to_bits(),
        wanted.to_bits(),
        "{format:?} {amax:e} margin {margin} power of two {power_of_two}: {found:e}, not {wanted:e}"
    );
}

#[test]
fn a_million_amaxes() {
    let mut random = Random(3);
    for i in 0..1_000_000_u32 {
        let amax = f32::from_bits(random.word() % 0x7f80_0000);
        let format = if i & 1 == 0 { Format::E4m3 } else { Format::E5m2 };
        check(format, amax, 0, false);
        if i % 16 == 0 {
            check(format, amax, random.word() % 33, random.word() & 1 == 0);
        }
    }
}

#[test]
fn corners_at_every_margin() {
    for format in [Format::E4m3, Format::E5m2] {
        for margin in 0..=32 {
            for amax in [0.0, 1e-45, 1e-12, 9.999_999e-13, 1.0, 448.0, 57344.0, 464.0, f32::MAX] {
                check(format, amax, margin, false);
                check(format, amax, margin, true);
            }
        }
    }
    let plain = ScaleRule::default();
    assert_eq!(plain.scale(Format::E4m3, 448.0).unwrap(), 1.0);
    assert_eq!(plain.scale(Format::E5m2, 57344.0).unwrap(), 1.0);
    assert_eq!(plain.scale(Format::E4m3, 0.0).unwrap(), (448.0_f64 / 1e-12) as f32);
    assert_eq!(plain.scale(Format::E4m3, 1e-45).unwrap(), (448.0_f64 / 1e-12) as f32);
    // 448 / 3.4e38 is a normal number; 2^-32 of it is not.
    assert_eq!(rule(32, false).scale(Format::E4m3, f32::MAX).unwrap(), f32::MIN_POSITIVE);
    assert_eq!(rule(32, true).scale(Format::E4m3, f32::MAX).unwrap(), f32::MIN_POSITIVE);
}

#[test]
fn every_scale_has_a_finite_normal_inverse() {
    let mut random = Random(4);
    for _ in 0..10_000 {
        let amax = f32::from_bits(random.word() % 0x7f80_0000);
        let scale = rule(random.word() % 33, false).scale(Format::E5m2, amax).unwrap();
        assert!(scale.is_normal() && (1.0 / scale).is_finite() && 1.0 / scale > 0.0, "{scale:e}");
    }
}

/// Scales just below a power of two: taking `exp2(floor(log2(scale)))` in f32 rounds the logarithm
/// up to the integer and doubles the scale, so that the largest values saturate.
#[test]
fn just_below_a_power_of_two_the_scale_rounds_down() {
    let mut trapped = 0;
    for exponent in -20..=20 {
        let power = 2.0_f64.powi(exponent);
        for ulps in 1..=4 {
            let below = f32::from_bits((power as f32).to_bits() - ulps);
            // An amax whose scale is that value, if there is one.
            let amax = (448.0 / f64::from(below)) as f32;
            let plain = rule(0, false).scale(Format::E4m3, amax).unwrap();
            let rounded = rule(0, true).scale(Format::E4m3, amax).unwrap();
            check(Format::E4m3, amax, 0, true);
            assert!(rounded <= plain && rounded > plain / 2.0, "{amax:e}");
            if plain < power as f32 && plain.log2().floor().exp2() == power as f32 {
                assert_eq!(rounded, power as f32 / 2.0, "{amax:e}");
                trapped += 1;
            }
        }
    }
    assert!(trapped > 20, "the trap was met {trapped} times only");
}

#[test]
fn a_non_finite_amax_is_an_error() {
    for amax in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = ScaleRule::default().scale(Format::E4m3, amax).unwrap_err();
        assert!(matches!(error, Error::NonFiniteAmax { .. }), "{error}");
    }
}

#[test]
fn a_margin_out_of_range_is_an_error() {
    assert!(rule(32, false).check().is_ok());
    for margin in [33, u32::MAX] {
        let error = rule(margin, false).scale(Format::E4m3, 1.0).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { name: "margin", .. }), "{error}");
    }
}
