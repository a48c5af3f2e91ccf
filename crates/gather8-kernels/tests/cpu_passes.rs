//! Every kind of job through the backend gives what the scalar function gives, for lists of tensors
//! of all sizes, on any number of threads.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod cpu_support;

use cpu_support::{Random, device, holding, run, tensor, values};
use gather8_kernels::backend::{Backend, Memory, Span};
use gather8_kernels::cpu::{Cpu, Stream};
use gather8_kernels::job::{
    Accumulate, Amax, AmaxAlgorithm, Cast, Control, Decode, Divide, Emit, Master, Norm, Optimize,
    SumNorms, Transpose, UpdateScales,
};
use gather8_kernels::layout::{
    BytesRecord, ControlRecord, GroupRecord, NormRecord, SlotRecord, bank_bytes, norm_tiles,
    slot_flags, status_bytes,
};
use gather8_kernels::scalar::{self, Adam, Elements, ElementsMut, EmitMut, MasterMut, Shard};
use gather8_kernels::scale::ScaleRule;
use gather8_kernels::{DType, Error, Format, Job};

/// Empty, small, and more than two pieces of a pass (Miri has no time for those).
const SIZES: [usize; 6] = match cfg!(miri) {
    true => [0, 1, 7, 5, 30, 31],
    false => [0, 1, 7, 300, 8193, (1 << 19) + 4099],
};

/// A backend on one thread and one on three.
fn backends() -> [(Cpu, Stream); 2] {
    [1, 3].map(|threads| {
        let cpu = Cpu::builder().threads(threads).build();
        let stream = cpu.stream("s").unwrap();
        (cpu, stream)
    })
}

fn span_of(whole: &Span<Cpu>, at: usize, bytes: usize) -> Span<Cpu> {
    whole.sub(at as u64..(at + bytes) as u64).unwrap()
}

#[test]
fn amax() {
    for (cpu, s) in backends() {
        let slots = device(&cpu, 4 * SIZES.len());
        let mut random = Random(1);
        let (mut jobs, mut expected) = (Vec::new(), Vec::new());
        for (i, &n) in SIZES.iter().enumerate() {
            let slot = span_of(&slots, 4 * i, 4);
            let src = if i % 2 == 0 {
                let bits = random.bf16s(n);
                expected.push(scalar::amax_word(Elements::Bf16(&bits)));
                tensor(&holding(&cpu, &s, &bits), DType::Bf16)
            } else {
                let floats = random.floats(n);
                expected.push(scalar::amax_word(Elements::F32(&floats)));
                tensor(&holding(&cpu, &s, &floats), DType::F32)
            };
            jobs.push(Job::Amax(Amax { src, slot }));
        }
        run(&cpu, &s, &jobs);
        assert_eq!(expected[0], 0x8000_0000, "an empty tensor touches its slot");
        assert_eq!(values::<u32>(&cpu, &s, &slots), expected);
        // A second pass keeps the larger.
        let src = tensor(&holding(&cpu, &s, &[0x7c00_u16, 0x3c00]), DType::F16);
        run(&cpu, &s, &[Job::Amax(Amax { src, slot: span_of(&slots, 8, 4) })]);
        run(&cpu, &s, &jobs);
        expected[2] = 0x8000_0000 | f32::INFINITY.to_bits();
        assert_eq!(values::<u32>(&cpu, &s, &slots), expected);
    }
}

/// A slot whose `published` and `cast` differ.
fn slot(cast: f32, published: f32, version: u32) -> SlotRecord {
    SlotRecord {
        cast,
        cast_inv: 1.0 / cast,
        published,
        published_inv: 1.0 / published,
        version,
        ..Default::default()
    }
}

#[test]
fn cast_decode_and_the_records_between_them() {
    for (cpu, s) in backends() {
        for format in [Format::E4m3, Format::E5m2] {
            let mut random = Random(2);
            let counter = device(&cpu, 4);
            let slots = device(&cpu, 4 * SIZES.len());
            let (mut casts, mut decodes, mut checks) = (Vec::new(), Vec::new(), Vec::new());
            let (mut saturated, mut words) = (0, Vec::new());
            for (i, &n) in SIZES.iter().enumerate() {
                let floats = random.floats(n);
                let record = slot(600.0 + 100_000.0 * (i % 2) as f32, 1.0, 9);
                let mut codes = vec![0; n];
                saturated += scalar::cast(Elements::F32(&floats), record.cast, format, &mut codes);
                words.push(scalar::amax_word(Elements::F32(&floats)));
                let mut decoded = vec![0_u16; n];
                let to = ElementsMut::Bf16(&mut decoded);
                scalar::decode(&codes, format, record.cast_inv, to);

                let (dst, bytes) = (device(&cpu, n), device(&cpu, size_of::<BytesRecord>()));
                casts.push(Job::Cast(Cast {
                    src: tensor(&holding(&cpu, &s, &floats), DType::F32),
                    dst: dst.clone(),
                    format,
                    scales: holding(&cpu, &s, &[record]),
                    record: bytes.clone(),
                    saturated: Some(counter.clone()),
                    amax: Some(span_of(&slots, 4 * i, 4)),
                }));
                let out = device(&cpu, 2 * n);
                decodes.push(Job::Decode(Decode {
                    src: dst.clone(),
                    format,
                    record: bytes.clone(),
                    dst: tensor(&out, DType::Bf16),
                }));
                let expected = BytesRecord {
                    scale: record.cast,
                    scale_inv: record.cast_inv,
                    version: 9,
                    reserved: 0,
                };
                checks.push((dst, codes, bytes, expected, out, decoded));
            }
            run(&cpu, &s, &casts);
            run(&cpu, &s, &decodes);
            for (dst, codes, bytes, record, out, decoded) in &checks {
                assert_eq!(&values::<u8>(&cpu, &s, dst), codes);
                assert_eq!(values::<BytesRecord>(&cpu, &s, bytes), [*record]);
                assert_eq!(&values::<u16>(&cpu, &s, out), decoded);
            }
            assert!(saturated > 0);
            assert_eq!(values::<u32>(&cpu, &s, &counter), [saturated]);
            assert_eq!(values::<u32>(&cpu, &s, &slots), words);

            // The records now hold the slots' scales and versions: nothing is done, nothing counted.
            for (dst, ..) in &checks {
                cpu.fill(&s, dst, 0x55).unwrap();
            }
            cpu.fill(&s, &slots, 0).unwrap();
            run(&cpu, &s, &casts);
            for (dst, codes, ..) in &checks {
                assert_eq!(values::<u8>(&cpu, &s, dst), vec![0x55; codes.len()]);
            }
            assert_eq!(values::<u32>(&cpu, &s, &counter), [saturated]);
            assert_eq!(values::<u32>(&cpu, &s, &slots), [0; SIZES.len()]);
        }
    }
}

#[test]
fn a_cast_is_done_again_for_another_version_or_another_scale() {
    let cpu = Cpu::new();
    let s = cpu.stream("s").unwrap();
    let scales = holding(&cpu, &s, &[slot(2.0, 1.0, 1)]);
    let (dst, record) = (device(&cpu, 1), device(&cpu, 16));
    let job = Job::Cast(Cast {
        src: tensor(&holding(&cpu, &s, &[1.0_f32]), DType::F32),
        dst: dst.clone(),
        format: Format::E4m3,
        scales: scales.clone(),
        record: record.clone(),
        saturated: None,
        amax: None,
    });
    let done = |slot: SlotRecord| {
        cpu.upload(&s, bytemuck::bytes_of(&slot), &scales).unwrap();
        cpu.fill(&s, &dst, 0x55).unwrap();
        run(&cpu, &s, std::slice::from_ref(&job));
        values::<u8>(&cpu, &s, &dst) != [0x55]
    };
    assert!(done(slot(2.0, 1.0, 1)));
    assert!(!done(slot(2.0, 1.0, 1)));
    assert!(!done(slot(2.0, 3.0, 1)), "the published scale is not this version's");
    assert!(done(slot(2.0, 1.0, 2)));
    assert!(done(slot(4.0, 1.0, 2)));
    assert!(!done(slot(4.0, 1.0, 2)));
    cpu.fill(&s, &record, 0).unwrap();
    assert!(done(slot(4.0, 1.0, 2)), "dropped bytes are made again");
}

const SIDES: (usize, usize) = if cfg!(miri) { (6, 9) } else { (600, 900) };

#[test]
fn transpose() {
    for (cpu, s) in backends() {
        let mut random = Random(3);
        let (mut jobs, mut checks) = (Vec::new(), Vec::new());
        for (rows, cols) in [(0, 5), (5, 0), (1, 9), (9, 1), (33, 70), SIDES] {
            let bytes: Vec<u8> = (0..rows * cols).map(|_| random.next() as u8).collect();
            let mut expected = vec![0; bytes.len()];
            scalar::transpose(&bytes, &mut expected, rows, cols);
            let dst = device(&cpu, bytes.len());
            jobs.push(Job::Transpose(Transpose {
                src: holding(&cpu, &s, &bytes),
                rows: rows as u64,
                cols: cols as u64,
                dst: dst.clone(),
            }));
            checks.push((dst, expected));
        }
        run(&cpu, &s, &jobs);
        for (dst, expected) in checks {
            assert_eq!(values::<u8>(&cpu, &s, &dst), expected);
        }
    }
}

#[test]
fn divide_beside_and_in_place() {
    for (cpu, s) in backends() {
        let mut random = Random(4);
        let (mut jobs, mut checks) = (Vec::new(), Vec::new());
        for n in SIZES {
            let floats = random.floats(n);
            let mut halves = vec![0_u16; n];
            scalar::divide(Elements::F32(&floats), 6.0, ElementsMut::Bf16(&mut halves));
            let (src, dst) = (holding(&cpu, &s, &floats), device(&cpu, 2 * n));
            let job = Divide {
                src: tensor(&src, DType::F32),
                dst: tensor(&dst, DType::Bf16),
                divisor: 6.0,
            };
            jobs.push(Job::Divide(job));
            checks.push((dst, halves));

            let mut bits = random.bf16s(n);
            let place = holding(&cpu, &s, &bits);
            scalar::divide_in_place(ElementsMut::Bf16(&mut bits), 6.0);
            let whole = tensor(&place, DType::Bf16);
            jobs.push(Job::Divide(Divide { src: whole.clone(), dst: whole, divisor: 6.0 }));
            checks.push((place, bits));
        }
        run(&cpu, &s, &jobs);
        for (span, expected) in checks {
            assert_eq!(values::<u16>(&cpu, &s, &span), expected);
        }
        // Half in place is neither.
        let span = device(&cpu, 16);
        let part = |at| tensor(&span_of(&span, at, 8), DType::F32);
        let job = Job::Divide(Divide { src: part(0), dst: part(4), divisor: 2.0 });
        assert!(matches!(cpu.plan(&[job]), Err(Error::Job { .. })));
    }
}

#[test]
fn accumulate_norm_and_the_sum_of_norms() {
    for (cpu, s) in backends() {
        let mut random = Random(5);
        let tiles: Vec<u64> = SIZES.iter().map(|&n| norm_tiles(n as u64)).collect();
        let records = device(&cpu, 16 * tiles.iter().sum::<u64>() as usize);
        let (mut adds, mut norms, mut checks) = (Vec::new(), Vec::new(), Vec::new());
        let (mut at, mut all) = (0, Vec::new());
        for (&n, &tiles) in SIZES.iter().zip(&tiles) {
            let (bits, mut sums) = (random.bf16s(n), random.floats(n));
            if let Some(last) = sums.last_mut() {
                *last = f32::INFINITY;
            }
            let src = tensor(&holding(&cpu, &s, &bits), DType::Bf16);
            let dst = tensor(&holding(&cpu, &s, &sums), DType::F32);
            scalar::accumulate(Elements::Bf16(&bits), &mut sums);
            adds.push(Job::Accumulate(Accumulate { src, dst: dst.clone() }));
            let mut expected = vec![NormRecord::default(); tiles as usize];
            scalar::norm(Elements::F32(&sums), &mut expected);
            all.extend(expected);
            let tiles = records.sub(at..at + 16 * tiles).unwrap();
            at += tiles.len();
            norms.push(Job::Norm(Norm { src: dst.clone(), tiles }));
            checks.push((dst.span, sums));
        }
        run(&cpu, &s, &adds);
        for (span, expected) in &checks {
            let found = values::<u32>(&cpu, &s, span);
            assert!(found.iter().zip(expected).all(|(a, b)| *a == b.to_bits()));
        }
        run(&cpu, &s, &norms);
        assert_eq!(values::<NormRecord>(&cpu, &s, &records), all);
        let total = device(&cpu, 16);
        run(&cpu, &s, &[Job::SumNorms(SumNorms { tiles: records.clone(), total: total.clone() })]);
        assert_eq!(values::<NormRecord>(&cpu, &s, &total), [scalar::sum_norms(&all)]);
        assert_eq!(scalar::sum_norms(&all).non_finite, (SIZES.len() - 1) as f64);
    }
}

fn groups() -> Vec<GroupRecord> {
    [(0.9, 0.95, 0), (0.9, 0.999, 1)]
        .into_iter()
        .map(|(beta1, beta2, mode): (f64, f64, u32)| GroupRecord {
            beta1,
            beta2,
            lr: 1e-2,
            weight_decay: 0.1,
            eps: 1e-8,
            mode,
            b1: beta1 as f32,
            one_minus_b1: (1.0 - beta1) as f32,
            b2: beta2 as f32,
            one_minus_b2: (1.0 - beta2) as f32,
            ..Default::default()
        })
        .collect()
}

fn control_record() -> ControlRecord {
    ControlRecord {
        max_norm: 1.0,
        inverse_loss_scale: 0.5,
        skip_on_found_inf: 1,
        ..Default::default()
    }
}

#[test]
fn control() {
    let cpu = Cpu::new();
    let s = cpu.stream("s").unwrap();
    for non_finite in [0.0, 2.0] {
        let total = NormRecord { sum_of_squares: 37.0, non_finite };
        let (mut record, mut expected) = (control_record(), groups());
        let job = Control {
            total: holding(&cpu, &s, &[total]),
            control: holding(&cpu, &s, &[record]),
            groups: holding(&cpu, &s, &expected),
        };
        scalar::control(&total, &mut record, &mut expected);
        assert_eq!(record.found_inf, (non_finite > 0.0) as u32);
        run(&cpu, &s, &[Job::Control(job.clone())]);
        assert_eq!(values::<ControlRecord>(&cpu, &s, &job.control), [record]);
        assert_eq!(values::<GroupRecord>(&cpu, &s, &job.groups), expected);
    }
}

/// One shard with everything that its step touches, as bits.
#[derive(Clone, PartialEq, Debug)]
struct State {
    grad: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    weight: Vec<u16>,
    weight_f32: Vec<f32>,
    remainder: Vec<u16>,
    copy: Vec<f32>,
    codes: Vec<u8>,
    record: BytesRecord,
    word: u32,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Itself,
    Copy,
    Remainder,
}

impl State {
    fn new(random: &mut Random, n: usize) -> Self {
        let weight = random.bf16s(n);
        Self {
            grad: random.floats(n),
            exp_avg: random.floats(n),
            exp_avg_sq: random.floats(n).into_iter().map(f32::abs).collect(),
            copy: weight.iter().map(|&bits| scalar::bf16_to_f32(bits)).collect(),
            weight_f32: random.floats(n),
            remainder: vec![0; n],
            weight,
            codes: vec![0x11; n],
            record: BytesRecord { version: 3, ..Default::default() },
            word: 0,
        }
    }

    fn step(&mut self, adam: &Adam, kind: Kind, emit: Option<&SlotRecord>) {
        let emit = emit.map(|slot| {
            self.record = BytesRecord {
                scale: slot.published,
                scale_inv: slot.published_inv,
                version: slot.version + 1,
                reserved: 0,
            };
            EmitMut { dst: &mut self.codes, scale: slot.published, format: Format::E4m3 }
        });
        let (weight, master) = match kind {
            Kind::Itself => (ElementsMut::F32(&mut self.weight_f32), MasterMut::Itself),
            Kind::Copy => (ElementsMut::Bf16(&mut self.weight), MasterMut::Copy(&mut self.copy)),
            Kind::Remainder => {
                let master = MasterMut::Remainder(&mut self.remainder);
                (ElementsMut::Bf16(&mut self.weight), master)
            }
        };
        let shard = Shard {
            grad: Elements::F32(&self.grad),
            exp_avg: ElementsMut::F32(&mut self.exp_avg),
            exp_avg_sq: ElementsMut::F32(&mut self.exp_avg_sq),
            weight,
            master,
            emit,
        };
        self.word = scalar::optimize(adam, shard);
    }

    fn job(
        &self,
        (cpu, s): (&Cpu, &Stream),
        kind: Kind,
        (group, control): (&Span<Cpu>, &Span<Cpu>),
        emit: Option<&SlotRecord>,
    ) -> Optimize<Cpu> {
        let (weight, master) = match kind {
            Kind::Itself => {
                (tensor(&holding(cpu, s, &self.weight_f32), DType::F32), Master::Itself)
            }
            Kind::Copy => (
                tensor(&holding(cpu, s, &self.weight), DType::Bf16),
                Master::Copy(holding(cpu, s, &self.copy)),
            ),
            Kind::Remainder => (
                tensor(&holding(cpu, s, &self.weight), DType::Bf16),
                Master::Remainder(holding(cpu, s, &self.remainder)),
            ),
        };
        Optimize {
            grad: tensor(&holding(cpu, s, &self.grad), DType::F32),
            exp_avg: tensor(&holding(cpu, s, &self.exp_avg), DType::F32),
            exp_avg_sq: tensor(&holding(cpu, s, &self.exp_avg_sq), DType::F32),
            weight,
            master,
            group: group.clone(),
            control: control.clone(),
            amax: Some(holding(cpu, s, &[self.word])),
            emit: emit.map(|slot| Emit {
                dst: holding(cpu, s, &self.codes),
                format: Format::E4m3,
                scales: holding(cpu, s, &[*slot]),
                record: holding(cpu, s, &[self.record]),
            }),
        }
    }

    /// This state with what the job's spans hold now.
    fn read(&self, cpu: &Cpu, s: &Stream, job: &Optimize<Cpu>) -> Self {
        let mut state = self.clone();
        state.exp_avg = values(cpu, s, &job.exp_avg.span);
        state.exp_avg_sq = values(cpu, s, &job.exp_avg_sq.span);
        match &job.master {
            Master::Copy(span) => state.copy = values(cpu, s, span),
            Master::Remainder(span) => state.remainder = values(cpu, s, span),
            _ => {}
        }
        match job.weight.dtype {
            DType::F32 => state.weight_f32 = values(cpu, s, &job.weight.span),
            _ => state.weight = values(cpu, s, &job.weight.span),
        }
        state.word = values(cpu, s, job.amax.as_ref().unwrap())[0];
        if let Some(emit) = &job.emit {
            state.codes = values(cpu, s, &emit.dst);
            state.record = values(cpu, s, &emit.record)[0];
        }
        state
    }
}

#[test]
fn optimize() {
    for (cpu, s) in backends() {
        let mut random = Random(6);
        let mut groups = groups();
        let mut control = control_record();
        let total = NormRecord { sum_of_squares: 5.0, non_finite: 0.0 };
        scalar::control(&total, &mut control, &mut groups);
        let controls = holding(&cpu, &s, &[control]);
        let records = holding(&cpu, &s, &groups);
        let slot = slot(2.0, 300.0, 7);
        let (mut jobs, mut checks) = (Vec::new(), Vec::new());
        for n in SIZES {
            for (i, kind) in [Kind::Itself, Kind::Copy, Kind::Remainder].into_iter().enumerate() {
                let g = i % groups.len();
                let size = size_of::<GroupRecord>();
                let group = span_of(&records, g * size, size);
                let emit = (kind != Kind::Copy).then_some(&slot);
                let mut state = State::new(&mut random, n);
                let job = state.job((&cpu, &s), kind, (&group, &controls), emit);
                state.step(&Adam::new(&groups[g], &control), kind, emit);
                jobs.push(Job::Optimize(job.clone()));
                checks.push((job, state, kind));
            }
        }
        run(&cpu, &s, &jobs);
        for (job, state, kind) in &checks {
            assert!(state.read(&cpu, &s, job) == *state, "{kind:?}, {} elements", state.grad.len());
        }
    }
}

#[test]
fn found_inf_leaves_everything_bit_identical() {
    let cpu = Cpu::new();
    let s = cpu.stream("s").unwrap();
    let control = ControlRecord { found_inf: 1, factor: f32::NAN, ..control_record() };
    let (groups, controls) = (holding(&cpu, &s, &groups()), holding(&cpu, &s, &[control]));
    let group = span_of(&groups, 0, size_of::<GroupRecord>());
    let mut random = Random(7);
    for kind in [Kind::Itself, Kind::Copy, Kind::Remainder] {
        let state = State::new(&mut random, 300);
        let slot = slot(2.0, 3.0, 7);
        let job = state.job((&cpu, &s), kind, (&group, &controls), Some(&slot));
        run(&cpu, &s, &[Job::Optimize(job.clone())]);
        assert!(state.read(&cpu, &s, &job) == state, "{kind:?}");
        assert_eq!(state.word, 0, "the slot is not touched");
    }
}

#[test]
fn update_scales_and_its_status_in_host_memory() {
    const SLOTS: u64 = 5;
    const HISTORY: u32 = 3;
    let cpu = Cpu::new();
    let s = cpu.stream("s").unwrap();
    let amax = |x: f32| 0x8000_0000 | x.to_bits();
    let mut records: Vec<SlotRecord> = (0..SLOTS as u32)
        .map(|i| SlotRecord {
            flags: if i == 2 { slot_flags::INPUT } else { slot_flags::DELAYED },
            ..slot(1.0, 1.0, i)
        })
        .collect();
    let mut rings = vec![1.0_f32; (SLOTS * u64::from(HISTORY)) as usize];
    let mut status = vec![0_u32; status_bytes(SLOTS) as usize / 4];
    let host = Span::whole(&cpu.alloc(status_bytes(SLOTS), Memory::Host).unwrap());
    let job = UpdateScales {
        slots: SLOTS,
        bank: device(&cpu, bank_bytes(SLOTS) as usize),
        records: holding(&cpu, &s, &records),
        rings: holding(&cpu, &s, &rings),
        history: HISTORY,
        algorithm: AmaxAlgorithm::Max,
        rule: ScaleRule::default(),
        status: host.clone(),
    };
    let plan = cpu.plan(&[Job::UpdateScales(job.clone())]).unwrap();
    let order = [7, 9, !7, !9];
    let words: [[u32; 5]; 3] = [
        [amax(2.0), 0, amax(f32::INFINITY), amax(0.5), amax(0.0)],
        [amax(2.0), amax(f32::NAN), 0, amax(f32::INFINITY), 0],
        [amax(4.0), amax(1.0), amax(3.0), 0, 0],
    ];
    for (round, (words, order)) in words.into_iter().zip([order, order, [7, 9, 7, 9]]).enumerate() {
        let mut bank: Vec<u32> = words.into_iter().chain(order).collect();
        cpu.upload(&s, bytemuck::cast_slice(&bank), &job.bank).unwrap();
        let event = {
            cpu.run(&s, &plan).unwrap();
            cpu.record(&s).unwrap()
        };
        cpu.wait_host(&event).unwrap();
        scalar::update_scales(
            SLOTS,
            &mut bank,
            &mut records,
            &mut rings,
            HISTORY,
            AmaxAlgorithm::Max,
            ScaleRule::default(),
            &mut status,
        );
        assert_eq!(values::<u32>(&cpu, &s, &job.bank), bank, "round {round}");
        assert_eq!(values::<SlotRecord>(&cpu, &s, &job.records), records, "round {round}");
        assert_eq!(values::<f32>(&cpu, &s, &job.rings), rings, "round {round}");
        assert_eq!(cpu.peek(&host).unwrap(), bytemuck::cast_slice::<u32, u8>(&status));
    }
    // Three syncs, one refused, one disordered; the second and fourth slot are the culprits.
    assert_eq!(status, [3, 1, 1, 0, 0, 1, 0, 1, 0]);
}

#[test]
fn passes_work_on_host_memory_too() {
    let cpu = Cpu::new();
    let s = cpu.stream("s").unwrap();
    let host = |bytes| Span::whole(&cpu.alloc(bytes, Memory::Host).unwrap());
    let (dst, slot) = (host(12), host(4));
    let src = tensor(&holding(&cpu, &s, &[3.0_f32, -6.0, 9.0]), DType::F32);
    let job = Divide { src: src.clone(), dst: tensor(&dst, DType::F32), divisor: 3.0 };
    run(&cpu, &s, &[Job::Divide(job)]);
    run(&cpu, &s, &[Job::Amax(Amax { src: tensor(&dst, DType::F32), slot: slot.clone() })]);
    assert_eq!(
        bytemuck::pod_read_unaligned::<[f32; 3]>(&cpu.peek(&dst).unwrap()),
        [1.0, -2.0, 3.0]
    );
    assert_eq!(cpu.peek(&slot).unwrap(), (0x8000_0000 | 3.0_f32.to_bits()).to_ne_bytes());
}

#[test]
fn a_pass_holds_one_kind_and_touches_nothing_twice() {
    let cpu = Cpu::new();
    let s = cpu.stream("s").unwrap();
    let src = tensor(&holding(&cpu, &s, &[1.0_f32; 4]), DType::F32);
    let slot = device(&cpu, 4);
    let amax = Job::Amax(Amax { src: src.clone(), slot });
    let divide = |dst: &Span<Cpu>| {
        Job::Divide(Divide { src: src.clone(), dst: tensor(dst, DType::F32), divisor: 2.0 })
    };
    let (x, y) = (device(&cpu, 16), device(&cpu, 16));
    cpu.plan(&[amax.clone(), amax.clone()]).unwrap();
    cpu.plan(&[divide(&x), divide(&y)]).unwrap();
    for jobs in [vec![amax, divide(&x)], vec![divide(&x), divide(&x)]] {
        assert!(matches!(cpu.plan(&jobs), Err(Error::Job { .. })));
    }
}
