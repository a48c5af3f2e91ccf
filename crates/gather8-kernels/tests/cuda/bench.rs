//! Speed, as a ratio to a device copy of the same run. Prints a table, and JSON lines into the file
//! that `GATHER8_BENCH` names.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use gather8_kernels::cuda::{Cuda, Plan};
use gather8_kernels::job::{
    Amax, AmaxAlgorithm, Cast, Control, Decode, Divide, Emit, Master, Norm, Optimize, SumNorms,
    Transpose, UpdateScales,
};
use gather8_kernels::layout::{
    ControlRecord, GroupRecord, NormRecord, SlotRecord, norm_tiles, slot_flags, status_bytes,
};
use gather8_kernels::scale::ScaleRule;
use gather8_kernels::{Backend, DType, Format, Job, Memory, Span, Tensor};

use crate::support::Random;
use crate::{Desk, cuda};

/// The parameters of four Llama-3-8B blocks: one rank's share in a world of eight.
const PARAMETERS: u64 = 872_415_232;

/// Seconds that one call takes on the device: the median of nine batches of at least 20 ms.
fn seconds(desk: &Desk<Cuda>, mut call: impl FnMut()) -> f64 {
    let mut batch = |count: u32| {
        desk.backend.synchronize(&desk.stream).unwrap();
        let begun = Instant::now();
        (0..count).for_each(|_| call());
        desk.backend.synchronize(&desk.stream).unwrap();
        begun.elapsed().as_secs_f64() / f64::from(count)
    };
    let once = batch(2).max(1e-6);
    let count = (0.02 / once).ceil().clamp(3.0, 2000.0) as u32;
    let mut times: Vec<f64> = (0..9).map(|_| batch(count)).collect();
    times.sort_by(f64::total_cmp);
    times[4]
}

struct Table {
    copy: f64,
    text: String,
    json: String,
}

impl Table {
    /// A row: seconds, and the bytes that the pass must move at least.
    fn row(&mut self, case: &str, pass: &str, seconds: f64, bytes: f64) {
        let rate = bytes / seconds;
        let ratio = rate / self.copy;
        let _ = writeln!(
            self.text,
            "{case:10} {pass:34} {:9.4} ms {:6.3} TB/s {ratio:6.3} x",
            seconds * 1e3,
            rate / 1e12
        );
        let _ = writeln!(
            self.json,
            "{{\"case\":\"{case}\",\"pass\":\"{pass}\",\"seconds\":{seconds:e},\"bytes\":{bytes:e},\"ratio\":{ratio:.4}}}"
        );
    }
}

/// All memory of one case, shared by the passes.
struct Case<'a> {
    desk: &'a Desk<Cuda>,
    name: &'static str,
    lengths: Vec<u64>,
    offsets: Vec<u64>,
    total: u64,
    weight: Span<Cuda>,
    remainder: Span<Cuda>,
    grad: Span<Cuda>,
    moments: [Span<Cuda>; 2],
    codes: Span<Cuda>,
    records: Span<Cuda>,
    marks: Span<Cuda>,
    bank: Span<Cuda>,
    group: Span<Cuda>,
    control: Span<Cuda>,
}

impl<'a> Case<'a> {
    fn new(desk: &'a Desk<Cuda>, name: &'static str, lengths: Vec<u64>, arena: &Arena) -> Self {
        // Every tensor begins at a multiple of 256 bytes of its codes, as buffers do.
        let mut offsets = Vec::new();
        let mut end = 0;
        for length in &lengths {
            offsets.push(end);
            end = (end + length).next_multiple_of(256);
        }
        assert!(end <= arena.elements);
        let slots = lengths.len();
        let slot = SlotRecord {
            published: 100.0,
            published_inv: 0.01,
            cast: 100.0,
            cast_inv: 0.01,
            version: 7,
            ..Default::default()
        };
        let group = GroupRecord {
            beta1: 0.9,
            beta2: 0.95,
            lr: 1e-4,
            weight_decay: 0.1,
            eps: 1e-8,
            b1: 0.9,
            one_minus_b1: 0.1,
            b2: 0.95,
            one_minus_b2: 0.05,
            correction1: 0.1,
            correction2: 0.05,
            ..Default::default()
        };
        Self {
            total: lengths.iter().sum(),
            weight: arena.weight.clone(),
            remainder: arena.remainder.clone(),
            grad: arena.grad.clone(),
            moments: arena.moments.clone(),
            codes: arena.codes.clone(),
            records: desk.put(&vec![slot; slots], 0),
            marks: desk.put(&vec![0_u128; slots], 0),
            bank: desk.put(&vec![0_u32; slots + 4], 0),
            group: desk.put(&[group], 0),
            control: desk.put(
                &[ControlRecord { factor: 1.0, inverse_loss_scale: 1.0, ..Default::default() }],
                0,
            ),
            desk,
            name,
            lengths,
            offsets,
        }
    }

    fn part(&self, whole: &Span<Cuda>, number: usize, size: u64) -> Span<Cuda> {
        let (at, length) = (self.offsets[number], self.lengths[number]);
        whole.sub(at * size..(at + length) * size).unwrap()
    }

    fn tensor(&self, whole: &Span<Cuda>, number: usize, dtype: DType) -> Tensor<Cuda> {
        Tensor::new(self.part(whole, number, dtype.size()), dtype).unwrap()
    }

    fn item(&self, whole: &Span<Cuda>, number: usize, size: u64) -> Span<Cuda> {
        let at = number as u64 * size;
        whole.sub(at..at + size).unwrap()
    }

    fn plan(&self, job: impl Fn(usize) -> Job<Cuda>) -> Plan {
        let jobs: Vec<_> = (0..self.lengths.len()).map(job).collect();
        let plan = self.desk.backend.plan(&jobs).unwrap();
        assert_eq!(plan.launches(), 1);
        plan
    }

    fn run(&self, plan: &Plan) {
        self.desk.backend.run(&self.desk.stream, plan).unwrap();
    }

    fn cast(&self, amax: bool, saturated: bool) -> Plan {
        self.plan(|k| {
            Job::Cast(Cast {
                src: self.tensor(&self.weight, k, DType::Bf16),
                dst: self.part(&self.codes, k, 1),
                format: Format::E4m3,
                scales: self.item(&self.records, k, 32),
                record: self.item(&self.marks, k, 16),
                saturated: saturated.then(|| self.item(&self.bank, self.lengths.len(), 4)),
                amax: amax.then(|| self.item(&self.bank, k, 4)),
            })
        })
    }

    fn optimize(&self, moments: DType, amax: bool, emit: bool) -> Plan {
        self.plan(|k| {
            Job::Optimize(Optimize {
                grad: self.tensor(&self.grad, k, DType::Bf16),
                exp_avg: self.tensor(&self.moments[0], k, moments),
                exp_avg_sq: self.tensor(&self.moments[1], k, moments),
                weight: self.tensor(&self.weight, k, DType::Bf16),
                master: Master::Remainder(self.part(&self.remainder, k, 2)),
                group: self.group.clone(),
                control: self.control.clone(),
                amax: amax.then(|| self.item(&self.bank, k, 4)),
                emit: emit.then(|| Emit {
                    dst: self.part(&self.codes, k, 1),
                    format: Format::E4m3,
                    scales: self.item(&self.records, k, 32),
                    record: self.item(&self.marks, k, 16),
                }),
            })
        })
    }

    fn forget(&self) {
        self.desk.backend.fill(&self.desk.stream, &self.marks, 0).unwrap();
    }

    fn passes(&self, table: &mut Table) {
        let n = self.total as f64;
        let mut row = |pass: &str, bytes: f64, call: &dyn Fn()| {
            table.row(self.name, pass, seconds(self.desk, call), bytes * n);
        };
        let amax = self.plan(|k| {
            Job::Amax(Amax {
                src: self.tensor(&self.weight, k, DType::Bf16),
                slot: self.item(&self.bank, k, 4),
            })
        });
        row("amax", 2.0, &|| self.run(&amax));
        let cast = self.cast(false, false);
        row("cast", 3.0, &|| {
            self.forget();
            self.run(&cast);
        });
        row("cast, bytes already made", 3.0, &|| self.run(&cast));
        let both = self.cast(true, false);
        row("cast + amax", 3.0, &|| {
            self.forget();
            self.run(&both);
        });
        let counted = self.cast(false, true);
        row("cast + saturation count", 3.0, &|| {
            self.forget();
            self.run(&counted);
        });
        let decode = self.plan(|k| {
            Job::Decode(Decode {
                src: self.part(&self.codes, k, 1),
                format: Format::E4m3,
                record: self.item(&self.marks, k, 16),
                dst: self.tensor(&self.remainder, k, DType::Bf16),
            })
        });
        row("decode to bf16", 3.0, &|| self.run(&decode));
        self.desk.backend.fill(&self.desk.stream, &self.remainder, 0).unwrap();
        let divide = self.plan(|k| {
            Job::Divide(Divide {
                src: self.tensor(&self.moments[0], k, DType::F32),
                dst: self.tensor(&self.moments[0], k, DType::F32),
                divisor: 8.0,
            })
        });
        row("divide f32 in place", 8.0, &|| self.run(&divide));
        let tiles: u64 = self.lengths.iter().map(|&length| norm_tiles(length)).sum();
        let tiles = Span::whole(&self.desk.backend.alloc(tiles * 16, Memory::Device).unwrap());
        let at = std::cell::Cell::new(0);
        let norm = self.plan(|k| {
            let bytes = norm_tiles(self.lengths[k]) * 16;
            let from = at.replace(at.get() + bytes);
            Job::Norm(Norm {
                src: self.tensor(&self.grad, k, DType::Bf16),
                tiles: tiles.sub(from..from + bytes).unwrap(),
            })
        });
        row("norm of bf16 gradients", 2.0, &|| self.run(&norm));
        let total = self.desk.put(&[NormRecord::default()], 0);
        let sum = self
            .desk
            .backend
            .plan(&[Job::SumNorms(SumNorms { tiles, total: total.clone() })])
            .unwrap();
        row("sum of the norm's tiles", 0.0, &|| self.run(&sum));
        let control = self
            .desk
            .backend
            .plan(&[Job::Control(Control {
                total,
                control: self
                    .desk
                    .put(&[ControlRecord { inverse_loss_scale: 1.0, ..Default::default() }], 0),
                groups: self.group.clone(),
            })])
            .unwrap();
        row("control", 0.0, &|| self.run(&control));

        let zero = || {
            self.moments
                .iter()
                .for_each(|m| self.desk.backend.fill(&self.desk.stream, m, 0).unwrap())
        };
        self.reset_group();
        for (pass, moments, amax, emit, bytes) in [
            ("AdamW", DType::F32, false, false, 26.0),
            ("AdamW + amax", DType::F32, true, false, 26.0),
            ("AdamW + amax + float8", DType::F32, true, true, 27.0),
            ("AdamW, bf16 moments", DType::Bf16, true, false, 18.0),
            ("AdamW, bf16 moments + amax + float8", DType::Bf16, true, true, 19.0),
        ] {
            zero();
            let plan = self.optimize(moments, amax, emit);
            row(pass, bytes, &|| self.run(&plan));
            let words: Vec<u32> = self.desk.get_as(&self.bank);
            assert!(
                words.iter().all(|word| word & 0x7fff_ffff < 0x7f80_0000),
                "after {pass}: the weights are not finite"
            );
        }
        self.step(table, false);
        self.step(table, true);
    }

    fn reset_group(&self) {
        let corrections = [0.1_f32, 0.05];
        self.desk
            .backend
            .upload(
                &self.desk.stream,
                bytemuck::cast_slice(&corrections),
                &self.group.sub(48..56).unwrap(),
            )
            .unwrap();
    }

    /// The weight path of a step at world 1: optimizer, sync, cast; the gather borrows the bytes.
    fn step(&self, table: &mut Table, delayed: bool) {
        let slots = self.lengths.len();
        let flags = if delayed { slot_flags::DELAYED } else { 0 };
        let slot = SlotRecord {
            published: 100.0,
            published_inv: 0.01,
            cast: 100.0,
            cast_inv: 0.01,
            version: 7,
            flags,
            ..Default::default()
        };
        let upload = |bytes: &[u8], to: &Span<Cuda>| {
            self.desk.backend.upload(&self.desk.stream, bytes, to).unwrap()
        };
        upload(bytemuck::cast_slice(&vec![slot; slots]), &self.records);
        let rings = self.desk.put(&vec![1_f32; slots * 16], 0);
        let status = Span::whole(
            &self.desk.backend.alloc(status_bytes(slots as u64), Memory::Host).unwrap(),
        );
        let update = self
            .desk
            .backend
            .plan(&[Job::UpdateScales(UpdateScales {
                slots: slots as u64,
                bank: self.bank.clone(),
                records: self.records.clone(),
                rings,
                history: 16,
                algorithm: AmaxAlgorithm::Max,
                rule: ScaleRule::default(),
                status: status.clone(),
            })])
            .unwrap();
        let (optimize, cast) = (self.optimize(DType::F32, true, delayed), self.cast(false, false));
        let order = self.item(&self.bank, slots, 4).range().start;
        let order = Span::new(self.bank.buffer(), order..order + 16).unwrap();
        let words = self.desk.put(&[1_u32, 2, !1, !2], 0);
        let path = || {
            self.run(&optimize);
            self.desk.backend.copy(&self.desk.stream, &words, &order).unwrap();
            self.run(&update);
            self.run(&cast);
        };
        self.moments.iter().for_each(|m| self.desk.backend.fill(&self.desk.stream, m, 0).unwrap());
        let (name, bytes) =
            if delayed { ("weight path, delayed", 27.0) } else { ("weight path, dynamic", 29.0) };
        table.row(self.name, name, seconds(self.desk, path), bytes * self.total as f64);
        table.row(
            self.name,
            "update of the scales",
            seconds(self.desk, || {
                self.desk.backend.copy(&self.desk.stream, &words, &order).unwrap();
                self.run(&update);
            }),
            0.0,
        );
        let header: Vec<u32> =
            bytemuck::pod_collect_to_vec(&self.desk.backend.peek(&status).unwrap()[..16]);
        assert!(
            header[0] > 0 && header[1..3] == [0, 0],
            "every sync must have been taken: {header:?}"
        );
    }
}

struct Arena {
    elements: u64,
    weight: Span<Cuda>,
    remainder: Span<Cuda>,
    grad: Span<Cuda>,
    moments: [Span<Cuda>; 2],
    codes: Span<Cuda>,
}

impl Arena {
    fn new(desk: &Desk<Cuda>) -> Self {
        let elements = PARAMETERS + 20_000 * 256;
        let alloc =
            |size: u64| Span::whole(&desk.backend.alloc(elements * size, Memory::Device).unwrap());
        let arena = Self {
            elements,
            weight: alloc(2),
            remainder: alloc(2),
            grad: alloc(2),
            moments: [alloc(4), alloc(4)],
            codes: alloc(1),
        };
        let mut random = Random(41);
        for (span, scale) in [(&arena.weight, 0.1), (&arena.grad, 0.01)] {
            let pattern: Vec<u16> = (0..(1 << 23) + 11)
                .map(|_| ((random.uniform() * scale).to_bits() >> 16) as u16)
                .collect();
            let bytes: &[u8] = bytemuck::cast_slice(&pattern);
            let mut at = 0;
            while at < span.len() {
                let take = (span.len() - at).min(bytes.len() as u64);
                desk.backend
                    .upload(
                        &desk.stream,
                        &bytes[..take as usize],
                        &span.sub(at..at + take).unwrap(),
                    )
                    .unwrap();
                at += take;
            }
        }
        arena
    }
}

fn copy_rate(desk: &Desk<Cuda>, arena: &Arena) -> f64 {
    let [from, to] = &arena.moments;
    let seconds = seconds(desk, || desk.backend.copy(&desk.stream, from, to).unwrap());
    2.0 * from.len() as f64 / seconds
}

fn blocks() -> Vec<u64> {
    let block = [
        4096 * 4096,
        1024 * 4096,
        1024 * 4096,
        4096 * 4096,
        14_336 * 4096,
        14_336 * 4096,
        4096 * 14_336,
    ];
    block.repeat(4)
}

/// 560 tensors of mixed, odd sizes and the same total.
fn mixed() -> Vec<u64> {
    let mut random = Random(42);
    let mut left = PARAMETERS;
    let mut lengths: Vec<u64> = (0..559_u64)
        .map(|k| {
            let length = left / (560 - k) * (50 + random.below(101) as u64) / 100;
            left -= length;
            length
        })
        .collect();
    lengths.push(left);
    lengths
}

#[test]
#[ignore = "needs a GPU, alone"]
fn rows() {
    let desk = Desk::new(cuda());
    println!(
        "{:?}, driver {:?}",
        desk.backend,
        gather8_kernels::cuda::probe().unwrap().driver_version
    );
    let arena = Arena::new(&desk);
    assert_eq!(blocks().iter().sum::<u64>(), PARAMETERS);
    let before = copy_rate(&desk, &arena);
    let mut table = Table { copy: before, text: String::new(), json: String::new() };
    table.row(
        "copy",
        "before",
        2.0 * arena.moments[0].len() as f64 / before,
        2.0 * arena.moments[0].len() as f64,
    );
    Case::new(&desk, "28", blocks(), &arena).passes(&mut table);
    Case::new(&desk, "560", mixed(), &arena).passes(&mut table);
    let ones = Case::new(&desk, "20000 x 1", vec![1; 20_000], &arena);
    for (pass, plan) in [
        ("AdamW + amax + float8", ones.optimize(DType::F32, true, true)),
        ("cast, bytes already made", ones.cast(true, false)),
    ] {
        table.row(ones.name, pass, seconds(&desk, || ones.run(&plan)), 20_000.0 * 27.0);
    }
    let square = Transpose {
        src: arena.codes.sub(0..1 << 28).unwrap(),
        rows: 1 << 14,
        cols: 1 << 14,
        dst: arena.remainder.sub(0..1 << 28).unwrap(),
    };
    let plan = desk.backend.plan(&[Job::Transpose(square)]).unwrap();
    table.row(
        "16384^2",
        "transpose",
        seconds(&desk, || desk.backend.run(&desk.stream, &plan).unwrap()),
        2.0 * f64::from(1 << 28),
    );
    let after = copy_rate(&desk, &arena);
    table.row(
        "copy",
        "after",
        2.0 * arena.moments[0].len() as f64 / after,
        2.0 * arena.moments[0].len() as f64,
    );
    println!("{}", table.text);
    if let Some(path) = std::env::var_os("GATHER8_BENCH") {
        std::fs::write(path, table.json).unwrap();
    }
}

/// One launch at a time by the device's clock, next to copies that are timed alike. The device is busy
/// beforehand, so that no time of the host is in it: with a fill, which leaves the cache full of bytes
/// that are yet to be written, or with a delay, which touches no memory.
#[test]
#[ignore = "needs a GPU, alone"]
fn single_launches() {
    let desk = Desk::new(cuda());
    let arena = Arena::new(&desk);
    let [from, to] = &arena.moments;
    let ahead = Span::whole(&desk.backend.alloc(256 << 20, Memory::Device).unwrap());
    let timer = desk.backend.timer().unwrap();
    let case = Case::new(&desk, "28", blocks(), &arena);
    let (cast, both) = (case.cast(false, false), case.cast(true, false));
    let passes: [(&str, f64, &dyn Fn()); 3] = [
        ("copy", 2.0 * from.len() as f64, &|| desk.backend.copy(&desk.stream, from, to).unwrap()),
        ("cast", 3.0 * case.total as f64, &|| case.run(&cast)),
        ("cast + amax", 3.0 * case.total as f64, &|| case.run(&both)),
    ];
    for (busy, with_fill) in [("a fill", true), ("a delay", false)] {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..31 {
            for ((_, _, call), times) in passes.iter().zip(&mut times) {
                case.forget();
                if with_fill {
                    desk.backend.fill(&desk.stream, &ahead, 0).unwrap();
                } else {
                    desk.backend.delay(&desk.stream, Duration::from_micros(100)).unwrap();
                }
                timer.start(&desk.stream).unwrap();
                call();
                timer.stop(&desk.stream).unwrap();
                times.push(timer.elapsed().unwrap().as_secs_f64());
            }
        }
        let mut copy = None;
        for ((pass, bytes, _), times) in passes.iter().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            let rate = bytes / times[times.len() / 2];
            let copy = *copy.get_or_insert(rate);
            println!(
                "after {busy}: {pass:12} {:.4} ms {:.3} TB/s {:.3} x",
                times[times.len() / 2] * 1e3,
                rate / 1e12,
                rate / copy
            );
        }
    }
}
