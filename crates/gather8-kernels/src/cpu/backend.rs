//! [`Backend`] for [`Cpu`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::{Backend, Memory, Span};
use crate::error::{Error, Result};
use crate::job::Job;

use super::access::{Touch, Touches};
use super::failure::Source;
use super::graph::{ENDED, Noted};
use super::history::Kind;
use super::lane::{Pauses, Step, lock};
use super::stream::{Point, may_block};
use super::{Buffer, Cpu, Event, Graph, Plan, Schedule, Stream, views};

/// What an operation on a few spans touches.
fn touches_of<const N: usize>(
    cpu: &Cpu,
    pass: &'static str,
    touches: [(&Span<Cpu>, Kind); N],
) -> Result<Touches> {
    let touches =
        touches.into_iter().enumerate().map(|(part, (span, kind))| Touch::new(span, kind, part));
    Touches::new(cpu.0.owner, pass, "span", touches)
}

fn same_length(pass: &'static str, from: u64, to: u64) -> Result<()> {
    if from == to {
        return Ok(());
    }
    Err(Error::Job { pass, problem: format!("{from} bytes do not fit a span of {to} bytes") })
}

/// Where a download goes: memory that the calling thread has borrowed mutably and leaves alone
/// until the operation is over.
struct Target(*mut u8);

// SAFETY: only a pointer travels; `fill` says who may use it.
unsafe impl Send for Target {}

impl Target {
    fn fill(&self, source: &[u8]) {
        // SAFETY: `download` has compared the lengths, and it keeps its borrow of the memory, without
        // using it, until this operation is over, done or skipped.
        unsafe { self.0.copy_from_nonoverlapping(source.as_ptr(), source.len()) };
    }
}

impl Backend for Cpu {
    type Buffer = Buffer;
    type Stream = Stream;
    type Event = Event;
    type Plan = Plan;
    type Graph = Graph;

    fn name(&self) -> String {
        self.0.options.name.clone()
    }

    fn alloc(&self, bytes: u64, memory: Memory) -> Result<Arc<Buffer>> {
        self.0.failure.check()?;
        let number = self.0.buffers.fetch_add(1, Ordering::Relaxed);
        Buffer::new(&self.0.options.name, self.0.owner, number, bytes, memory).map(Arc::new)
    }

    fn size(buffer: &Buffer) -> u64 {
        buffer.len()
    }

    fn stream(&self, name: &str) -> Result<Stream> {
        self.0.failure.check()?;
        let number = {
            let mut ledger = lock(&self.0.ledger);
            ledger.streams += 1;
            ledger.streams - 1
        };
        let pauses = match self.0.options.schedule {
            Schedule::InOrder => None,
            Schedule::Random(seed) => Some(Pauses::new(seed, number)),
        };
        let failure = Arc::clone(&self.0.failure);
        Stream::start(&self.0.options.name, self.0.owner, number, name, failure, pauses)
    }

    fn plan(&self, jobs: &[Job<Self>]) -> Result<Plan> {
        self.0.failure.check()?;
        Plan::new(self.0.owner, self.0.options.threads, jobs)
    }

    fn run(&self, on: &Stream, plan: &Plan) -> Result<()> {
        self.own(plan.owner(), "launching a pass", "plan")?;
        if plan.is_empty() {
            return self.check();
        }
        if self.noted(on, || Noted::Run(plan.clone())) {
            return Ok(());
        }
        self.issue(on, plan.label(), plan.touches(), plan.work()).map(drop)
    }

    fn upload(&self, on: &Stream, bytes: &[u8], to: &Span<Self>) -> Result<()> {
        same_length("upload", bytes.len() as u64, to.len())?;
        let touches = touches_of(self, "upload", [(to, Kind::Write)])?;
        if self.noted(on, || Noted::Upload(bytes.into(), to.clone())) {
            return Ok(());
        }
        let label = format!("upload of {} bytes", to.len());
        let (bytes, to) = (bytes.to_vec(), to.clone());
        let work = move || -> std::result::Result<(), Source> {
            // SAFETY: admitted with a write of this span.
            let mut written = unsafe { views::write(&to) };
            written.bytes_mut().copy_from_slice(&bytes);
            written.commit();
            Ok(())
        };
        self.issue(on, label.into(), &touches, Box::new(work)).map(drop)
    }

    fn download(&self, on: &Stream, from: &Span<Self>, bytes: &mut [u8]) -> Result<()> {
        same_length("download", from.len(), bytes.len() as u64)?;
        may_block(&self.0.options.name, "download")?;
        self.not_captured("download")?;
        let touches = touches_of(self, "download", [(from, Kind::Read)])?;
        let label = format!("download of {} bytes", from.len());
        let span = from.clone();
        let target = Target(bytes.as_mut_ptr());
        let work = move || -> std::result::Result<(), Source> {
            // SAFETY: admitted with a read of this span.
            let source = unsafe { views::read(&span) };
            target.fill(source);
            Ok(())
        };
        // From here to `reach` nothing returns or unwinds, so `bytes` outlives the operation.
        let (tick, clock) = self.issue(on, label.into(), &touches, Box::new(work))?;
        self.reach(&on.0.lane.progress, tick, &clock)
    }

    fn copy(&self, on: &Stream, from: &Span<Self>, to: &Span<Self>) -> Result<()> {
        same_length("copy", from.len(), to.len())?;
        let touches = touches_of(self, "copy", [(from, Kind::Read), (to, Kind::Write)])?;
        if self.noted(on, || Noted::Copy(from.clone(), to.clone())) {
            return Ok(());
        }
        let label = format!("copy of {} bytes", from.len());
        let (from, to) = (from.clone(), to.clone());
        let work = move || -> std::result::Result<(), Source> {
            // SAFETY: admitted with a read of this span, which does not overlap the other.
            let source = unsafe { views::read(&from) };
            // SAFETY: admitted with a write of this span.
            let mut written = unsafe { views::write(&to) };
            written.bytes_mut().copy_from_slice(source);
            written.commit();
            Ok(())
        };
        self.issue(on, label.into(), &touches, Box::new(work)).map(drop)
    }

    fn fill(&self, on: &Stream, span: &Span<Self>, byte: u8) -> Result<()> {
        let touches = touches_of(self, "fill", [(span, Kind::Write)])?;
        if self.noted(on, || Noted::Fill(span.clone(), byte)) {
            return Ok(());
        }
        let label = format!("fill of {} bytes", span.len());
        let span = span.clone();
        let work = move || -> std::result::Result<(), Source> {
            // SAFETY: admitted with a write of this span.
            let mut written = unsafe { views::write(&span) };
            written.bytes_mut().fill(byte);
            written.commit();
            Ok(())
        };
        self.issue(on, label.into(), &touches, Box::new(work)).map(drop)
    }

    /// Works on a backend that has failed, too: host memory is where the reason may stand.
    fn peek(&self, span: &Span<Self>) -> Result<Vec<u8>> {
        if span.buffer().memory() != Memory::Host {
            return Err(Error::Job {
                pass: "peek",
                problem: format!(
                    "buffer {} is device memory: allocate it as host memory, or download it",
                    span.buffer().number()
                ),
            });
        }
        Ok(span.buffer().load_words(&span.range()))
    }

    fn record(&self, on: &Stream) -> Result<Event> {
        self.0.failure.check()?;
        self.own(on.0.owner, "recording an event", "stream")?;
        if let Some(event) = self.noted_event(on) {
            return Ok(event);
        }
        let ledger = lock(&self.0.ledger);
        let mut issued = lock(&on.0.issued);
        issued.clock.join(&ledger.host);
        Ok(Event(Arc::new(Point {
            owner: self.0.owner,
            stream: on.0.number,
            tick: issued.tick,
            clock: issued.clock.clone(),
            progress: Arc::clone(&on.0.lane.progress),
            captured: None,
        })))
    }

    fn wait(&self, on: &Stream, event: &Event, id: &'static str) -> Result<()> {
        self.0.failure.check()?;
        self.own(on.0.owner, "waiting for an event", "stream")?;
        self.own(event.0.owner, "waiting for an event", "event")?;
        if self.noted_wait(on, event, id)? {
            return Ok(());
        }
        let mut ledger = lock(&self.0.ledger);
        let nth = match ledger.waits.iter_mut().find(|(seen, _)| *seen == id) {
            Some((_, count)) => {
                *count += 1;
                *count - 1
            }
            None => {
                ledger.waits.push((id, 1));
                0
            }
        };
        let dropped = |(name, only): &(String, Option<u64>)| {
            name == id && only.is_none_or(|only| only == nth)
        };
        if self.0.options.dropped.iter().any(dropped) {
            return Ok(());
        }
        let mut issued = lock(&on.0.issued);
        let point = &event.0;
        // What is over already, or comes before by earlier waits, needs no place in the queue.
        let holds = issued.clock.covers(point.stream, point.tick) || event.is_done();
        issued.clock.join(&point.clock);
        if !holds {
            issued.tick += 1;
            let tick = issued.tick;
            issued.clock.advance(on.0.number, tick);
            on.0.lane.push(Step::Wait(Arc::clone(&point.progress), point.tick));
        }
        Ok(())
    }

    fn wait_host(&self, event: &Event) -> Result<()> {
        self.0.failure.check()?;
        self.own(event.0.owner, "waiting for an event", "event")?;
        may_block(&self.0.options.name, "waiting for an event on the host")?;
        self.not_captured("wait")?;
        if event.0.captured.is_some() {
            return Err(self.border(ENDED));
        }
        self.reach(&event.0.progress, event.0.tick, &event.0.clock)
    }

    fn synchronize(&self, on: &Stream) -> Result<()> {
        may_block(&self.0.options.name, "synchronize")?;
        self.not_captured("synchronize")?;
        let event = self.record(on)?;
        self.wait_host(&event)
    }

    fn check(&self) -> Result<()> {
        self.0.failure.check()
    }

    fn capture<T>(&self, on: &Stream, issue: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        let ending = self.begin_capture(on)?;
        let value = issue()?;
        Ok((ending.end()?, value))
    }

    fn launch(&self, on: &Stream, graph: &Graph) -> Result<()> {
        self.launch_graph(on, graph)
    }
}
