//! Every pass on values of every kind, at every length and alignment.

use gather8_kernels::job::{
    Accumulate, Amax, Cast, Control, Decode, Divide, Norm, SumNorms, Transpose,
};
use gather8_kernels::layout::{
    BytesRecord, ControlRecord, GroupRecord, NORM_TILE, NormRecord, SlotRecord, norm_tiles,
};
use gather8_kernels::{Backend, DType, Format, Job, Span};

use crate::support::Random;
use crate::{Desk, Results, lengths, same};

const DTYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];

/// Bytes of `elements` values: any bits, with specials among them, or of middling size.
fn values(random: &mut Random, dtype: DType, elements: usize, any: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(elements * 4);
    for _ in 0..elements {
        let x = if any { random.any_f32() } else { random.ordinary() };
        match dtype {
            DType::Bf16 => bytes.extend(((x.to_bits() >> 16) as u16).to_le_bytes()),
            DType::F16 if any => bytes.extend((random.word() as u16).to_le_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
            _ => bytes.extend(x.to_le_bytes()),
        }
    }
    bytes
}

#[test]
#[ignore = "needs a GPU"]
fn amax() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(1);
        let count = (DTYPES.len() * lengths().count() * 6) as u64;
        let bank = desk.put(&vec![0_u32; count as usize], 0);
        let mut jobs = Vec::new();
        for dtype in DTYPES {
            for elements in lengths() {
                for skew in [0, 1, 3] {
                    for any in [false, true] {
                        let src = values(&mut random, dtype, elements, any);
                        let src = desk.tensor(&src, dtype, skew);
                        let at = jobs.len() as u64 * 4;
                        jobs.push(Job::Amax(Amax { src, slot: bank.sub(at..at + 4).unwrap() }));
                    }
                }
            }
        }
        desk.run(&jobs);
        vec![("words".to_owned(), desk.get(&bank))]
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn amax_accumulates_and_ranks_nan_highest() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let bank = desk.put(&[0_u32; 1], 0);
        let mut words = Vec::new();
        for x in [1.0_f32, -3.0, 2.0, f32::NEG_INFINITY, 5.0, -f32::NAN, f32::INFINITY] {
            let src = desk.tensor(&[x; 3], DType::F32, 0);
            desk.run(&[Job::Amax(Amax { src, slot: bank.clone() })]);
            words.push((format!("after {x}"), desk.get(&bank)));
        }
        words
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn cast() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(2);
        let mut results = Results::new();
        for dtype in DTYPES {
            for format in FORMATS {
                for extras in [false, true] {
                    let mut jobs = Vec::new();
                    let mut spans: Vec<(String, Span<B>)> = Vec::new();
                    for elements in lengths() {
                        for (skew, codes_skew) in [(0, 0), (1, 0), (0, 3), (8, 8)] {
                            let any = random.below(2) == 0;
                            let scale = if random.below(4) == 0 {
                                random.any_f32()
                            } else {
                                random.ordinary().abs() * 1e4
                            };
                            let slot = SlotRecord {
                                cast: scale,
                                cast_inv: 1.0 / scale,
                                version: 7,
                                ..Default::default()
                            };
                            let src = values(&mut random, dtype, elements, any);
                            let job = Cast {
                                src: desk.tensor(&src, dtype, skew),
                                dst: desk.put(&vec![0xee_u8; elements], codes_skew),
                                format,
                                scales: desk.put(&[slot], 0),
                                record: desk.put(&[BytesRecord::default()], 0),
                                saturated: extras.then(|| desk.put(&[5_u32], 0)),
                                amax: extras.then(|| desk.put(&[0_u32], 0)),
                            };
                            let name = format!(
                                "{dtype:?} {format:?} {elements} skew {skew} {codes_skew} extras {extras}"
                            );
                            for (part, span) in [
                                Some(&job.dst),
                                Some(&job.record),
                                job.saturated.as_ref(),
                                job.amax.as_ref(),
                            ]
                            .into_iter()
                            .enumerate()
                            {
                                spans.extend(
                                    span.map(|span| (format!("{name} part {part}"), span.clone())),
                                );
                            }
                            jobs.push(Job::Cast(job));
                        }
                    }
                    desk.run(&jobs);
                    // The second run finds the bytes made and counts nothing.
                    desk.run(&jobs);
                    results.extend(spans.iter().map(|(name, span)| (name.clone(), desk.get(span))));
                }
            }
        }
        results
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn cast_is_skipped_only_if_scale_and_version_are_the_records() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let elements = 100_000;
        let src = desk.tensor(&vec![1.0_f32; elements], DType::F32, 0);
        let scales = desk
            .put(&[SlotRecord { cast: 2.0, cast_inv: 0.5, version: 3, ..Default::default() }], 0);
        let dst = desk.put(&vec![0_u8; elements], 0);
        let record = desk.put(&[BytesRecord::default()], 0);
        let job = Job::Cast(Cast {
            src,
            dst: dst.clone(),
            format: Format::E4m3,
            scales: scales.clone(),
            record: record.clone(),
            saturated: None,
            amax: None,
        });
        let plan = desk.backend.plan(&[job]).unwrap();
        let mut results = Results::new();
        let mut go = |what: &str| {
            desk.backend.run(&desk.stream, &plan).unwrap();
            results.push((format!("{what}: codes"), desk.get(&dst)));
            results.push((format!("{what}: record"), desk.get(&record)));
        };
        go("first");
        desk.backend.fill(&desk.stream, &dst, 9).unwrap();
        go("skipped");
        for (cast, version) in [(2.0_f32, 4_u32), (4.0, 4), (4.0, 5)] {
            desk.backend.fill(&desk.stream, &dst, 9).unwrap();
            let slot = SlotRecord { cast, cast_inv: 1.0 / cast, version, ..Default::default() };
            desk.backend.upload(&desk.stream, bytemuck::bytes_of(&slot), &scales).unwrap();
            go(&format!("{cast} {version}"));
        }
        assert!(results[2].1.iter().all(|&code| code == 9), "the skipped cast wrote");
        assert!(
            results[4].1.iter().all(|&code| code != 9),
            "the cast of a new version did not write"
        );
        results
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn decode() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(3);
        let (mut jobs, mut spans) = (Vec::new(), Vec::new());
        for (dtype, size) in [(DType::Bf16, 2), (DType::F32, 4)] {
            for format in FORMATS {
                for elements in lengths() {
                    for (skew, codes_skew) in [(0, 0), (1, 0), (0, 5)] {
                        let codes: Vec<u8> =
                            (0..elements).map(|i| (i as u8).wrapping_mul(167)).collect();
                        let scale_inv = random.any_f32();
                        let record = BytesRecord { scale_inv, ..Default::default() };
                        let dst = desk.tensor(&vec![0xee_u8; elements * size], dtype, skew);
                        spans.push((
                            format!(
                                "{dtype:?} {format:?} {elements} {skew} {codes_skew} {scale_inv}"
                            ),
                            dst.span.clone(),
                        ));
                        jobs.push(Job::Decode(Decode {
                            src: desk.put(&codes, codes_skew),
                            format,
                            record: desk.put(&[record], 0),
                            dst,
                        }));
                    }
                }
            }
        }
        desk.run(&jobs);
        spans.into_iter().map(|(name, span)| (name, desk.get(&span))).collect()
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn transpose() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(4);
        let (mut jobs, mut spans) = (Vec::new(), Vec::new());
        let shapes = [
            (0, 0),
            (0, 7),
            (1, 1),
            (1, 1000),
            (1000, 1),
            (4, 4),
            (128, 128),
            (256, 384),
            (129, 257),
            (130, 64),
            (128, 130),
            (300, 200),
            (1024, 1000),
        ];
        for (rows, cols) in shapes {
            for skew in [0, 1] {
                let bytes: Vec<u8> = (0..rows * cols).map(|_| random.bits() as u8).collect();
                let dst = desk.put(&vec![0xee_u8; rows * cols], skew);
                spans.push((format!("{rows} x {cols} skew {skew}"), dst.clone()));
                jobs.push(Job::Transpose(Transpose {
                    src: desk.put(&bytes, skew),
                    rows: rows as u64,
                    cols: cols as u64,
                    dst,
                }));
            }
        }
        desk.run(&jobs);
        spans.into_iter().map(|(name, span)| (name, desk.get(&span))).collect()
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn divide_and_accumulate() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(5);
        let types = [DType::Bf16, DType::F32];
        let (mut divides, mut adds, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        for from in types {
            for to in types {
                for elements in lengths() {
                    for skew in [0, 1] {
                        let any = random.below(2) == 0;
                        let src =
                            desk.tensor(&values(&mut random, from, elements, any), from, skew);
                        let dst = if from == to && random.below(2) == 0 {
                            src.clone()
                        } else {
                            desk.tensor(&vec![0xee_u8; elements * to.size() as usize], to, skew)
                        };
                        spans.push((
                            format!("{from:?} / to {to:?} {elements} {skew}"),
                            dst.span.clone(),
                        ));
                        let divisor = [3.0, 8.0, 7.5][random.below(3)];
                        divides.push(Job::Divide(Divide { src, dst, divisor }));
                    }
                }
            }
            for elements in lengths() {
                for skew in [0, 1] {
                    let any = random.below(2) == 0;
                    let src = desk.tensor(&values(&mut random, from, elements, any), from, skew);
                    let dst = desk.tensor(
                        &values(&mut random, DType::F32, elements, any),
                        DType::F32,
                        skew,
                    );
                    spans.push((format!("sum of {from:?} {elements} {skew}"), dst.span.clone()));
                    adds.push(Job::Accumulate(Accumulate { src, dst }));
                }
            }
        }
        desk.run(&divides);
        desk.run(&adds);
        spans.into_iter().map(|(name, span)| (name, desk.get(&span))).collect()
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn norms() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(6);
        let (mut jobs, mut spans) = (Vec::new(), Vec::new());
        for dtype in [DType::Bf16, DType::F32] {
            for elements in lengths().chain([NORM_TILE as usize * 3 + 5]) {
                for skew in [0, 1, 2] {
                    let any = random.below(2) == 0;
                    let src = desk.tensor(&values(&mut random, dtype, elements, any), dtype, skew);
                    let tiles = desk
                        .put(&vec![NormRecord::default(); norm_tiles(elements as u64) as usize], 0);
                    spans.push((format!("{dtype:?} {elements} {skew}"), tiles.clone()));
                    jobs.push(Job::Norm(Norm { src, tiles }));
                }
            }
        }
        desk.run(&jobs);
        for count in [0, 1, 2, 1023, 1024, 1025, 8192, 9000, 20_001] {
            let records: Vec<_> = (0..count)
                .map(|_| NormRecord {
                    sum_of_squares: f64::from(random.ordinary()).powi(2),
                    non_finite: random.below(3) as f64,
                })
                .collect();
            let total = desk.put(&[NormRecord::default()], 0);
            spans.push((format!("sum of {count}"), total.clone()));
            desk.run(&[Job::SumNorms(SumNorms { tiles: desk.put(&records, 0), total })]);
        }
        spans.into_iter().map(|(name, span)| (name, desk.get(&span))).collect()
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn control() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(7);
        let mut results = Results::new();
        for round in 0..60 {
            let total = NormRecord {
                sum_of_squares: match random.below(8) {
                    0 => f64::NAN,
                    1 => f64::INFINITY,
                    2 => 0.0,
                    _ => f64::from(random.ordinary()).powi(2),
                },
                non_finite: if random.below(3) == 0 { 2.0 } else { 0.0 },
            };
            let record = ControlRecord {
                step: [0, 1, 2, 99, 1_000_000, u64::MAX][random.below(6)],
                skipped: 3,
                max_norm: [0.0, 1.0, 1e-3, f32::INFINITY][random.below(4)],
                inverse_loss_scale: [1.0, 1.0 / 1024.0, 0.3][random.below(3)],
                skip_on_found_inf: random.below(2) as u32,
                ..Default::default()
            };
            let groups: Vec<_> = (0..[0, 1, 3, 300][round % 4])
                .map(|_| GroupRecord {
                    beta1: 1.0 - f64::from(random.uniform().abs()),
                    beta2: 0.999,
                    ..Default::default()
                })
                .collect();
            let (control, groups) = (desk.put(&[record], 0), desk.put(&groups, 0));
            desk.run(&[Job::Control(Control {
                total: desk.put(&[total], 0),
                control: control.clone(),
                groups: groups.clone(),
            })]);
            let mut bytes = desk.get(&control);
            // A NaN norm is a result, not a stored weight: which NaN it is does not matter.
            let norm = f64::from_le_bytes(bytes[16..24].try_into().unwrap());
            if norm.is_nan() {
                bytes[16..24].copy_from_slice(&f64::NAN.to_le_bytes());
            }
            results.push((format!("round {round}: {total:?} {record:?}"), bytes));
            results.push((format!("round {round}: groups"), desk.get(&groups)));
        }
        results
    }
    same!(case);
}
