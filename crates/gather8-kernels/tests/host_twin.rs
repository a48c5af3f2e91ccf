//! The CUDA kernels' scalar functions, compiled as host C++, give the bits of the Rust reference.
//! Needs a C++ compiler; without one the tests say so and pass, which `.ci/run` notices.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "the helpers of tests fail as tests do"
)]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use gather8_kernels::Format;
use gather8_kernels::layout::GroupRecord;
use gather8_kernels::scalar::{self, Adam};
use gather8_kernels::scale::ScaleRule;
use libloading::Library;
use support::Random;

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];
const COUNT: usize = 1 << 16;

fn twin() -> Option<&'static Library> {
    static TWIN: OnceLock<Option<Library>> = OnceLock::new();
    TWIN.get_or_init(|| {
        let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
        let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("host_twin-{}.so", std::process::id()));
        let built = Command::new("g++")
            .args([
                "-std=c++17",
                "-O2",
                "-shared",
                "-fPIC",
                "-ffp-contract=off",
                "-Wall",
                "-Werror",
                "-o",
            ])
            .arg(&out)
            .arg("-I")
            .arg(crate_dir.join("kernels"))
            .arg(crate_dir.join("tests/host_twin.cpp"))
            .output();
        let output = match built {
            Ok(output) => output,
            Err(error) => {
                eprintln!("skipped: no C++ compiler (g++: {error})");
                return None;
            }
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: just built from this crate's sources; it has no initialisers.
        let library = unsafe { Library::new(&out) }.unwrap();
        let _ = std::fs::remove_file(&out);
        Some(library)
    })
    .as_ref()
}

/// Calls `$name` of the twin with pointers to these arrays and numbers.
macro_rules! call {
    ($library:expr, $name:literal, $($argument:expr => $kind:ty),+) => {{
        // SAFETY: the function of host_twin.cpp with its arguments; every array holds as many
        // elements as the count says.
        unsafe {
            let function = $library.get::<unsafe extern "C" fn($($kind),+)>($name).unwrap();
            function($($argument),+);
        }
    }};
}

fn floats(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..count).map(|_| random.any_f32()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn casts_both_ways() {
    let Some(twin) = twin() else { return };
    // Every BF16 value, and random ones; every code.
    let mut x: Vec<f32> = (0..=u16::MAX).map(scalar::bf16_to_f32).collect();
    x.extend(floats(1, 1 << 20));
    let codes: Vec<u8> = (0..=255).collect();
    for format in FORMATS {
        let e5m2 = i32::from(format == Format::E5m2);
        let mut encoded = vec![0_u8; x.len()];
        call!(twin, b"twin_encode", x.as_ptr() => *const f32, encoded.as_mut_ptr() => *mut u8, x.len() as u64 => u64, e5m2 => i32);
        let expected: Vec<_> = x.iter().map(|&x| format.encode(x)).collect();
        assert_eq!(encoded, expected, "{format:?}");

        let mut decoded = [0_f32; 256];
        call!(twin, b"twin_decode", codes.as_ptr() => *const u8, decoded.as_mut_ptr() => *mut f32, 256 => u64, e5m2 => i32);
        let expected: Vec<_> = codes.iter().map(|&code| format.decode(code)).collect();
        assert_eq!(bits(&decoded), bits(&expected), "{format:?}");

        let scaled: Vec<f32> = x.iter().map(|x| x * 3.0e3).collect();
        let mut counted = vec![0_u8; x.len()];
        call!(twin, b"twin_saturates", x.as_ptr() => *const f32, scaled.as_ptr() => *const f32, counted.as_mut_ptr() => *mut u8, x.len() as u64 => u64, e5m2 => i32);
        let expected: Vec<_> = x
            .iter()
            .map(|&x| scalar::cast(scalar::Elements::F32(&[x]), 3.0e3, format, &mut [0]) as u8)
            .collect();
        assert_eq!(counted, expected, "{format:?}");
    }
}

#[test]
fn sixteen_bit_types_and_amax_words() {
    let Some(twin) = twin() else { return };
    let x = floats(2, 1 << 20);
    let count = x.len() as u64;
    let mut rounded = vec![0_u16; x.len()];
    call!(twin, b"twin_to_bf16", x.as_ptr() => *const f32, rounded.as_mut_ptr() => *mut u16, count => u64);
    assert!(rounded.iter().zip(&x).all(|(&h, &x)| h == scalar::f32_to_bf16(x)));

    let mut words = vec![0_u32; x.len()];
    call!(twin, b"twin_amax_word", x.as_ptr() => *const f32, words.as_mut_ptr() => *mut u32, count => u64);
    assert!(
        words.iter().zip(&x).all(|(&w, &x)| w == scalar::amax_word(scalar::Elements::F32(&[x])))
    );

    let halves: Vec<u16> = (0..=u16::MAX).collect();
    let mut wide = vec![0_f32; halves.len()];
    call!(twin, b"twin_from_f16", halves.as_ptr() => *const u16, wide.as_mut_ptr() => *mut f32, halves.len() as u64 => u64);
    let expected: Vec<_> =
        halves.iter().map(|&h| scalar::canonical(scalar::f16_to_f32(h))).collect();
    assert_eq!(bits(&wide), bits(&expected));
}

#[test]
fn splits_and_joins() {
    let Some(twin) = twin() else { return };
    let x = floats(3, 1 << 20);
    let count = x.len() as u64;
    let (mut high, mut low) = (vec![0_u16; x.len()], vec![0_u16; x.len()]);
    call!(twin, b"twin_split", x.as_ptr() => *const f32, high.as_mut_ptr() => *mut u16, low.as_mut_ptr() => *mut u16, count => u64);
    for ((&x, &high), &low) in x.iter().zip(&high).zip(&low) {
        assert_eq!((high, low), scalar::split(x), "{:#x}", x.to_bits());
    }
    let mut random = Random(4);
    for (high, low) in high.iter_mut().zip(&mut low) {
        (*high, *low) = (random.word() as u16, random.word() as u16);
    }
    let mut joined = vec![0_f32; x.len()];
    call!(twin, b"twin_join", high.as_ptr() => *const u16, low.as_ptr() => *const u16, joined.as_mut_ptr() => *mut f32, count => u64);
    for ((&x, &high), &low) in joined.iter().zip(&high).zip(&low) {
        assert_eq!(x.to_bits(), scalar::join(high, low).to_bits(), "{high:#x} {low:#x}");
    }
}

#[test]
fn scales_of_every_rule() {
    let Some(twin) = twin() else { return };
    let amaxes: Vec<f32> =
        floats(5, COUNT).into_iter().map(f32::abs).filter(|x| x.is_finite()).collect();
    for format in FORMATS {
        for margin in [0, 1, 7, 32] {
            for power_of_two in [false, true] {
                let mut scales = vec![0_f32; amaxes.len()];
                call!(twin, b"twin_scale", amaxes.as_ptr() => *const f32, scales.as_mut_ptr() => *mut f32, amaxes.len() as u64 => u64,
                    i32::from(format == Format::E5m2) => i32, margin => u32, i32::from(power_of_two) => i32);
                let rule = ScaleRule { margin, power_of_two };
                let expected: Vec<_> =
                    amaxes.iter().map(|&amax| rule.scale(format, amax).unwrap()).collect();
                assert_eq!(bits(&scales), bits(&expected), "{format:?} {rule:?}");
            }
        }
    }
}

#[test]
fn powers_of_the_betas() {
    let Some(twin) = twin() else { return };
    let mut random = Random(6);
    let bases: Vec<f64> =
        (0..COUNT).map(|_| 1.0 - f64::from(random.uniform().abs()) / 10.0).collect();
    let exponents: Vec<u64> =
        (0..COUNT).map(|i| if i < 100 { i as u64 } else { random.bits() >> 40 }).collect();
    let mut powers = vec![0_f64; COUNT];
    call!(twin, b"twin_power", bases.as_ptr() => *const f64, exponents.as_ptr() => *const u64, powers.as_mut_ptr() => *mut f64, COUNT as u64 => u64);
    for ((&base, &exponent), &power) in bases.iter().zip(&exponents).zip(&powers) {
        assert_eq!(power.to_bits(), scalar::power(base, exponent).to_bits(), "{base}^{exponent}");
    }
}

#[test]
fn adam_steps() {
    let Some(twin) = twin() else { return };
    for (seed, any) in [(7, true), (8, false)] {
        for mode in [0, 1] {
            let mut random = Random(seed);
            let mut draw = || if any { random.any_f32() } else { random.ordinary() };
            let mut column = || (0..COUNT).map(|_| draw()).collect::<Vec<f32>>();
            let (g, mut m, mut v, mut p) = (column(), column(), column(), column());
            v.iter_mut().for_each(|v| *v = v.abs());
            let group = GroupRecord {
                lr: 1e-3,
                weight_decay: 0.1,
                eps: 1e-8,
                mode,
                b1: 0.9,
                one_minus_b1: 0.1,
                b2: 0.95,
                one_minus_b2: 0.05,
                correction1: 0.271,
                correction2: 0.142_625,
                ..Default::default()
            };
            let control =
                gather8_kernels::layout::ControlRecord { factor: 0.75, ..Default::default() };
            let adam = Adam::new(&group, &control);
            let expected: Vec<_> = (0..COUNT)
                .map(|i| scalar::adam_element(&adam, g[i], m[i], v[i], p[i]))
                .map(|(m, v, p)| [m, v, p].map(|x| scalar::canonical(x).to_bits()))
                .collect();
            call!(twin, b"twin_adam", g.as_ptr() => *const f32, m.as_mut_ptr() => *mut f32, v.as_mut_ptr() => *mut f32, p.as_mut_ptr() => *mut f32,
                COUNT as u64 => u64, &group => *const GroupRecord, control.factor => f32);
            for (i, expected) in expected.iter().enumerate() {
                assert_eq!(
                    [m[i], v[i], p[i]].map(f32::to_bits),
                    *expected,
                    "element {i}, mode {mode}"
                );
            }
        }
    }
}
