//! The vectorised passes against the scalar ones, bit for bit: every level that the processor has,
//! random and special values, lengths 0 to 300 and large, every alignment.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod support;

use gather8_kernels::layout::{NormRecord, norm_tiles};
use gather8_kernels::scalar::{
    self, Adam, Elements, ElementsMut, EmitMut, MasterMut, Shard, f32_to_bf16, f32_to_f16,
};
use gather8_kernels::simd::{self, Level};
use gather8_kernels::{DType, Format};
use support::Random;

const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];
/// Above the length from which codes are stored past the caches, and no multiple of anything.
const LARGE: usize = (1 << 18) + 12_345;

/// Lengths with an offset in elements: every short length, every alignment, and large ones.
fn shapes() -> Vec<(usize, usize)> {
    let mut shapes: Vec<_> = (0..=300).map(|len| (len, len % 7)).collect();
    for offset in 0..64 {
        shapes.push((700 + offset, offset));
    }
    for offset in [0, 1, 13] {
        shapes.extend([(4096 * 8 * 3 + 77, offset), (LARGE, offset)]);
    }
    shapes
}

/// Random values of three sorts: ordinary, near the top of the formats, and anything at all.
fn values(random: &mut Random, len: usize) -> Vec<f32> {
    let sort = random.below(3);
    (0..len)
        .map(|_| match sort {
            0 => random.ordinary(),
            1 => random.uniform() * 500.0,
            _ => random.any_f32(),
        })
        .collect()
}

/// The same numbers in the three types, at an offset into their memory.
struct Tensor {
    wide: Vec<f32>,
    bf16: Vec<u16>,
    f16: Vec<u16>,
    offset: usize,
}

impl Tensor {
    fn new(random: &mut Random, len: usize, offset: usize) -> Self {
        let wide = values(random, len + offset);
        // Bits, not rounded values: NaNs of every kind, too.
        let raw = random.below(2) == 0;
        let mut narrow = |round: fn(f32) -> u16| -> Vec<u16> {
            wide.iter().map(|&x| if raw { random.word() as u16 } else { round(x) }).collect()
        };
        let (bf16, f16) = (narrow(f32_to_bf16), narrow(f32_to_f16));
        Self { wide, bf16, f16, offset }
    }

    fn elements(&self, dtype: DType) -> Elements<'_> {
        match dtype {
            DType::Bf16 => Elements::Bf16(&self.bf16[self.offset..]),
            DType::F16 => Elements::F16(&self.f16[self.offset..]),
            _ => Elements::F32(&self.wide[self.offset..]),
        }
    }
}

/// Memory to write to, at an offset; compared as bits, the bytes around it included.
#[derive(Clone)]
struct Output {
    dtype: DType,
    wide: Vec<f32>,
    narrow: Vec<u16>,
    offset: usize,
}

impl Output {
    fn of(tensor: &Tensor, dtype: DType) -> Self {
        let narrow = if dtype == DType::F16 { &tensor.f16 } else { &tensor.bf16 };
        Self { dtype, wide: tensor.wide.clone(), narrow: narrow.clone(), offset: tensor.offset }
    }

    fn elements(&mut self) -> ElementsMut<'_> {
        match self.dtype {
            DType::Bf16 => ElementsMut::Bf16(&mut self.narrow[self.offset..]),
            DType::F16 => ElementsMut::F16(&mut self.narrow[self.offset..]),
            _ => ElementsMut::F32(&mut self.wide[self.offset..]),
        }
    }

    fn bits(&self) -> Vec<u32> {
        let wide = self.wide.iter().map(|x| x.to_bits());
        wide.chain(self.narrow.iter().map(|&x| u32::from(x))).collect()
    }
}

const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
const GRADIENTS: [DType; 2] = [DType::Bf16, DType::F32];

#[test]
fn amax() {
    let mut random = Random(1 << 40);
    for (len, offset) in shapes() {
        let tensor = Tensor::new(&mut random, len, offset);
        for dtype in TYPES {
            let expected = scalar::amax_word(tensor.elements(dtype));
            for level in Level::available() {
                let found = simd::amax_word(level, tensor.elements(dtype));
                assert_eq!(found, expected, "{level:?} {dtype:?} {len} at {offset}");
            }
        }
    }
}

#[test]
fn the_largest_is_found_wherever_it_stands() {
    for len in [1, 31, 300, 2048 * 8 + 129] {
        for at in 0..len {
            let mut bits = vec![0x3f80_u16; len];
            bits[at] = 0xc000;
            for level in Level::available() {
                let word = simd::amax_word(level, Elements::Bf16(&bits));
                assert_eq!(word, 0x8000_0000 | 2.0_f32.to_bits(), "{level:?} {len} {at}");
            }
        }
    }
}

#[test]
fn cast() {
    let mut random = Random(2 << 40);
    for (len, offset) in shapes() {
        let tensor = Tensor::new(&mut random, len, offset);
        for dtype in TYPES {
            for format in FORMATS {
                let scale = match random.below(4) {
                    0 => 1.0,
                    1 => f32::from_bits(random.word() % 0x7f80_0000),
                    _ => random.uniform().abs() * 100.0,
                };
                let before: Vec<u8> = (0..len + 64).map(|_| random.word() as u8).collect();
                let at = random.below(64);
                let mut expected = before.clone();
                let src = tensor.elements(dtype);
                let count = scalar::cast(src, scale, format, &mut expected[at..at + len]);
                for level in Level::available() {
                    let mut found = before.clone();
                    let found_count =
                        simd::cast(level, src, scale, format, &mut found[at..at + len]);
                    let what = format!("{level:?} {dtype:?} {format:?} {len} at {offset} to {at}");
                    assert!(found == expected, "{what}");
                    assert_eq!(found_count, count, "{what}");
                }
            }
        }
    }
}

/// Whole blocks whose largest product is at, just below and just above the bound of saturation:
/// there the code without a clamp gives way to the one with it.
#[test]
fn blocks_around_the_bound_of_saturation() {
    for format in FORMATS {
        for edge in [format.max(), format.saturation_bound(), f32::INFINITY] {
            for ulp in [-1_i32, 0, 1] {
                let top = f32::from_bits(edge.to_bits().wrapping_add_signed(ulp));
                let mut values: Vec<f32> = (0..1024).map(|i| i as f32 / 16.0 - 30.0).collect();
                for at in [0, 300, 1023] {
                    values[at] = top;
                    values[at ^ 1] = -top;
                    let mut expected = vec![0; 1024];
                    let count = scalar::cast(Elements::F32(&values), 1.0, format, &mut expected);
                    for level in Level::available() {
                        let mut found = vec![0; 1024];
                        let src = Elements::F32(&values);
                        assert_eq!(simd::cast(level, src, 1.0, format, &mut found), count);
                        assert_eq!(found, expected, "{level:?} {format:?} {top:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_16_bit_value_is_cast_alike() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    for format in FORMATS {
        for scale in [1.0, 0.37, 448.0, 1.0e-9, 3.0e38, f32::MIN_POSITIVE, f32::NAN, 0.0] {
            for src in [Elements::Bf16(&bits), Elements::F16(&bits)] {
                let mut expected = vec![0; bits.len()];
                let count = scalar::cast(src, scale, format, &mut expected);
                for level in Level::available() {
                    let mut found = vec![0; bits.len()];
                    assert_eq!(simd::cast(level, src, scale, format, &mut found), count);
                    assert_eq!(found, expected, "{level:?} {format:?} x {scale}");
                }
            }
        }
    }
}

#[test]
fn decode() {
    let mut random = Random(3 << 40);
    for (len, offset) in shapes() {
        let tensor = Tensor::new(&mut random, len, offset);
        let codes: Vec<u8> = (0..len + offset).map(|i| (i as u8).wrapping_mul(37)).collect();
        for dtype in TYPES {
            for format in FORMATS {
                let scale_inv = if random.below(2) == 0 { 0.013 } else { random.any_f32() };
                let mut expected = Output::of(&tensor, dtype);
                scalar::decode(&codes[offset..], format, scale_inv, expected.elements());
                for level in Level::available() {
                    let mut found = Output::of(&tensor, dtype);
                    simd::decode(level, &codes[offset..], format, scale_inv, found.elements());
                    let what = format!("{level:?} {dtype:?} {format:?} {len} at {offset}");
                    assert!(found.bits() == expected.bits(), "{what}");
                }
            }
        }
    }
}

#[test]
fn divide_and_accumulate() {
    let mut random = Random(4 << 40);
    for (len, offset) in shapes() {
        let tensor = Tensor::new(&mut random, len, offset);
        let other = Tensor::new(&mut random, len, offset);
        let divisor = [1.0, 3.0, 8.0, 1e-3][random.below(4)];
        for from in GRADIENTS {
            for to in TYPES {
                let mut expected = Output::of(&other, to);
                scalar::divide(tensor.elements(from), divisor, expected.elements());
                let mut expected_in_place = Output::of(&other, to);
                scalar::divide_in_place(expected_in_place.elements(), divisor);
                for level in Level::available() {
                    let what = format!("{level:?} {from:?} {to:?} {len} at {offset}");
                    let mut found = Output::of(&other, to);
                    simd::divide(level, tensor.elements(from), divisor, found.elements());
                    assert!(found.bits() == expected.bits(), "{what}");
                    let mut found = Output::of(&other, to);
                    simd::divide_in_place(level, found.elements(), divisor);
                    assert!(found.bits() == expected_in_place.bits(), "in place, {what}");
                }
            }
            let mut expected = Output::of(&other, DType::F32);
            scalar::accumulate(tensor.elements(from), &mut expected.wide[offset..]);
            for level in Level::available() {
                let mut found = Output::of(&other, DType::F32);
                simd::accumulate(level, tensor.elements(from), &mut found.wide[offset..]);
                assert!(found.bits() == expected.bits(), "{level:?} {from:?} {len} at {offset}");
            }
        }
    }
}

#[test]
fn norm() {
    let mut random = Random(5 << 40);
    for (len, offset) in shapes() {
        let tensor = Tensor::new(&mut random, len, offset);
        for dtype in TYPES {
            let mut expected = vec![NormRecord::default(); norm_tiles(len as u64) as usize];
            let src = tensor.elements(dtype);
            scalar::norm(src, &mut expected);
            let bits = |tiles: &[NormRecord]| -> Vec<(u64, f64)> {
                tiles.iter().map(|t| (t.sum_of_squares.to_bits(), t.non_finite)).collect()
            };
            for level in Level::available() {
                let mut found = vec![NormRecord::default(); expected.len()];
                simd::norm(level, src, &mut found);
                assert_eq!(bits(&found), bits(&expected), "{level:?} {dtype:?} {len} at {offset}");
            }
        }
    }
}

fn adam(random: &mut Random, l2: bool, eps: f32) -> Adam {
    Adam {
        factor: [1.0, 0.01, 1.0 / 1024.0][random.below(3)],
        lr: 1e-3,
        weight_decay: [0.0, 0.1][random.below(2)],
        eps,
        l2,
        b1: 0.9,
        one_minus_b1: 0.1,
        b2: 0.95,
        one_minus_b2: 0.05,
        correction1: 0.271,
        correction2: 0.142_625,
    }
}

/// Everything that a step writes.
#[derive(Clone)]
struct State {
    exp_avg: Output,
    exp_avg_sq: Output,
    weight: Output,
    copy: Vec<f32>,
    remainder: Vec<u16>,
    codes: Vec<u8>,
}

impl State {
    fn step(
        &mut self,
        master: usize,
        emit: Option<(f32, Format)>,
        grad: Elements<'_>,
        run: impl FnOnce(Shard<'_>) -> u32,
    ) -> u32 {
        let offset = self.weight.offset;
        run(Shard {
            grad,
            exp_avg: self.exp_avg.elements(),
            exp_avg_sq: self.exp_avg_sq.elements(),
            weight: self.weight.elements(),
            master: match master {
                0 => MasterMut::Itself,
                1 => MasterMut::Copy(&mut self.copy[offset..]),
                _ => MasterMut::Remainder(&mut self.remainder[offset..]),
            },
            emit: emit.map(|(scale, format)| EmitMut {
                dst: &mut self.codes[offset..],
                scale,
                format,
            }),
        })
    }

    fn bits(&self) -> Vec<u32> {
        let mut bits = self.exp_avg.bits();
        bits.extend(self.exp_avg_sq.bits());
        bits.extend(self.weight.bits());
        bits.extend(self.copy.iter().map(|x| x.to_bits()));
        bits.extend(self.remainder.iter().map(|&x| u32::from(x)));
        bits.extend(self.codes.iter().map(|&x| u32::from(x)));
        bits
    }
}

#[test]
fn optimize() {
    let mut random = Random(6 << 40);
    let large = |&(len, _): &(usize, usize)| len > 1000;
    for (len, offset) in shapes() {
        let [grad, m, v, p] = std::array::from_fn(|_| Tensor::new(&mut random, len, offset));
        for grad_type in GRADIENTS {
            for moment_type in GRADIENTS {
                for master in 0..3 {
                    // Every combination at short lengths, a random half at large ones.
                    if large(&(len, offset)) && random.below(2) == 0 {
                        continue;
                    }
                    let eps = [1e-8, 0.0][random.below(2)];
                    let adam = adam(&mut random, len % 2 == 1, eps);
                    let emit = match random.below(3) {
                        0 => None,
                        1 => Some((37.0, Format::E4m3)),
                        _ => Some((1e4, Format::E5m2)),
                    };
                    let weight_type = if master == 0 { DType::F32 } else { DType::Bf16 };
                    let start = State {
                        exp_avg: Output::of(&m, moment_type),
                        exp_avg_sq: Output::of(&v, moment_type),
                        weight: Output::of(&p, weight_type),
                        copy: p.wide.clone(),
                        remainder: m.bf16.clone(),
                        codes: vec![0xaa; len + offset],
                    };
                    let grad = grad.elements(grad_type);
                    let mut expected = start.clone();
                    let word =
                        expected.step(master, emit, grad, |shard| scalar::optimize(&adam, shard));
                    for level in Level::available() {
                        let mut found = start.clone();
                        let found_word = found
                            .step(master, emit, grad, |shard| simd::optimize(level, &adam, shard));
                        let what = format!(
                            "{level:?} {grad_type:?} {moment_type:?} {master} {len} at {offset}"
                        );
                        assert!(found.bits() == expected.bits(), "{what}");
                        assert_eq!(found_word, word, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_best_level_is_the_last_that_is_available() {
    let levels = Level::available();
    assert_eq!(levels.first(), Some(&Level::Portable));
    assert_eq!(levels.last(), Some(&Level::best()));
    assert!(levels.is_sorted());
}

/// `cargo test --profile release-test -- --ignored`.
#[test]
#[ignore = "2^32 values"]
fn every_f32_is_cast_alike() {
    let next = std::sync::atomic::AtomicU32::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut values = vec![0.0; 1 << 22];
                let mut expected = vec![0; 1 << 22];
                let mut found = vec![0; 1 << 22];
                loop {
                    let block = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if block >= 1 << 10 {
                        return;
                    }
                    for (i, value) in (0_u32..).zip(&mut values) {
                        *value = f32::from_bits(block << 22 | i);
                    }
                    for format in FORMATS {
                        let src = Elements::F32(&values);
                        let count = scalar::cast(src, 1.0, format, &mut expected);
                        for level in Level::available() {
                            assert_eq!(simd::cast(level, src, 1.0, format, &mut found), count);
                            assert!(found == expected, "{level:?} {format:?} block {block:#x}");
                        }
                    }
                }
            });
        }
    });
}
