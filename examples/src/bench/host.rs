//! Rows that call the passes' functions on slices: the reference (`scalar`), and what runs (`fast`).

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use gather8_kernels::layout::{ControlRecord, GroupRecord};
use gather8_kernels::scalar::{Adam, Elements, ElementsMut, EmitMut, MasterMut, Shard};
use gather8_kernels::{Format, fast, scalar};

use super::data::Content;
use super::{Entry, Group, Row};

/// One implementation of the passes.
#[derive(Clone, Copy)]
pub struct Functions {
    /// Its name in rows.
    pub name: &'static str,
    amax: fn(Elements<'_>) -> u32,
    cast: fn(Elements<'_>, f32, Format, &mut [u8]) -> u32,
    optimize: fn(&Adam, Shard<'_>) -> u32,
}

/// The passes as they run.
pub const FAST: Functions =
    Functions { name: "fast", amax: fast::amax_word, cast: fast::cast, optimize: fast::optimize };

/// The rules that they must match.
pub const SCALAR: Functions = Functions {
    name: "scalar",
    amax: scalar::amax_word,
    cast: scalar::cast,
    optimize: scalar::optimize,
};

/// What an optimizer row keeps besides gradient and shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// f32 moments, a 16-bit remainder.
    Remainder,
    /// The same, and float8 bytes written along.
    RemainderEmit,
    /// f32 moments, an f32 copy.
    Copy,
    /// BF16 moments, a 16-bit remainder.
    Bf16Moments,
}

impl Kept {
    pub(super) const ALL: [(Self, &'static str); 4] = [
        (Self::Remainder, "adamw-remainder"),
        (Self::RemainderEmit, "adamw-remainder-emit"),
        (Self::Copy, "adamw-copy"),
        (Self::Bf16Moments, "adamw-bf16-moments"),
    ];

    /// Bytes read and written per parameter, with a BF16 gradient and a BF16 shard. A copy's shard
    /// is written only.
    pub(super) const fn traffic(self) -> u64 {
        match self {
            Self::Remainder => 26,
            Self::RemainderEmit => 27,
            Self::Copy => 28,
            Self::Bf16Moments => 18,
        }
    }

    /// Bytes of memory per parameter.
    pub(super) const fn memory(self) -> u64 {
        match self {
            Self::Remainder => 14,
            Self::RemainderEmit => 15,
            Self::Copy => 16,
            Self::Bf16Moments => 10,
        }
    }
}

/// A step's numbers: step 10 with the usual betas.
pub(super) fn step_records() -> (GroupRecord, ControlRecord) {
    let (beta1, beta2) = (0.9_f64, 0.95_f64);
    let group = GroupRecord {
        beta1,
        beta2,
        lr: 1e-4,
        weight_decay: 0.1,
        eps: 1e-8,
        b1: beta1 as f32,
        one_minus_b1: (1.0 - beta1) as f32,
        b2: beta2 as f32,
        one_minus_b2: (1.0 - beta2) as f32,
        correction1: (1.0 - beta1.powi(10)) as f32,
        correction2: (1.0 - beta2.powi(10)) as f32,
        ..GroupRecord::default()
    };
    let control = ControlRecord {
        step: 10,
        inverse_loss_scale: 1.0,
        factor: 1.0,
        skip_on_found_inf: 1,
        ..ControlRecord::default()
    };
    (group, control)
}

/// The rows of an implementation on so many threads, each on at least `size` bytes.
pub fn group(functions: Functions, threads: usize, size: u64) -> Group<'static> {
    let halves = size.div_ceil(2);
    let mut entries = vec![Entry {
        pass: "amax",
        elements: halves,
        bytes_per_element: 2,
        make: Box::new(move || {
            let src = Content::Weight.bf16(halves as usize);
            Ok(Box::new(Amax { functions, threads, src }))
        }),
    }];
    for (format, pass) in [(Format::E4m3, "cast-e4m3"), (Format::E5m2, "cast-e5m2")] {
        let make = move || -> Result<Box<dyn Row>> {
            let src = Content::Weight.bf16(halves as usize);
            let dst = vec![0; src.len()];
            Ok(Box::new(Cast { functions, threads, src, format, dst }))
        };
        entries.push(Entry { pass, elements: halves, bytes_per_element: 3, make: Box::new(make) });
    }
    for (kept, pass) in Kept::ALL {
        let elements = size.div_ceil(kept.memory());
        let make = move || -> Result<Box<dyn Row>> {
            Ok(Box::new(Optimize::new(functions, threads, kept, elements as usize)))
        };
        entries.push(Entry {
            pass,
            elements,
            bytes_per_element: kept.traffic(),
            make: Box::new(make),
        });
    }
    Group { implementation: functions.name, threads, copy: copy(threads, size), entries }
}

/// A copy of `size` bytes by the system's memcpy.
pub fn copy(threads: usize, size: u64) -> Entry<'static> {
    let make = move || -> Result<Box<dyn Row>> {
        let src = Content::Weight.bf16(size.div_ceil(2) as usize);
        let dst = vec![0; src.len()];
        Ok(Box::new(Copy { threads, src, dst }))
    };
    Entry { pass: "copy", elements: size.div_ceil(2), bytes_per_element: 4, make: Box::new(make) }
}

/// Elements of each thread's piece; whole cache lines.
fn piece(elements: usize, threads: usize) -> usize {
    elements.div_ceil(threads.max(1)).next_multiple_of(64)
}

/// Runs the pieces at once, the last one on this thread.
fn at_once<'a>(mut pieces: Vec<Box<dyn FnOnce() + Send + 'a>>) -> Duration {
    let start = Instant::now();
    let last = pieces.pop();
    std::thread::scope(|scope| {
        for piece in pieces {
            scope.spawn(piece);
        }
        if let Some(last) = last {
            last();
        }
    });
    start.elapsed()
}

struct Copy {
    threads: usize,
    src: Vec<u16>,
    dst: Vec<u16>,
}

impl Row for Copy {
    fn run(&mut self) -> Result<Duration> {
        let size = piece(self.src.len(), self.threads);
        let mut pieces: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for (src, dst) in self.src.chunks(size).zip(self.dst.chunks_mut(size)) {
            pieces.push(Box::new(move || {
                dst.copy_from_slice(black_box(src));
                black_box(dst);
            }));
        }
        Ok(at_once(pieces))
    }
}

struct Amax {
    functions: Functions,
    threads: usize,
    src: Vec<u16>,
}

impl Row for Amax {
    fn run(&mut self) -> Result<Duration> {
        let amax = self.functions.amax;
        let mut pieces: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for src in self.src.chunks(piece(self.src.len(), self.threads)) {
            pieces.push(Box::new(move || {
                black_box(amax(Elements::Bf16(black_box(src))));
            }));
        }
        Ok(at_once(pieces))
    }
}

struct Cast {
    functions: Functions,
    threads: usize,
    src: Vec<u16>,
    format: Format,
    dst: Vec<u8>,
}

impl Row for Cast {
    fn run(&mut self) -> Result<Duration> {
        let (cast, format) = (self.functions.cast, self.format);
        let size = piece(self.src.len(), self.threads);
        let mut pieces: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for (src, dst) in self.src.chunks(size).zip(self.dst.chunks_mut(size)) {
            pieces.push(Box::new(move || {
                black_box(cast(Elements::Bf16(black_box(src)), format.max(), format, dst));
                black_box(dst);
            }));
        }
        Ok(at_once(pieces))
    }
}

/// Moments of either type.
enum Moments {
    F32(Vec<f32>, Vec<f32>),
    Bf16(Vec<u16>, Vec<u16>),
}

struct Optimize {
    functions: Functions,
    threads: usize,
    adam: Adam,
    grad: Vec<u16>,
    moments: Moments,
    weight: Vec<u16>,
    copy: Option<Vec<f32>>,
    remainder: Vec<u16>,
    emitted: Option<Vec<u8>>,
}

impl Optimize {
    fn new(functions: Functions, threads: usize, kept: Kept, elements: usize) -> Self {
        let (group, control) = step_records();
        Self {
            functions,
            threads,
            adam: Adam::new(&group, &control),
            grad: Content::Gradient.bf16(elements),
            moments: if kept == Kept::Bf16Moments {
                Moments::Bf16(Content::Gradient.bf16(elements), Content::Square.bf16(elements))
            } else {
                Moments::F32(Content::Gradient.f32(elements), Content::Square.f32(elements))
            },
            weight: Content::Weight.bf16(elements),
            copy: (kept == Kept::Copy).then(|| Content::Weight.f32(elements)),
            remainder: vec![0; if kept == Kept::Copy { 0 } else { elements }],
            emitted: (kept == Kept::RemainderEmit).then(|| vec![0; elements]),
        }
    }
}

impl Row for Optimize {
    fn run(&mut self) -> Result<Duration> {
        let (optimize, adam) = (self.functions.optimize, &self.adam);
        let size = piece(self.grad.len(), self.threads);
        let (exp_avg, exp_avg_sq) = match &mut self.moments {
            Moments::F32(m, v) => (ElementsMut::F32(m), ElementsMut::F32(v)),
            Moments::Bf16(m, v) => (ElementsMut::Bf16(m), ElementsMut::Bf16(v)),
        };
        let mut rest = Shard {
            grad: Elements::Bf16(&self.grad),
            exp_avg,
            exp_avg_sq,
            weight: ElementsMut::Bf16(&mut self.weight),
            master: match &mut self.copy {
                Some(copy) => MasterMut::Copy(copy),
                None => MasterMut::Remainder(&mut self.remainder),
            },
            emit: self.emitted.as_mut().map(|dst| EmitMut {
                dst,
                scale: Format::E4m3.max(),
                format: Format::E4m3,
            }),
        };
        let mut pieces: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        while !rest.is_empty() {
            let (shard, others) = {
                let mid = size.min(rest.len());
                rest.split_at(mid)
            };
            rest = others;
            pieces.push(Box::new(move || {
                black_box(optimize(adam, black_box(shard)));
            }));
        }
        Ok(at_once(pieces))
    }
}
