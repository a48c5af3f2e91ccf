//! Rows over a model's share of one rank: the linear weights of four Llama-3-8B blocks, 872 million
//! parameters, as 28 tensors, as 560 tensors of mixed sizes, and 20,000 tensors of one element.
//!
//! Every pass is one launch over all of its tensors. The weight path of a step (optimizer, sync,
//! cast; the gather of a world of 1 borrows the bytes) is a row too.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use gather8_kernels::job::{Amax, AmaxAlgorithm, Cast, Emit, Job, Master, Optimize, UpdateScales};
use gather8_kernels::layout::{
    BytesRecord, ORDER_WORDS, SlotRecord, bank_bytes, slot_flags, status_bytes,
};
use gather8_kernels::scale::ScaleRule;
use gather8_kernels::{Backend, DType, Format, Memory, Span, Tensor};

use super::data::Content;
use super::device::Device;
use super::host::step_records;
use super::{Entry, Group, Row};

/// The linear weights of one Llama-3-8B block: rows and columns.
pub const BLOCK: [[u64; 2]; 7] = [
    [4096, 4096],
    [1024, 4096],
    [1024, 4096],
    [4096, 4096],
    [14_336, 4096],
    [14_336, 4096],
    [4096, 14_336],
];

/// Entries in a ring of past amaxes.
const HISTORY: u32 = 16;

/// Elements of the tensors of four blocks, each divided by `divisor`.
pub fn blocks(divisor: u64) -> Vec<u64> {
    BLOCK.map(|[rows, columns]| rows * columns / divisor).repeat(4)
}

/// So many tensors of odd sizes between half and one and a half of the mean, with the same total.
pub fn mixed(total: u64, tensors: u64) -> Vec<u64> {
    let stream = crate::random::Stream::new(42, "mixed");
    let mut left = total;
    let mut lengths = Vec::new();
    for number in 0..tensors.saturating_sub(1) {
        let length = left / (tensors - number) * (50 + stream.below(number, 101)) / 100;
        left -= length;
        lengths.push(length);
    }
    lengths.push(left);
    lengths
}

/// The memory that the rows share.
pub struct Arena<B: Backend> {
    device: Device<B>,
    elements: u64,
    weight: Span<B>,
    remainder: Span<B>,
    grad: Span<B>,
    moments: [Span<B>; 2],
    codes: Span<B>,
    copies: [Span<B>; 2],
}

impl<B: Backend> Arena<B> {
    /// Room for so many elements, and for copies of four bytes each.
    ///
    /// # Errors
    /// Memory that is not there.
    pub fn new(device: &Device<B>, elements: u64) -> Result<Arc<Self>> {
        let zeroed = |bytes| device.zeroed(elements * bytes);
        let repeated = |content: Content| -> Result<Span<B>> {
            let span = zeroed(2)?;
            // An odd length, so that no two tensors hold the same.
            let pattern = content.bf16((elements as usize).min((1 << 23) + 11));
            let bytes: &[u8] = bytemuck::cast_slice(&pattern);
            let mut at = 0;
            for piece in std::iter::repeat(bytes) {
                let take = (span.len() - at).min(piece.len() as u64);
                let (piece, _) = piece.split_at(take as usize);
                device.backend.upload(&device.stream, piece, &span.sub(at..at + take)?)?;
                at += take;
                if at == span.len() {
                    break;
                }
            }
            Ok(span)
        };
        Ok(Arc::new(Self {
            device: device.clone(),
            elements,
            weight: repeated(Content::Weight)?,
            remainder: zeroed(2)?,
            grad: repeated(Content::Gradient)?,
            moments: [zeroed(4)?, zeroed(4)?],
            codes: zeroed(1)?,
            copies: [zeroed(4)?, zeroed(4)?],
        }))
    }

    fn copy(self: &Arc<Self>) -> Entry<'static> {
        let arena = Arc::clone(self);
        let make = move || -> Result<Box<dyn Row>> {
            let device = arena.device.clone();
            let [from, to] = arena.copies.clone();
            Ok(Box::new(Issued {
                device: device.clone(),
                prepare: Box::new(|| Ok(())),
                work: Box::new(move || Ok(device.backend.copy(&device.stream, &from, &to)?)),
            }))
        };
        // A copy reads and writes four bytes of each.
        Entry { pass: "copy", elements: self.elements, bytes_per_element: 8, make: Box::new(make) }
    }
}

/// Elements that an arena needs for tensors of these lengths.
pub fn room(lengths: &[u64]) -> u64 {
    lengths.iter().map(|length| length.next_multiple_of(ALIGNMENT)).sum()
}

/// Every tensor begins at a multiple of so many elements, as buffers do in bytes.
const ALIGNMENT: u64 = 256;

/// Tensors in an arena.
pub struct Model<B: Backend> {
    arena: Arc<Arena<B>>,
    /// Where each begins, and its elements.
    tensors: Vec<(u64, u64)>,
    records: Span<B>,
    marks: Span<B>,
    bank: Span<B>,
    group: Span<B>,
    control: Span<B>,
}

/// An optimizer row.
#[derive(Clone, Copy)]
struct Kind {
    moments: DType,
    amax: bool,
    emit: bool,
}

impl<B: Backend> Model<B> {
    /// Lays tensors of these lengths into the arena.
    ///
    /// # Errors
    /// An arena that is too small.
    pub fn new(arena: &Arc<Arena<B>>, lengths: &[u64]) -> Result<Arc<Self>> {
        ensure!(room(lengths) <= arena.elements, "the arena is too small; report this");
        let mut tensors = Vec::new();
        let mut end = 0_u64;
        for &length in lengths {
            tensors.push((end, length));
            end = (end + length).next_multiple_of(ALIGNMENT);
        }
        let (device, slots) = (&arena.device, lengths.len() as u64);
        let (group, control) = step_records();
        Ok(Arc::new(Self {
            arena: Arc::clone(arena),
            tensors,
            records: device.zeroed(slots * size_of::<SlotRecord>() as u64)?,
            marks: device.zeroed(slots * size_of::<BytesRecord>() as u64)?,
            bank: device.zeroed(bank_bytes(slots))?,
            group: device.filled(&[group])?,
            control: device.filled(&[control])?,
        }))
    }

    /// What its passes are issued on.
    pub fn stream(&self) -> &B::Stream {
        &self.arena.device.stream
    }

    fn total(&self) -> u64 {
        self.tensors.iter().map(|(_, length)| length).sum()
    }

    fn plan(
        &self,
        job: impl Fn(usize, &dyn Fn(&Span<B>, u64) -> Result<Span<B>>) -> Result<Job<B>>,
    ) -> Result<B::Plan> {
        let mut jobs = Vec::new();
        for (number, &(at, length)) in self.tensors.iter().enumerate() {
            let part = |whole: &Span<B>, size: u64| -> Result<Span<B>> {
                Ok(whole.sub(at * size..(at + length) * size)?)
            };
            jobs.push(job(number, &part)?);
        }
        Ok(self.arena.device.backend.plan(&jobs)?)
    }

    fn item<T>(whole: &Span<B>, number: usize) -> Result<Span<B>> {
        let size = size_of::<T>() as u64;
        let at = number as u64 * size;
        Ok(whole.sub(at..at + size)?)
    }

    fn amax(&self) -> Result<B::Plan> {
        self.plan(|number, part| {
            let src = Tensor::new(part(&self.arena.weight, 2)?, DType::Bf16)?;
            Ok(Job::Amax(Amax { src, slot: Self::item::<u32>(&self.bank, number)? }))
        })
    }

    fn cast(&self, amax: bool) -> Result<B::Plan> {
        self.plan(|number, part| {
            let slot = || Self::item::<u32>(&self.bank, number);
            Ok(Job::Cast(Cast {
                src: Tensor::new(part(&self.arena.weight, 2)?, DType::Bf16)?,
                dst: part(&self.arena.codes, 1)?,
                format: Format::E4m3,
                scales: Self::item::<SlotRecord>(&self.records, number)?,
                record: Self::item::<BytesRecord>(&self.marks, number)?,
                saturated: None,
                amax: if amax { Some(slot()?) } else { None },
            }))
        })
    }

    fn optimize(&self, kind: Kind) -> Result<B::Plan> {
        let Kind { moments, amax, emit } = kind;
        let [first, second] = &self.arena.moments;
        self.plan(|number, part| {
            let moment = |span| -> Result<Tensor<B>> {
                Ok(Tensor::new(part(span, moments.size())?, moments)?)
            };
            let emitted = || -> Result<Emit<B>> {
                Ok(Emit {
                    dst: part(&self.arena.codes, 1)?,
                    format: Format::E4m3,
                    scales: Self::item::<SlotRecord>(&self.records, number)?,
                    record: Self::item::<BytesRecord>(&self.marks, number)?,
                })
            };
            Ok(Job::Optimize(Optimize {
                grad: Tensor::new(part(&self.arena.grad, 2)?, DType::Bf16)?,
                exp_avg: moment(first)?,
                exp_avg_sq: moment(second)?,
                weight: Tensor::new(part(&self.arena.weight, 2)?, DType::Bf16)?,
                master: Master::Remainder(part(&self.arena.remainder, 2)?),
                group: self.group.clone(),
                control: self.control.clone(),
                amax: if amax { Some(Self::item::<u32>(&self.bank, number)?) } else { None },
                emit: if emit { Some(emitted()?) } else { None },
            }))
        })
    }

    fn update(&self, status: &Span<B>) -> Result<B::Plan> {
        let slots = self.tensors.len() as u64;
        let rings = self.arena.device.zeroed(slots * u64::from(HISTORY) * 4)?;
        Ok(self.arena.device.backend.plan(&[Job::UpdateScales(UpdateScales {
            slots,
            bank: self.bank.clone(),
            records: self.records.clone(),
            rings,
            history: HISTORY,
            algorithm: AmaxAlgorithm::Max,
            rule: ScaleRule::default(),
            status: status.clone(),
        })])?)
    }

    fn zero(&self, spans: &[&Span<B>]) -> Result<()> {
        let Device { backend, stream, .. } = &self.arena.device;
        spans.iter().try_for_each(|span| Ok(backend.fill(stream, span, 0)?))
    }

    /// Moments of zero, and slots whose scale maps 1 to the format's largest value.
    fn reset(&self, delayed: bool) -> Result<()> {
        let [first, second] = &self.arena.moments;
        self.zero(&[first, second, &self.marks, &self.bank])?;
        let (scale, inverse) = (Format::E4m3.max(), 1.0 / Format::E4m3.max());
        let slot = SlotRecord {
            published: scale,
            published_inv: inverse,
            cast: scale,
            cast_inv: inverse,
            version: 1,
            flags: if delayed { slot_flags::DELAYED | slot_flags::SEED } else { 0 },
            ..SlotRecord::default()
        };
        let Device { backend, stream, .. } = &self.arena.device;
        let slots = vec![slot; self.tensors.len()];
        Ok(backend.upload(stream, bytemuck::cast_slice(&slots), &self.records)?)
    }

    fn pass(self: &Arc<Self>, plan: B::Plan) -> Result<Box<dyn Row>> {
        self.reset(false)?;
        let (model, device) = (Arc::clone(self), self.arena.device.clone());
        device.backend.synchronize(&device.stream)?;
        Ok(Box::new(Issued {
            device: device.clone(),
            // With marks of version 1 the second cast would find its bytes made.
            prepare: Box::new(move || model.zero(&[&model.marks])),
            work: Box::new(move || Ok(device.backend.run(&device.stream, &plan)?)),
        }))
    }

    /// The weight path of a step at world 1, ready to be issued again and again.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn weight_path(self: &Arc<Self>, delayed: bool) -> Result<WeightPath<B>> {
        self.reset(delayed)?;
        let device = &self.arena.device;
        let slots = self.tensors.len() as u64;
        let status = device.backend.alloc(status_bytes(slots), Memory::Host)?;
        let status = Span::whole(&status);
        let kind = Kind { moments: DType::F32, amax: true, emit: delayed };
        let plans = [self.optimize(kind)?, self.update(&status)?, self.cast(false)?];
        let order = self.bank.sub(slots * 4..(slots + ORDER_WORDS) * 4)?;
        // A digest and its complement, as after an all-reduce of ranks that agree.
        let agreed = device.filled(&[1_u32, 2, !1, !2])?;
        device.backend.synchronize(&device.stream)?;
        let model = Arc::clone(self);
        Ok(WeightPath { model, plans, order, agreed, status })
    }

    /// The rows, under the name of an implementation.
    pub fn group(self: &Arc<Self>, implementation: &'static str) -> Group<'static> {
        let mut entries = Vec::new();
        let mut push = |pass, bytes_per_element, make: Make<B>| {
            let model = Arc::clone(self);
            let make = Box::new(move || make(&model));
            entries.push(Entry { pass, elements: self.total(), bytes_per_element, make });
        };
        push("amax", 2, Box::new(|model| model.pass(model.amax()?)));
        push("cast", 3, Box::new(|model| model.pass(model.cast(false)?)));
        push("cast-amax", 3, Box::new(|model| model.pass(model.cast(true)?)));
        for (pass, bytes, moments, amax, emit) in [
            ("adamw", 26, DType::F32, false, false),
            ("adamw-amax", 26, DType::F32, true, false),
            ("adamw-amax-emit", 27, DType::F32, true, true),
            ("adamw-bf16-amax", 18, DType::Bf16, true, false),
            ("adamw-bf16-amax-emit", 19, DType::Bf16, true, true),
        ] {
            let kind = Kind { moments, amax, emit };
            push(pass, bytes, Box::new(move |model| model.pass(model.optimize(kind)?)));
        }
        for (pass, bytes, delayed) in [("step-dynamic", 29, false), ("step-delayed", 27, true)] {
            push(
                pass,
                bytes,
                Box::new(move |model| {
                    let path = model.weight_path(delayed)?;
                    Ok(Box::new(Issued {
                        device: model.arena.device.clone(),
                        prepare: Box::new(|| Ok(())),
                        work: Box::new(move || path.issue()),
                    }))
                }),
            );
        }
        Group { implementation, threads: 1, copy: self.arena.copy(), entries }
    }
}

/// Sets a row up.
type Make<B> = Box<dyn Fn(&Arc<Model<B>>) -> Result<Box<dyn Row>>>;

/// See [`Model::weight_path`].
pub struct WeightPath<B: Backend> {
    model: Arc<Model<B>>,
    plans: [B::Plan; 3],
    order: Span<B>,
    agreed: Span<B>,
    status: Span<B>,
}

impl<B: Backend> WeightPath<B> {
    /// Issues one step.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn issue(&self) -> Result<()> {
        let Device { backend, stream, .. } = &self.model.arena.device;
        let [optimize, update, cast] = &self.plans;
        backend.run(stream, optimize)?;
        backend.copy(stream, &self.agreed, &self.order)?;
        backend.run(stream, update)?;
        Ok(backend.run(stream, cast)?)
    }

    /// Syncs so far, if none was refused.
    ///
    /// # Errors
    /// A refused one; a failure of the device.
    pub fn syncs(&self) -> Result<u32> {
        let Device { backend, stream, .. } = &self.model.arena.device;
        backend.synchronize(stream)?;
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&backend.peek(&self.status)?);
        let [syncs, 0, 0, ..] = *words.as_slice() else {
            anyhow::bail!("a sync was refused: the weights are not finite; report this");
        };
        Ok(syncs)
    }
}

/// Work that is issued on a device.
struct Issued<B: Backend> {
    device: Device<B>,
    prepare: Box<dyn Fn() -> Result<()>>,
    work: Box<dyn Fn() -> Result<()>>,
}

impl<B: Backend> Row for Issued<B> {
    fn prepare(&mut self) -> Result<()> {
        (self.prepare)()
    }

    fn run(&mut self) -> Result<Duration> {
        let Device { backend, stream, clock } = &self.device;
        clock.time(backend, stream, &mut || (self.work)())
    }
}

#[cfg(test)]
mod tests {
    use gather8_kernels::cpu::Cpu;

    use super::super::device::HostClock;
    use super::super::{Selection, Settings, run};
    use super::*;

    #[test]
    fn sizes_are_those_that_were_promised() {
        assert_eq!(blocks(1).len(), 28);
        assert_eq!(blocks(1).iter().sum::<u64>(), 872_415_232);
        let mixed = mixed(872_415_232, 560);
        assert_eq!((mixed.len(), mixed.iter().sum::<u64>()), (560, 872_415_232));
        let mean = 872_415_232 / 560;
        assert!(mixed.iter().all(|&length| length > mean / 8 && length < mean * 8), "{mixed:?}");
    }

    #[test]
    fn every_row_runs_and_every_step_is_taken() {
        let device = Device::new(Cpu::new(), Arc::new(HostClock)).unwrap();
        let lengths = [&blocks(1 << 16)[..], &[1, 0, 3]].concat();
        let arena = Arena::new(&device, room(&lengths)).unwrap();
        let model = Model::new(&arena, &lengths).unwrap();
        let group = model.group("test");
        let names: Vec<_> = group.passes().collect();
        let settings = Settings { size: 0, repeats: 2 };
        let rows = run(&[group], &Selection::default(), settings, |_| {}).unwrap();
        assert_eq!(rows.iter().map(|row| row.pass).collect::<Vec<_>>(), names);
        for delayed in [false, true] {
            let path = model.weight_path(delayed).unwrap();
            for step in 1..=3 {
                path.issue().unwrap();
                assert_eq!(path.syncs().unwrap(), step);
            }
        }
    }
}
