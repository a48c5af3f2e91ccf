//! The optimizer's steps, bit by bit: every combination of types, long runs, specials.

use gather8_kernels::job::{Emit, Master, Optimize};
use gather8_kernels::layout::{BytesRecord, ControlRecord, GroupRecord, SlotRecord};
use gather8_kernels::{Backend, DType, Format, Job, Span, Tensor};

use crate::support::Random;
use crate::{Desk, Results, lengths, same};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Itself,
    Copy,
    Remainder,
}

fn group(mode: u32, step: u64) -> GroupRecord {
    let (b1, b2) = (0.9_f64, 0.95_f64);
    GroupRecord {
        beta1: b1,
        beta2: b2,
        lr: 1e-3,
        weight_decay: 0.1,
        eps: 1e-8,
        mode,
        b1: b1 as f32,
        one_minus_b1: (1.0 - b1) as f32,
        b2: b2 as f32,
        one_minus_b2: (1.0 - b2) as f32,
        correction1: (1.0 - gather8_kernels::scalar::power(b1, step)) as f32,
        correction2: (1.0 - gather8_kernels::scalar::power(b2, step)) as f32,
        reserved: [0; 2],
    }
}

/// One shard's tensors on a desk, and the spans that a comparison looks at.
struct Shard<B: Backend> {
    job: Optimize<B>,
    spans: Vec<(&'static str, Span<B>)>,
}

struct Types {
    grad: DType,
    moments: DType,
    kind: Kind,
}

fn draw(
    random: &mut Random,
    dtype: DType,
    elements: usize,
    mut one: impl FnMut(&mut Random) -> f32,
) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(elements * 4);
    for _ in 0..elements {
        let x = one(random);
        match dtype {
            DType::F32 => bytes.extend(x.to_le_bytes()),
            _ => bytes.extend(((x.to_bits() >> 16) as u16).to_le_bytes()),
        }
    }
    bytes
}

#[allow(clippy::too_many_arguments)]
fn shard<B: Backend>(
    desk: &Desk<B>,
    random: &mut Random,
    types: &Types,
    elements: usize,
    skew: u64,
    any: bool,
    groups: &Span<B>,
    control: &Span<B>,
    emit: Option<Format>,
) -> Shard<B> {
    let value = |random: &mut Random| if any { random.any_f32() } else { random.ordinary() };
    let small = |random: &mut Random| if any { random.any_f32() } else { random.ordinary() * 1e-2 };
    let wide = if types.kind == Kind::Itself { DType::F32 } else { DType::Bf16 };
    let grad = desk.tensor(&draw(random, types.grad, elements, small), types.grad, skew);
    let exp_avg = desk.tensor(&draw(random, types.moments, elements, small), types.moments, skew);
    let square = |random: &mut Random| small(random).powi(2);
    let exp_avg_sq =
        desk.tensor(&draw(random, types.moments, elements, square), types.moments, skew);
    let weight = desk.tensor(&draw(random, wide, elements, value), wide, skew);
    let mut spans = vec![
        ("exp_avg", exp_avg.span.clone()),
        ("exp_avg_sq", exp_avg_sq.span.clone()),
        ("weight", weight.span.clone()),
    ];
    let master = match types.kind {
        Kind::Itself => Master::Itself,
        Kind::Copy => Master::Copy(desk.put(&draw(random, DType::F32, elements, value), skew * 4)),
        Kind::Remainder => {
            let low: Vec<u16> = (0..elements).map(|_| random.bits() as u16).collect();
            Master::Remainder(desk.put(&low, skew * 2))
        }
    };
    if let Master::Copy(span) | Master::Remainder(span) = &master {
        spans.push(("master", span.clone()));
    }
    let amax = (random.below(4) != 0).then(|| desk.put(&[0_u32], 0));
    spans.extend(amax.iter().map(|span| ("amax", span.clone())));
    let emit = emit.map(|format| Emit {
        dst: desk.put(&vec![0xee_u8; elements], skew * 3),
        format,
        scales: desk.put(
            &[SlotRecord {
                published: 100.0,
                published_inv: 0.01,
                version: 4,
                ..Default::default()
            }],
            0,
        ),
        record: desk.put(&[BytesRecord::default()], 0),
    });
    if let Some(emit) = &emit {
        spans.push(("codes", emit.dst.clone()));
        spans.push(("record", emit.record.clone()));
    }
    let job = Optimize {
        grad,
        exp_avg,
        exp_avg_sq,
        weight,
        master,
        group: groups.clone(),
        control: control.clone(),
        amax,
        emit,
    };
    Shard { job, spans }
}

const KINDS: [Kind; 3] = [Kind::Itself, Kind::Copy, Kind::Remainder];
const FLOATS: [DType; 2] = [DType::Bf16, DType::F32];

#[test]
#[ignore = "needs a GPU"]
fn every_combination_of_types() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(21);
        let mut results = Results::new();
        for found_inf in [0, 1] {
            for mode in [0, 1] {
                let groups = desk.put(&[group(mode, 3)], 0);
                let control =
                    desk.put(&[ControlRecord { factor: 0.7, found_inf, ..Default::default() }], 0);
                let (mut jobs, mut spans) = (Vec::new(), Vec::new());
                for grad in FLOATS {
                    for moments in FLOATS {
                        for kind in KINDS {
                            for elements in lengths() {
                                let types = Types { grad, moments, kind };
                                let skew = [0, 0, 8, 1][random.below(4)];
                                let any = random.below(3) == 0;
                                let emit =
                                    [None, Some(Format::E4m3), Some(Format::E5m2)][random.below(3)];
                                let shard = shard(
                                    desk,
                                    &mut random,
                                    &types,
                                    elements,
                                    skew,
                                    any,
                                    &groups,
                                    &control,
                                    emit,
                                );
                                let name = format!(
                                    "grad {grad:?} moments {moments:?} {kind:?} {elements} skew {skew} any {any} {emit:?} mode {mode} found-inf {found_inf}"
                                );
                                spans.extend(
                                    shard
                                        .spans
                                        .into_iter()
                                        .map(|(part, span)| (format!("{name}: {part}"), span)),
                                );
                                jobs.push(Job::Optimize(shard.job));
                            }
                        }
                    }
                }
                let plan = desk.backend.plan(&jobs).unwrap();
                for round in 0..3 {
                    desk.backend.run(&desk.stream, &plan).unwrap();
                    results.extend(
                        spans
                            .iter()
                            .map(|(name, span)| (format!("{name}, round {round}"), desk.get(span))),
                    );
                }
            }
        }
        results
    }
    same!(case);
}

/// Zero gradients, extreme corrections and large eps take the plain formula; the borders between it
/// and the fast one are crossed here.
#[test]
#[ignore = "needs a GPU"]
fn moments_at_the_borders_of_the_fast_formula() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut results = Results::new();
        let mut random = Random(22);
        let exact = group(0, 1);
        let groups = [
            exact,
            GroupRecord { correction1: 1.0, correction2: 1.0, ..exact },
            GroupRecord { correction1: 1e-9, ..exact },
            GroupRecord { correction2: 0.0, ..exact },
            GroupRecord { eps: 0.0, ..exact },
            GroupRecord { eps: 1024.0, ..exact },
            GroupRecord { eps: 2048.0, ..exact },
            GroupRecord { lr: f32::INFINITY, ..exact },
        ];
        for (number, group) in groups.into_iter().enumerate() {
            let elements = 1 << 16;
            // Exponents of every size around 2^-96 and 2^20, zeros of both signs, subnormals.
            let mut near = |exponents: [u32; 8]| {
                (0..elements)
                    .map(|_| {
                        f32::from_bits(
                            (random.word() & 0x807f_ffff) | exponents[random.below(8)] << 23,
                        )
                    })
                    .collect::<Vec<f32>>()
            };
            let m = near([30, 31, 32, 147, 148, 0, 100, 120]);
            let v: Vec<f32> =
                near([30, 31, 32, 147, 148, 0, 100, 120]).into_iter().map(f32::abs).collect();
            let (g, p) = (near([0, 0, 20, 60, 100, 120, 127, 130]), near([127; 8]));
            let tensor = |values: &[f32]| desk.tensor(values, DType::F32, 0);
            let (m, v, p) = (tensor(&m), tensor(&v), tensor(&p));
            let spans = [m.span.clone(), v.span.clone(), p.span.clone()];
            desk.run(&[Job::Optimize(Optimize {
                grad: tensor(&g),
                exp_avg: m,
                exp_avg_sq: v,
                weight: p,
                master: Master::Itself,
                group: desk.put(&[group], 0),
                control: desk.put(&[ControlRecord { factor: 1.0, ..Default::default() }], 0),
                amax: None,
                emit: None,
            })]);
            results.extend(spans.iter().map(|span| (format!("group {number}"), desk.get(span))));
        }
        results
    }
    same!(case);
}

#[test]
#[ignore = "needs a GPU"]
fn a_hundred_steps() {
    fn case<B: Backend>(desk: &Desk<B>) -> Results {
        let mut random = Random(23);
        let mut results = Results::new();
        let groups = desk.put(&[group(0, 1)], 0);
        let control = desk.put(&[ControlRecord { factor: 1.0, ..Default::default() }], 0);
        let (mut jobs, mut spans, mut grads) = (Vec::new(), Vec::new(), Vec::new());
        for elements in [1, 2, 3, 255, 4096 * 1024, 0, 32_320 * 1024] {
            let types = Types { grad: DType::Bf16, moments: DType::F32, kind: Kind::Remainder };
            let shard = shard(
                desk,
                &mut random,
                &types,
                elements,
                0,
                false,
                &groups,
                &control,
                Some(Format::E4m3),
            );
            grads.push(shard.job.grad.span.clone());
            spans.extend(
                shard.spans.into_iter().map(|(part, span)| (format!("{elements}: {part}"), span)),
            );
            jobs.push(Job::Optimize(shard.job));
        }
        let plan = desk.backend.plan(&jobs).unwrap();
        for step in 1..=100 {
            desk.backend
                .upload(&desk.stream, bytemuck::bytes_of(&group(0, step)), &groups)
                .unwrap();
            // Gradients move along: each is the next one's neighbour.
            for span in &grads {
                if span.len() > 2 {
                    let half = span.len() / 4 * 2;
                    desk.backend
                        .copy(
                            &desk.stream,
                            &span.sub(0..half).unwrap(),
                            &span.sub(span.len() - half..span.len()).unwrap(),
                        )
                        .unwrap();
                }
            }
            desk.backend.run(&desk.stream, &plan).unwrap();
        }
        results.extend(spans.iter().map(|(name, span)| (name.clone(), desk.get(span))));
        results
    }
    same!(case);
}

/// More than 2^31 elements in one tensor, periodic, so that one period of the CPU's is enough.
#[test]
#[ignore = "needs a GPU"]
fn more_than_two_to_the_31_elements() {
    const PERIOD: usize = (1 << 22) + 8;
    const COPIES: u64 = 513;
    let types = Types { grad: DType::Bf16, moments: DType::F32, kind: Kind::Remainder };
    fn step<B: Backend>(desk: &Desk<B>, shard: Optimize<B>) {
        let plan = desk.backend.plan(&[Job::Optimize(shard)]).unwrap();
        desk.backend.run(&desk.stream, &plan).unwrap();
        desk.backend.run(&desk.stream, &plan).unwrap();
    }
    fn small<B: Backend>(desk: &Desk<B>, types: &Types) -> Shard<B> {
        let groups = desk.put(&[group(0, 2)], 0);
        let control = desk.put(&[ControlRecord { factor: 1.0, ..Default::default() }], 0);
        shard(desk, &mut Random(25), types, PERIOD, 0, false, &groups, &control, None)
    }
    let (cpu, gpu) = (Desk::new(crate::cpu()), Desk::new(crate::cuda()));
    let reference = small(&cpu, &types);
    let expected_spans = reference.spans.clone();
    let seed = small(&gpu, &types);
    let repeat = |span: &Span<_>| {
        let bytes = span.len() * COPIES;
        let whole =
            Span::whole(&gpu.backend.alloc(bytes, gather8_kernels::Memory::Device).unwrap());
        for copy in 0..COPIES {
            let at = copy * span.len();
            gpu.backend.copy(&gpu.stream, span, &whole.sub(at..at + span.len()).unwrap()).unwrap();
        }
        whole
    };
    let tensor = |tensor: &Tensor<_>| Tensor::new(repeat(&tensor.span), tensor.dtype).unwrap();
    let Master::Remainder(master) = &seed.job.master else { unreachable!() };
    let large = Optimize {
        grad: tensor(&seed.job.grad),
        exp_avg: tensor(&seed.job.exp_avg),
        exp_avg_sq: tensor(&seed.job.exp_avg_sq),
        weight: tensor(&seed.job.weight),
        master: Master::Remainder(repeat(master)),
        amax: Some(gpu.put(&[0_u32], 0)),
        ..seed.job.clone()
    };
    assert!(large.weight.elements() > 1 << 31);
    let Master::Remainder(master) = &large.master else { unreachable!() };
    let found =
        [&large.exp_avg.span, &large.exp_avg_sq.span, &large.weight.span, master].map(Span::clone);
    step(&cpu, reference.job);
    step(&gpu, large);
    for (found, (part, expected)) in found.iter().zip(&expected_spans) {
        let expected = cpu.get(expected);
        for copy in 0..COPIES {
            let at = copy * expected.len() as u64;
            let bytes = gpu.get(&found.sub(at..at + expected.len() as u64).unwrap());
            assert!(bytes == expected, "{part}, period {copy}");
        }
    }
}
