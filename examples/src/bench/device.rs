//! Rows that launch planned passes on a backend: the same for every device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use gather8_kernels::job::{Amax, Cast, Emit, Job, Master, Optimize};
use gather8_kernels::layout::{BytesRecord, SlotRecord};
use gather8_kernels::{Backend, DType, Format, Memory, Span, Tensor};

use super::data::Content;
use super::host::{Kept, step_records};
use super::{Entry, Group, Row};

/// How a device is timed.
pub trait Clock<B: Backend>: Send + Sync {
    /// How long the device takes for what `work` issues on the stream. Nothing else is on it.
    ///
    /// # Errors
    /// A failure of the device.
    fn time(
        &self,
        backend: &B,
        stream: &B::Stream,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Duration>;
}

/// The host's clock, from before the launch to the end of the work: right where a launch costs
/// nothing beside the work.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostClock;

impl<B: Backend> Clock<B> for HostClock {
    fn time(
        &self,
        backend: &B,
        stream: &B::Stream,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Duration> {
        let start = Instant::now();
        work()?;
        backend.synchronize(stream)?;
        Ok(start.elapsed())
    }
}

/// A device under measurement.
pub struct Device<B: Backend> {
    pub(super) backend: B,
    pub(super) stream: B::Stream,
    pub(super) clock: Arc<dyn Clock<B>>,
}

impl<B: Backend> Clone for Device<B> {
    fn clone(&self) -> Self {
        Self {
            backend: self.backend.clone(),
            stream: self.stream.clone(),
            clock: Arc::clone(&self.clock),
        }
    }
}

impl<B: Backend> Device<B> {
    /// On a stream of its own.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn new(backend: B, clock: Arc<dyn Clock<B>>) -> Result<Self> {
        let stream = backend.stream("bench")?;
        Ok(Self { backend, stream, clock })
    }

    pub(super) fn zeroed(&self, bytes: u64) -> Result<Span<B>> {
        Ok(Span::whole(&self.backend.alloc(bytes, Memory::Device)?))
    }

    pub(super) fn filled<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result<Span<B>> {
        let bytes = bytemuck::cast_slice(values);
        let span = self.zeroed(bytes.len() as u64)?;
        self.backend.upload(&self.stream, bytes, &span)?;
        Ok(span)
    }

    fn bf16(&self, content: Content, elements: u64) -> Result<Tensor<B>> {
        Ok(Tensor::new(self.filled(&content.bf16(elements as usize))?, DType::Bf16)?)
    }

    fn f32(&self, content: Content, elements: u64) -> Result<Tensor<B>> {
        Ok(Tensor::new(self.filled(&content.f32(elements as usize))?, DType::F32)?)
    }

    /// A slot whose scale maps 1 to the format's largest value.
    fn slot(&self, format: Format) -> Result<Span<B>> {
        let (scale, inverse) = (format.max(), 1.0 / format.max());
        self.filled(&[SlotRecord {
            published: scale,
            published_inv: inverse,
            cast: scale,
            cast_inv: inverse,
            version: 1,
            ..SlotRecord::default()
        }])
    }

    fn row(&self, job: Job<B>, reset: Option<Span<B>>) -> Result<Box<dyn Row>> {
        let plan = self.backend.plan(&[job])?;
        self.backend.synchronize(&self.stream)?;
        Ok(Box::new(Planned { device: self.clone(), plan, reset }))
    }

    fn amax(&self, elements: u64) -> Result<Box<dyn Row>> {
        let src = self.bf16(Content::Weight, elements)?;
        self.row(Job::Amax(Amax { src, slot: self.zeroed(4)? }), None)
    }

    fn cast(&self, elements: u64, format: Format) -> Result<Box<dyn Row>> {
        let record = self.zeroed(size_of::<BytesRecord>() as u64)?;
        let job = Cast {
            src: self.bf16(Content::Weight, elements)?,
            dst: self.zeroed(elements)?,
            format,
            scales: self.slot(format)?,
            record: record.clone(),
            saturated: None,
            amax: None,
        };
        // With a record of version 1 the second run would find its bytes made.
        self.row(Job::Cast(job), Some(record))
    }

    fn optimize(&self, elements: u64, kept: Kept) -> Result<Box<dyn Row>> {
        let (group, control) = step_records();
        let moment = |content| {
            if kept == Kept::Bf16Moments {
                self.bf16(content, elements)
            } else {
                self.f32(content, elements)
            }
        };
        let emit = if kept == Kept::RemainderEmit {
            Some(Emit {
                dst: self.zeroed(elements)?,
                format: Format::E4m3,
                scales: self.slot(Format::E4m3)?,
                record: self.zeroed(size_of::<BytesRecord>() as u64)?,
            })
        } else {
            None
        };
        let job = Optimize {
            grad: self.bf16(Content::Gradient, elements)?,
            exp_avg: moment(Content::Gradient)?,
            exp_avg_sq: moment(Content::Square)?,
            weight: self.bf16(Content::Weight, elements)?,
            master: if kept == Kept::Copy {
                Master::Copy(self.f32(Content::Weight, elements)?.span)
            } else {
                Master::Remainder(self.zeroed(elements * 2)?)
            },
            group: self.filled(&[group])?,
            control: self.filled(&[control])?,
            amax: if kept == Kept::RemainderEmit { Some(self.zeroed(4)?) } else { None },
            emit,
        };
        self.row(Job::Optimize(job), None)
    }
}

/// The rows of a device, each on at least `size` bytes, compared with `copy`, or with the device's
/// own.
pub fn group<B: Backend>(
    implementation: &'static str,
    threads: usize,
    device: &Device<B>,
    size: u64,
    copy: Option<Entry<'static>>,
) -> Group<'static> {
    let halves = size.div_ceil(2);
    let mut entries = Vec::new();
    let mut push = |pass, elements, bytes_per_element, make: Make<B>| {
        let device = device.clone();
        let make = Box::new(move || make(&device));
        entries.push(Entry { pass, elements, bytes_per_element, make });
    };
    push("amax", halves, 2, Box::new(move |device| device.amax(halves)));
    for (format, pass) in [(Format::E4m3, "cast-e4m3"), (Format::E5m2, "cast-e5m2")] {
        push(pass, halves, 3, Box::new(move |device| device.cast(halves, format)));
    }
    for (kept, pass) in Kept::ALL {
        let elements = size.div_ceil(kept.memory());
        let make = Box::new(move |device: &Device<B>| device.optimize(elements, kept));
        push(pass, elements, kept.traffic(), make);
    }
    let own = || {
        let device = device.clone();
        let make = move || -> Result<Box<dyn Row>> {
            let from = device.bf16(Content::Weight, halves)?.span;
            let to = device.zeroed(from.len())?;
            device.backend.synchronize(&device.stream)?;
            Ok(Box::new(Copy { device: device.clone(), from, to }))
        };
        Entry { pass: "copy", elements: halves, bytes_per_element: 4, make: Box::new(make) }
    };
    Group { implementation, threads, copy: copy.unwrap_or_else(own), entries }
}

/// Sets a pass up on a device.
type Make<B> = Box<dyn Fn(&Device<B>) -> Result<Box<dyn Row>>>;

struct Planned<B: Backend> {
    device: Device<B>,
    plan: B::Plan,
    /// Zeroed before every run.
    reset: Option<Span<B>>,
}

impl<B: Backend> Row for Planned<B> {
    fn prepare(&mut self) -> Result<()> {
        let Device { backend, stream, .. } = &self.device;
        if let Some(span) = &self.reset {
            backend.fill(stream, span, 0)?;
            backend.synchronize(stream)?;
        }
        Ok(())
    }

    fn run(&mut self) -> Result<Duration> {
        let Device { backend, stream, clock } = &self.device;
        clock.time(backend, stream, &mut || Ok(backend.run(stream, &self.plan)?))
    }
}

struct Copy<B: Backend> {
    device: Device<B>,
    from: Span<B>,
    to: Span<B>,
}

impl<B: Backend> Row for Copy<B> {
    fn run(&mut self) -> Result<Duration> {
        let Device { backend, stream, clock } = &self.device;
        clock.time(backend, stream, &mut || Ok(backend.copy(stream, &self.from, &self.to)?))
    }
}
