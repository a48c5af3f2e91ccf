//! Captured graphs: operations that are noted instead of issued, and issued again at each launch.
//!
//! The rules are CUDA's, so that a program that keeps them here keeps them there: a stream takes
//! part once it waits for an event of the capture; events do not cross its border; every stream
//! that takes part must be joined back before it ends. A launch runs on streams of the graph's own,
//! ordered by the captured events alone: nothing of the launch comes before or after what the
//! original streams hold, unless the stream that it is launched on does.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{Backend, Span};
use crate::error::{Error, Result};

use super::clock::Clock;
use super::lane::lock;
use super::stream::{Event, Point, Stream};
use super::{Cpu, Plan};

/// Why an event of a capture means nothing now.
pub(super) const ENDED: &str =
    "it was recorded in a capture that has ended: record one after the launch";

/// A captured sequence of operations, ready to launch. It keeps every plan and buffer that it uses.
pub struct Graph {
    owner: u64,
    /// For every stream that takes part but the first, one of the graph's own.
    others: Vec<Stream>,
    notes: Vec<(usize, Noted)>,
    events: usize,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({} operations)", self.notes.len())
    }
}

/// An operation of a capture.
pub(super) enum Noted {
    Run(Plan),
    Upload(Arc<[u8]>, Span<Cpu>),
    Copy(Span<Cpu>, Span<Cpu>),
    Fill(Span<Cpu>, u8),
    Record(usize),
    Wait(usize, &'static str),
}

/// A capture under way.
pub(super) struct Capture {
    number: u64,
    /// The streams that take part, by number, with their place in the graph and what the next
    /// operation comes after, counted in the capture's own operations.
    streams: HashMap<usize, Member>,
    names: Vec<Arc<str>>,
    notes: Vec<(usize, Noted)>,
    events: usize,
}

struct Member {
    place: usize,
    tick: u64,
    clock: Clock,
}

/// What an event of a capture stands for.
pub(super) struct Captured {
    capture: u64,
    event: usize,
    clock: Clock,
}

impl Cpu {
    /// Notes an operation if its stream takes part in a capture; false if it is to be issued.
    pub(super) fn noted(&self, on: &Stream, operation: impl FnOnce() -> Noted) -> bool {
        let mut capture = lock(&self.0.capture);
        let Some(capture) = capture.as_mut() else { return false };
        let Some(member) = capture.streams.get_mut(&on.0.number) else { return false };
        member.tick += 1;
        member.clock.advance(member.place, member.tick);
        capture.notes.push((member.place, operation()));
        true
    }

    /// An event of the capture, if the stream takes part in one.
    pub(super) fn noted_event(&self, on: &Stream) -> Option<Event> {
        let mut capture = lock(&self.0.capture);
        let capture = capture.as_mut()?;
        let member = capture.streams.get(&on.0.number)?;
        let event = capture.events;
        capture.events += 1;
        capture.notes.push((member.place, Noted::Record(event)));
        let captured = Captured { capture: capture.number, event, clock: member.clock.clone() };
        Some(Event(Arc::new(Point {
            owner: self.0.owner,
            stream: on.0.number,
            tick: u64::MAX,
            clock: Clock::default(),
            progress: Arc::clone(&on.0.lane.progress),
            captured: Some(captured),
        })))
    }

    /// Notes a wait; false if it is to be issued.
    pub(super) fn noted_wait(&self, on: &Stream, event: &Event, id: &'static str) -> Result<bool> {
        let mut capture = lock(&self.0.capture);
        let capture = capture.as_mut();
        let Some(captured) = &event.0.captured else {
            if capture.is_some_and(|capture| capture.streams.contains_key(&on.0.number)) {
                return Err(self.border("it was recorded before the capture: let the stream that is captured wait for it before"));
            }
            return Ok(false);
        };
        let Some(capture) = capture.filter(|capture| capture.number == captured.capture) else {
            return Err(self.border(ENDED));
        };
        let place = capture.names.len();
        let member = capture.streams.entry(on.0.number).or_insert_with(|| {
            capture.names.push(Arc::clone(&on.0.name));
            Member { place, tick: 0, clock: Clock::default() }
        });
        member.clock.join(&captured.clock);
        capture.notes.push((member.place, Noted::Wait(captured.event, id)));
        Ok(true)
    }

    /// Fails if a graph is being captured: the call would wait for work that is not running.
    pub(super) fn not_captured(&self, pass: &'static str) -> Result<()> {
        if lock(&self.0.capture).is_none() {
            return Ok(());
        }
        let problem = "it waits for the device, which a captured graph cannot do: call it outside of \
                       the capture";
        Err(Error::Job { pass, problem: problem.to_owned() })
    }

    pub(super) fn border(&self, reason: &str) -> Error {
        Error::Device {
            device: self.0.options.name.clone(),
            what: "waiting for an event".to_owned(),
            reason: reason.to_owned(),
        }
    }

    pub(super) fn begin_capture(&self, on: &Stream) -> Result<Ending<'_>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        self.0.failure.check()?;
        self.own(on.0.owner, "capturing", "stream")?;
        let mut capture = lock(&self.0.capture);
        if capture.is_some() {
            return Err(Error::Job {
                pass: "capture",
                problem: "another capture on this device has not ended".to_owned(),
            });
        }
        let first = Member { place: 0, tick: 0, clock: Clock::default() };
        *capture = Some(Capture {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            streams: HashMap::from([(on.0.number, first)]),
            names: vec![Arc::clone(&on.0.name)],
            notes: Vec::new(),
            events: 0,
        });
        Ok(Ending(self))
    }

    fn graph_of(&self, capture: Capture) -> Result<Graph> {
        let first = capture.streams.values().find(|member| member.place == 0);
        let joined = |member: &Member| {
            first.is_some_and(|first| first.clock.covers(member.place, member.tick))
        };
        if let Some(left) = capture.streams.values().find(|member| !joined(member)) {
            let name = capture.names.get(left.place).map_or("", |name| name);
            return Err(Error::Job {
                pass: "capture",
                problem: format!(
                    "what stream `{name}` was given is not joined: let the stream that is captured \
                     wait for an event of it before the capture ends"
                ),
            });
        }
        let others = capture.names.iter().skip(1).map(|name| self.stream(name));
        Ok(Graph {
            owner: self.0.owner,
            others: others.collect::<Result<_>>()?,
            notes: capture.notes,
            events: capture.events,
        })
    }

    pub(super) fn launch_graph(&self, on: &Stream, graph: &Graph) -> Result<()> {
        self.own(graph.owner, "launching a graph", "graph")?;
        let mut events: Vec<Option<Event>> = vec![None; graph.events];
        for (place, noted) in &graph.notes {
            let stream = match place.checked_sub(1) {
                None => on,
                Some(other) => graph.others.get(other).unwrap_or(on),
            };
            match noted {
                Noted::Run(plan) => self.run(stream, plan)?,
                Noted::Upload(bytes, to) => self.upload(stream, bytes, to)?,
                Noted::Copy(from, to) => self.copy(stream, from, to)?,
                Noted::Fill(span, byte) => self.fill(stream, span, *byte)?,
                Noted::Record(number) => {
                    if let Some(event) = events.get_mut(*number) {
                        *event = Some(self.record(stream)?);
                    }
                }
                Noted::Wait(number, id) => {
                    if let Some(Some(event)) = events.get(*number) {
                        self.wait(stream, event, id)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Ends the capture however it ends, by a panic too.
pub(super) struct Ending<'a>(&'a Cpu);

impl Ending<'_> {
    pub(super) fn end(self) -> Result<Graph> {
        let capture = lock(&self.0.0.capture).take();
        capture.map_or_else(
            || {
                Err(Error::Job {
                    pass: "capture",
                    problem: "it has been ended by somebody else".to_owned(),
                })
            },
            |capture| self.0.graph_of(capture),
        )
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        lock(&self.0.0.capture).take();
    }
}
