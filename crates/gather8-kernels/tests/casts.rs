//! Casts to float8 and back, against the `float8` crate and against Python's `ml_dtypes` (golden
//! files made by `golden/make.py`).

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod support;

use gather8_kernels::scalar::{
    Elements, ElementsMut, bf16_to_f32, cast, decode, f16_to_f32, f32_to_bf16, f32_to_f16,
};
use gather8_kernels::{E4M3, E5M2, Format};
use support::{Crc32, Random};

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];

fn format_named(name: &str) -> Format {
    FORMATS.into_iter().find(|f| f.name() == name).unwrap()
}

/// The `float8` crate's code of a value that is clamped first, with our NaN.
fn oracle(format: Format, x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let x = x.clamp(-format.max(), format.max());
    match format {
        Format::E4m3 => float8::F8E4M3::from_f32(x).to_bits(),
        Format::E5m2 => float8::F8E5M2::from_f32(x).to_bits(),
    }
}

fn all_16_bit() -> Vec<u16> {
    (0..=u16::MAX).collect()
}

#[test]
fn every_bf16_and_f16_as_the_float8_crate_casts_it() {
    let bits = all_16_bit();
    let mut codes = vec![0; bits.len()];
    for format in FORMATS {
        for scale in [1.0_f32, 0.37, 1234.5, 2.0_f32.powi(-9), 3.0e38, f32::MIN_POSITIVE] {
            cast(Elements::Bf16(&bits), scale, format, &mut codes);
            for (&b, &code) in bits.iter().zip(&codes) {
                let expected = oracle(format, bf16_to_f32(b) * scale);
                assert_eq!(code, expected, "{format:?} bf16 {b:#06x} x {scale}");
            }
            cast(Elements::F16(&bits), scale, format, &mut codes);
            for (&b, &code) in bits.iter().zip(&codes) {
                let expected = oracle(format, f16_to_f32(b) * scale);
                assert_eq!(code, expected, "{format:?} f16 {b:#06x} x {scale}");
            }
        }
    }
}

#[test]
fn every_bf16_and_f16_as_ml_dtypes_casts_it() {
    let crc = Crc32::new();
    let bits = all_16_bit();
    let mut codes = vec![0; bits.len()];
    let mut compared = 0;
    for line in include_str!("golden/digests.txt").lines() {
        let [format, source, scale, digest] =
            line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let src = match source {
            "bf16" => Elements::Bf16(&bits),
            "f16" => Elements::F16(&bits),
            _ => continue,
        };
        let scale = f32::from_bits(u32::from_str_radix(scale, 16).unwrap());
        cast(src, scale, format_named(format), &mut codes);
        assert_eq!(format!("{:08x}", crc.of(&codes)), digest, "{format} {source} x {scale}");
        compared += 1;
    }
    assert_eq!(compared, 2 * 2 * 5);
}

#[test]
fn every_tie_and_its_neighbours_as_ml_dtypes_casts_them() {
    let mut compared = 0;
    for line in include_str!("golden/casts.txt").lines() {
        let [x, e4m3, e5m2] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let x = f32::from_bits(u32::from_str_radix(x, 16).unwrap());
        for (format, expected) in FORMATS.into_iter().zip([e4m3, e5m2]) {
            let mut code = [0];
            cast(Elements::F32(&[x]), 1.0, format, &mut code);
            assert_eq!(format!("{:02x}", code[0]), expected, "{format:?} {:#010x}", x.to_bits());
        }
        compared += 1;
    }
    assert!(compared > 1700);
}

#[test]
fn every_code_decodes_as_ml_dtypes_and_float8_decode_it_and_casts_back() {
    let mut compared = 0;
    for line in include_str!("golden/codes.txt").lines() {
        let [format, code, bits] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let format = format_named(format);
        let code = u8::from_str_radix(code, 16).unwrap();
        let bits = u32::from_str_radix(bits, 16).unwrap();
        let mut value = [0.0];
        decode(&[code], format, 1.0, ElementsMut::F32(&mut value));
        assert_eq!(value[0].to_bits(), bits, "{format:?} {code:#04x}");

        let theirs = match format {
            Format::E4m3 => float8::F8E4M3::from_bits(code).to_f32(),
            Format::E5m2 => float8::F8E5M2::from_bits(code).to_f32(),
        };
        assert_eq!(support::canonical_bits(theirs), bits, "{format:?} {code:#04x}");

        let back = format.encode(value[0]);
        let expected = match (format, code) {
            _ if value[0].is_nan() => 0x7f,
            // The cast never makes an infinity.
            (Format::E5m2, 0x7c) => 0x7b,
            (Format::E5m2, 0xfc) => 0xfb,
            _ => code,
        };
        assert_eq!(back, expected, "{format:?} {code:#04x}");
        compared += 1;
    }
    assert_eq!(compared, 512);
    assert_eq!((0..=255).filter(|&code| E4M3(code).is_nan()).count(), 2);
    assert_eq!((0..=255).filter(|&code| E5M2(code).is_nan()).count(), 6);
    assert_eq!(E4M3::from_f32(-0.0), E4M3(0x80));
    assert_eq!(E5M2::from_f32(f32::NEG_INFINITY).to_f32(), -57344.0);
}

#[test]
fn decode_multiplies_once_and_rounds_to_nearest_even() {
    let codes: Vec<u8> = (0..=255).collect();
    for format in FORMATS {
        for scale_inv in [1.0_f32, 0.001, 0.333_333_34, 1.0e-38, 3.0e38] {
            let mut bf16 = vec![0; 256];
            let mut f16 = vec![0; 256];
            decode(&codes, format, scale_inv, ElementsMut::Bf16(&mut bf16));
            decode(&codes, format, scale_inv, ElementsMut::F16(&mut f16));
            for &code in &codes {
                let product = format.decode(code) * scale_inv;
                let i = usize::from(code);
                let expected =
                    if product.is_nan() { 0x7fc0 } else { half::bf16::from_f32(product).to_bits() };
                assert_eq!(bf16[i], expected, "{format:?} {code:#04x} x {scale_inv}");
                let expected =
                    if product.is_nan() { 0x7e00 } else { half::f16::from_f32(product).to_bits() };
                assert_eq!(f16[i], expected, "{format:?} {code:#04x} x {scale_inv}");
            }
        }
    }
}

#[test]
fn saturation_counts_finite_values_above_the_midpoint_beyond_the_largest() {
    for (format, bound) in [(Format::E4m3, 464.0_f32), (Format::E5m2, 61440.0)] {
        assert_eq!(format.saturation_bound(), bound);
        let above = f32::from_bits(bound.to_bits() + 1);
        let values = [
            format.max(),
            bound,
            -bound,
            above,
            -above,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
        ];
        let mut codes = [0; 10];
        assert_eq!(cast(Elements::F32(&values), 1.0, format, &mut codes), 4);
        let top = format.encode(format.max());
        let bottom = top | 0x80;
        assert_eq!(
            codes,
            [top, top, bottom, top, bottom, top, bottom, top, bottom, 0x7f],
            "{format:?}"
        );
        // Finite, but the product is not.
        assert_eq!(cast(Elements::F32(&[f32::MAX, 1.0]), 2.0, format, &mut [0; 2]), 1);
        assert_eq!(cast(Elements::F32(&[0.5, -0.5]), bound * 2.0, format, &mut [0; 2]), 0);
        assert_eq!(cast(Elements::F32(&[0.5, -0.5]), above * 2.0, format, &mut [0; 2]), 2);
    }
}

#[test]
fn sixteen_bit_types_round_to_nearest_even_with_one_nan() {
    let mut random = Random(1);
    for i in 0..200_000_u32 {
        let x = if i < 65536 {
            // Every tie of bf16.
            f32::from_bits(i << 16 | 0x8000)
        } else {
            random.any_f32()
        };
        if x.is_nan() {
            assert_eq!((f32_to_bf16(x), f32_to_f16(x)), (0x7fc0, 0x7e00));
        } else {
            assert_eq!(f32_to_bf16(x), half::bf16::from_f32(x).to_bits(), "{x:e}");
            assert_eq!(f32_to_f16(x), half::f16::from_f32(x).to_bits(), "{x:e}");
        }
    }
}

#[test]
fn a_transpose_moves_every_byte_to_its_place() {
    use gather8_kernels::scalar::transpose;
    for (rows, cols) in [(0, 0), (0, 7), (7, 0), (1, 1), (1, 9), (3, 5), (64, 33)] {
        let src: Vec<u8> = (0..rows * cols).map(|i| (i % 251) as u8).collect();
        let mut dst = vec![0; src.len()];
        transpose(&src, &mut dst, rows, cols);
        for r in 0..rows {
            for c in 0..cols {
                assert_eq!(dst[c * rows + r], src[r * cols + c], "{rows} x {cols}: {r}, {c}");
            }
        }
    }
}

/// Minutes without optimisation: `cargo test --profile release-test -- --ignored`.
#[test]
#[ignore = "2^32 values"]
fn every_f32_as_float8_and_ml_dtypes_cast_it() {
    let digests: Vec<(Format, u32, &str)> = include_str!("golden/digests.txt")
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .filter(|line| line[1] == "f32")
        .map(|line| (format_named(line[0]), u32::from_str_radix(line[2], 16).unwrap(), line[3]))
        .collect();
    assert_eq!(digests.len(), 512);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let crc = Crc32::new();
                let mut values = vec![0.0; 1 << 24];
                let mut codes = vec![0; 1 << 24];
                loop {
                    let turn = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(&(format, block, digest)) = digests.get(turn) else { return };
                    for (i, value) in (0_u32..).zip(&mut values) {
                        *value = f32::from_bits(block << 24 | i);
                    }
                    cast(Elements::F32(&values), 1.0, format, &mut codes);
                    let found = format!("{:08x}", crc.of(&codes));
                    assert_eq!(found, digest, "{format:?} block {block:#04x}");
                    for (&x, &code) in values.iter().zip(&codes) {
                        assert_eq!(code, oracle(format, x), "{format:?} {:#010x}", x.to_bits());
                    }
                }
            });
        }
    });
}
