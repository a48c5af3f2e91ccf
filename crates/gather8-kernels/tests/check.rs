//! Every rule of [`Job::check`]: a job that keeps it is accepted, one that breaks it is refused with
//! a sentence that says what.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

use gather8_kernels::backend::{Backend, Memory, Span, Tensor};
use gather8_kernels::check::check_all;
use gather8_kernels::cpu::Cpu;
use gather8_kernels::job::{
    Accumulate, Amax, AmaxAlgorithm, Cast, Control, Decode, Divide, Emit, Master, Norm, Optimize,
    SumNorms, Transpose, UpdateScales,
};
use gather8_kernels::layout::{bank_bytes, status_bytes};
use gather8_kernels::scale::ScaleRule;
use gather8_kernels::{DType, Format, Job};

/// Hands out spans of one buffer, none of which overlap.
struct Memories {
    whole: Span<Cpu>,
    used: std::cell::Cell<u64>,
}

impl Memories {
    fn new() -> Self {
        let buffer = Cpu::new().alloc(1 << 20, Memory::Device).unwrap();
        Self { whole: Span::whole(&buffer), used: 0.into() }
    }

    /// At a multiple of 256.
    fn span(&self, bytes: u64) -> Span<Cpu> {
        self.span_at(bytes, 0)
    }

    /// So many bytes after a multiple of 256.
    fn span_at(&self, bytes: u64, shift: u64) -> Span<Cpu> {
        let start = self.used.get() + shift;
        self.used.set((start + bytes).next_multiple_of(256));
        self.whole.sub(start..start + bytes).unwrap()
    }

    fn tensor(&self, elements: u64, dtype: DType) -> Tensor<Cpu> {
        Tensor::new(self.span(elements * dtype.size()), dtype).unwrap()
    }

    fn cast(&self) -> Cast<Cpu> {
        Cast {
            src: self.tensor(100, DType::Bf16),
            dst: self.span(100),
            format: Format::E4m3,
            scales: self.span(32),
            record: self.span(16),
            saturated: Some(self.span(4)),
            amax: Some(self.span(4)),
        }
    }

    fn decode(&self) -> Decode<Cpu> {
        Decode {
            src: self.span(100),
            format: Format::E4m3,
            record: self.span(16),
            dst: self.tensor(100, DType::Bf16),
        }
    }

    fn update(&self) -> UpdateScales<Cpu> {
        UpdateScales {
            slots: 5,
            bank: self.span(bank_bytes(5)),
            records: self.span(5 * 32),
            rings: self.span(5 * 16 * 4),
            history: 16,
            algorithm: AmaxAlgorithm::Max,
            rule: ScaleRule::default(),
            status: self.span(status_bytes(5)),
        }
    }

    fn optimize(&self) -> Optimize<Cpu> {
        Optimize {
            grad: self.tensor(100, DType::F32),
            exp_avg: self.tensor(100, DType::F32),
            exp_avg_sq: self.tensor(100, DType::F32),
            weight: self.tensor(100, DType::Bf16),
            master: Master::Remainder(self.span(200)),
            group: self.span(64),
            control: self.span(64),
            amax: Some(self.span(4)),
            emit: Some(Emit {
                dst: self.span(100),
                format: Format::E5m2,
                scales: self.span(32),
                record: self.span(16),
            }),
        }
    }
}

fn accepted(job: Job<Cpu>) {
    job.check().unwrap();
}

/// Refused, by a sentence that names the pass (or the setting) and holds these words.
#[track_caller]
fn refused(job: Job<Cpu>, words: &str) {
    let sentence = job.check().unwrap_err().to_string();
    assert!(sentence.contains(words), "{sentence}");
}

#[test]
fn amax() {
    let m = Memories::new();
    for dtype in [DType::Bf16, DType::F16, DType::F32] {
        accepted(Job::Amax(Amax { src: m.tensor(7, dtype), slot: m.span(4) }));
        accepted(Job::Amax(Amax { src: m.tensor(0, dtype), slot: m.span(4) }));
    }
    let src = || m.tensor(7, DType::Bf16);
    refused(Job::Amax(Amax { src: src(), slot: m.span(8) }), "slot must hold 4 bytes, not 8");
    refused(Job::Amax(Amax { src: src(), slot: m.span_at(4, 2) }), "multiple of 4 bytes");
    // The fields are public: a tensor may have been put together by hand.
    let odd = Tensor { span: m.span(7), dtype: DType::F32 };
    refused(Job::Amax(Amax { src: odd, slot: m.span(4) }), "no whole number of f32");
    let askew = Tensor { span: m.span_at(8, 2), dtype: DType::F32 };
    refused(Job::Amax(Amax { src: askew, slot: m.span(4) }), "multiple of 4 bytes");
}

#[test]
fn cast() {
    let m = Memories::new();
    accepted(Job::Cast(m.cast()));
    accepted(Job::Cast(Cast { saturated: None, amax: None, ..m.cast() }));
    accepted(Job::Cast(Cast { dst: m.span_at(100, 3), ..m.cast() }));
    refused(
        Job::Cast(Cast { dst: m.span(99), ..m.cast() }),
        "cast: 99 elements in the float8 bytes, but 100 in the tensor",
    );
    refused(Job::Cast(Cast { scales: m.span(16), ..m.cast() }), "slot record must hold 32");
    refused(Job::Cast(Cast { scales: m.span_at(32, 4), ..m.cast() }), "multiple of 8");
    refused(Job::Cast(Cast { record: m.span(32), ..m.cast() }), "bytes' record must hold 16");
    refused(Job::Cast(Cast { saturated: Some(m.span(8)), ..m.cast() }), "counter of saturated");
    refused(Job::Cast(Cast { amax: Some(m.span(2)), ..m.cast() }), "amax slot must hold 4");
}

#[test]
fn decode_and_transpose() {
    let m = Memories::new();
    accepted(Job::Decode(m.decode()));
    accepted(Job::Decode(Decode { dst: m.tensor(100, DType::F32), ..m.decode() }));
    let half = m.tensor(100, DType::F16);
    refused(Job::Decode(Decode { dst: half, ..m.decode() }), "must be bf16 or f32, not f16");
    let short = m.tensor(50, DType::F32);
    refused(
        Job::Decode(Decode { dst: short, ..m.decode() }),
        "100 elements in the float8 bytes, but 50 in",
    );
    refused(Job::Decode(Decode { record: m.span(8), ..m.decode() }), "must hold 16");

    let transpose = |rows, cols, src, dst| {
        Job::Transpose(Transpose { src: m.span(src), rows, cols, dst: m.span(dst) })
    };
    accepted(transpose(3, 4, 12, 12));
    accepted(transpose(0, 4, 0, 0));
    refused(transpose(3, 5, 12, 12), "matrix must hold 15 bytes, not 12");
    refused(transpose(3, 4, 12, 11), "transpose must hold 12 bytes, not 11");
    refused(transpose(u64::MAX, 2, 12, 12), "no possible matrix");
}

#[test]
fn update_scales() {
    let m = Memories::new();
    accepted(Job::UpdateScales(m.update()));
    let base = || m.update();
    let job = Job::UpdateScales;
    refused(job(UpdateScales { bank: m.span(bank_bytes(4)), ..base() }), "5 slots");
    refused(job(UpdateScales { records: m.span(4 * 32), ..base() }), "slot records must hold 160");
    refused(job(UpdateScales { rings: m.span(5 * 15 * 4), ..base() }), "rings must hold 320");
    refused(job(UpdateScales { status: m.span(16), ..base() }), "status must hold 36");
    refused(job(UpdateScales { slots: u64::MAX, ..base() }), "slots are more than");
    for history in [0, 1025, u32::MAX] {
        let words = "history must lie in 1 to 1024";
        refused(job(UpdateScales { history, ..base() }), words);
    }
    let rule = ScaleRule { margin: 33, power_of_two: false };
    refused(job(UpdateScales { rule, ..base() }), "margin must lie in 0 to 32");
    let bank = m.span_at(bank_bytes(5), 2);
    refused(job(UpdateScales { bank, ..base() }), "bank must begin at a multiple of 4");
    let records = m.span_at(160, 4);
    refused(job(UpdateScales { records, ..base() }), "records must begin at a multiple of 8");
}

#[test]
fn gradients() {
    let m = Memories::new();
    let divide = |from, to, elements, divisor| {
        Job::Divide(Divide { src: m.tensor(10, from), dst: m.tensor(elements, to), divisor })
    };
    for from in [DType::Bf16, DType::F32] {
        for to in [DType::Bf16, DType::F32] {
            accepted(divide(from, to, 10, 8.0));
        }
    }
    refused(divide(DType::F16, DType::F32, 10, 8.0), "source must be bf16 or f32, not f16");
    refused(divide(DType::F32, DType::F16, 10, 8.0), "destination must be bf16 or f32, not f16");
    refused(divide(DType::F32, DType::F32, 11, 8.0), "10 elements in the source");
    for divisor in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(divide(DType::F32, DType::F32, 10, divisor), "divisor of gradients must lie in");
    }

    let accumulate = |from, to, elements| {
        Job::Accumulate(Accumulate { src: m.tensor(10, from), dst: m.tensor(elements, to) })
    };
    accepted(accumulate(DType::Bf16, DType::F32, 10));
    refused(accumulate(DType::Bf16, DType::Bf16, 10), "destination must be f32, not bf16");
    refused(accumulate(DType::F16, DType::F32, 10), "source must be bf16 or f32");
    refused(accumulate(DType::F32, DType::F32, 9), "10 elements in the source");

    let norm = |elements, dtype, bytes| {
        Job::Norm(Norm { src: m.tensor(elements, dtype), tiles: m.span(bytes) })
    };
    accepted(norm(0, DType::F32, 0));
    accepted(norm(8192, DType::F32, 16));
    accepted(norm(8193, DType::Bf16, 32));
    refused(norm(8193, DType::Bf16, 16), "8193 elements make 2 tiles");
    refused(norm(10, DType::F16, 16), "gradient must be bf16 or f32");
    let tiles = m.span_at(16, 4);
    refused(Job::Norm(Norm { src: m.tensor(1, DType::F32), tiles }), "multiple of 8");

    let sum = |tiles, total| Job::SumNorms(SumNorms { tiles: m.span(tiles), total: m.span(total) });
    accepted(sum(0, 16));
    accepted(sum(48, 16));
    refused(sum(40, 16), "whole records of 16 bytes");
    refused(sum(48, 32), "total must hold 16");

    let control = |total, control, groups| {
        Job::Control(Control {
            total: m.span(total),
            control: m.span(control),
            groups: m.span(groups),
        })
    };
    accepted(control(16, 64, 128));
    refused(control(8, 64, 128), "total must hold 16");
    refused(control(16, 63, 128), "control record must hold 64");
    refused(control(16, 64, 100), "whole records of 64 bytes");
}

#[test]
fn optimize() {
    let m = Memories::new();
    let base = || m.optimize();
    let job = Job::Optimize;
    accepted(job(base()));
    accepted(job(Optimize { amax: None, emit: None, ..base() }));
    accepted(job(Optimize { grad: m.tensor(100, DType::Bf16), ..base() }));
    accepted(job(Optimize { master: Master::Copy(m.span(400)), ..base() }));
    let wide = || m.tensor(100, DType::F32);
    accepted(job(Optimize { weight: wide(), master: Master::Itself, ..base() }));
    let narrow = || m.tensor(100, DType::Bf16);
    accepted(job(Optimize { exp_avg: narrow(), exp_avg_sq: narrow(), ..base() }));

    refused(job(Optimize { exp_avg: narrow(), ..base() }), "one type, not bf16 and f32");
    let half = || m.tensor(100, DType::F16);
    refused(job(Optimize { grad: half(), ..base() }), "gradient must be bf16 or f32, not f16");
    refused(job(Optimize { weight: half(), ..base() }), "weight must be bf16 or f32, not f16");
    let short = m.tensor(99, DType::F32);
    refused(job(Optimize { exp_avg_sq: short, ..base() }), "99 elements in exp_avg_sq");
    refused(job(Optimize { weight: wide(), ..base() }), "master beside it must be bf16, not f32");
    let copied = Optimize { weight: wide(), master: Master::Copy(m.span(400)), ..base() };
    refused(job(copied), "master beside it must be bf16, not f32");
    refused(job(Optimize { master: Master::Itself, ..base() }), "own master must be f32, not bf16");
    let master = Master::Remainder(m.span(400));
    refused(job(Optimize { master, ..base() }), "remainders must hold 200 bytes, not 400");
    let master = Master::Copy(m.span(200));
    refused(job(Optimize { master, ..base() }), "master copy must hold 400 bytes, not 200");
    refused(job(Optimize { group: m.span(32), ..base() }), "group record must hold 64");
    refused(job(Optimize { control: m.span(32), ..base() }), "control record must hold 64");
    let mut short = base();
    short.emit.as_mut().unwrap().dst = m.span(101);
    refused(job(short), "101 elements in the float8 bytes, but 100 in the weight");
}

#[test]
fn outputs_overlap_nothing() {
    let m = Memories::new();
    // Within a job.
    let shared = m.span(200);
    let overlap = |job| refused(job, "touched again in the same pass");
    let src = Tensor::new(shared.clone(), DType::Bf16).unwrap();
    overlap(Job::Cast(Cast { src: src.clone(), dst: shared.sub(100..200).unwrap(), ..m.cast() }));
    let mut bad = m.optimize();
    bad.exp_avg_sq = bad.exp_avg.clone();
    overlap(Job::Optimize(bad));
    let mut bad = m.optimize();
    bad.grad = bad.exp_avg.clone();
    overlap(Job::Optimize(bad));
    let wide = m.tensor(10, DType::F32);
    overlap(Job::Accumulate(Accumulate { src: wide.clone(), dst: wide.clone() }));
    let square = m.span(16);
    overlap(Job::Transpose(Transpose { src: square.clone(), rows: 4, cols: 4, dst: square }));

    // In place is what division is for, but not half in place.
    accepted(Job::Divide(Divide { src: wide.clone(), dst: wide, divisor: 2.0 }));
    let both = m.span(44);
    let part = |from| Tensor::new(both.sub(from..from + 40).unwrap(), DType::F32).unwrap();
    overlap(Job::Divide(Divide { src: part(0), dst: part(4), divisor: 2.0 }));

    // Between jobs.
    let slot = m.span(4);
    let amax = |src: &Tensor<Cpu>| Job::Amax(Amax { src: src.clone(), slot: slot.clone() });
    let tensors = [m.tensor(5, DType::F32), m.tensor(6, DType::Bf16)];
    check_all(&tensors.each_ref().map(amax)).unwrap();
    let (first, mut second) = (m.cast(), m.cast());
    second.scales = first.scales.clone();
    check_all(&[Job::Cast(first.clone()), Job::Cast(second.clone())]).unwrap();
    second.record = first.record.clone();
    let error = check_all(&[Job::Cast(first.clone()), Job::Cast(second)]).unwrap_err();
    assert!(error.to_string().contains("touched again in the same pass"), "{error}");
    // A word that one job accumulates into and another reads.
    let reader = Cast { amax: Some(first.scales.sub(0..4).unwrap()), ..m.cast() };
    assert!(check_all(&[Job::Cast(first), Job::Cast(reader)]).is_err());
}

#[test]
fn a_pass_is_of_one_kind() {
    let m = Memories::new();
    assert_eq!(check_all::<Cpu>(&[]).unwrap(), None);
    assert_eq!(check_all(&[Job::Decode(m.decode())]).unwrap(), Some("decode"));
    let mixed = [Job::Cast(m.cast()), Job::Decode(m.decode())];
    let sentence = check_all(&mixed).unwrap_err().to_string();
    assert!(sentence.contains("there is a decode job among these"), "{sentence}");
}
