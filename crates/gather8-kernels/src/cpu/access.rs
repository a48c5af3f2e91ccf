//! What an operation touches, and that it does not touch the same bytes twice.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Memory, Span};
use crate::error::{Error, Result};
use crate::job::Job;

use super::Cpu;
use super::buffer::Buffer;
use super::clock::Clock;
use super::history::{Conflict, Kind, Operation, Stamp};
use super::lane::lock;

/// One span that a submitted operation touches.
#[derive(Clone, Debug)]
pub enum Access {
    /// Read only.
    Read(Span<Cpu>),
    /// Overwritten; the bytes before are not looked at.
    Write(Span<Cpu>),
    /// Read and written.
    ReadWrite(Span<Cpu>),
}

impl Access {
    /// The span.
    pub fn span(&self) -> &Span<Cpu> {
        match self {
            Self::Read(span) | Self::Write(span) | Self::ReadWrite(span) => span,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Read(_) => Kind::Read,
            Self::Write(_) | Self::ReadWrite(_) => Kind::Write,
        }
    }
}

/// A range of a buffer that an operation touches, ready for the order checker.
#[derive(Clone)]
pub(super) struct Touch {
    buffer: Arc<Buffer>,
    range: Range<u64>,
    kind: Kind,
    /// Which job or which access of the operation it is, for errors.
    part: usize,
}

impl fmt::Debug for Touch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?} of buffer {}", self.kind, self.range, self.buffer.number())
    }
}

impl Touch {
    pub(super) fn new(span: &Span<Cpu>, kind: Kind, part: usize) -> Self {
        let mut range = span.range();
        if span.buffer().memory() == Memory::Host && !range.is_empty() {
            // Host memory is written in whole words.
            range = range.start & !3..range.end.next_multiple_of(4);
        }
        Self { buffer: Arc::clone(span.buffer()), range, kind, part }
    }
}

/// What an operation touches: sorted, free of conflicts within, neighbours joined.
#[derive(Clone, Debug)]
pub(super) struct Touches(Vec<Touch>);

impl Touches {
    /// # Errors
    /// [`Error::Job`] if a span belongs to another backend, or two touch the same bytes in a way
    /// that does not commute: within one operation nothing orders them.
    pub(super) fn new(
        owner: u64,
        pass: &'static str,
        part_name: &str,
        touches: impl IntoIterator<Item = Touch>,
    ) -> Result<Self> {
        let mut touches: Vec<_> =
            touches.into_iter().filter(|touch| !touch.range.is_empty()).collect();
        if let Some(foreign) = touches.iter().find(|touch| touch.buffer.owner() != owner) {
            return Err(Error::Job {
                pass,
                problem: format!(
                    "buffer {} of {part_name} {} belongs to another backend: allocate it on this one",
                    foreign.buffer.number(),
                    foreign.part
                ),
            });
        }
        touches.sort_by_key(|touch| (touch.buffer.number(), touch.range.start, touch.kind));
        check_disjoint(pass, part_name, &touches)?;
        // Neighbours of one kind are one access to the checker.
        touches.sort_by_key(|touch| (touch.buffer.number(), touch.kind, touch.range.start));
        touches.dedup_by(|next, kept| {
            let joins = next.buffer.number() == kept.buffer.number()
                && next.kind == kept.kind
                && next.range.start <= kept.range.end;
            if joins {
                kept.range.end = kept.range.end.max(next.range.end);
            }
            joins
        });
        Ok(Self(touches))
    }

    /// Checks every touch against its buffer's history.
    ///
    /// # Errors
    /// [`Error::Unordered`].
    pub(super) fn check(&self, operation: &Operation, clock: &Clock) -> Result<()> {
        let conflict = |touch: &Touch| {
            let conflict = lock(&touch.buffer.history).conflict(&touch.range, touch.kind, clock)?;
            Some((touch.buffer.number(), conflict))
        };
        let latest =
            self.0.iter().filter_map(conflict).max_by_key(|(_, conflict)| conflict.first.serial);
        let Some((buffer, Conflict { first, range })) = latest else { return Ok(()) };
        Err(Error::Unordered {
            first: first.label.to_string(),
            first_stream: first.stream.to_string(),
            second: operation.label.to_string(),
            second_stream: operation.stream.to_string(),
            buffer,
            start: range.start,
            end: range.end,
        })
    }

    /// Enters every touch in its buffer's history.
    pub(super) fn note(&self, clock: &Clock, host: &Clock, stamp: &Stamp) {
        for touch in &self.0 {
            lock(&touch.buffer.history).note(&touch.range, touch.kind, clock, host, stamp);
        }
    }
}

/// Sweeps over touches that are sorted by buffer and start.
fn check_disjoint(pass: &'static str, part_name: &str, touches: &[Touch]) -> Result<()> {
    // Of each kind, the touch that reaches furthest so far.
    let mut furthest: [Option<&Touch>; 3] = [None; 3];
    for touch in touches {
        for seen in furthest.into_iter().flatten() {
            if seen.buffer.number() == touch.buffer.number()
                && seen.range.end > touch.range.start
                && !seen.kind.commutes(touch.kind)
            {
                return Err(Error::Job {
                    pass,
                    problem: format!(
                        "{part_name} {} and {part_name} {} both touch bytes {}..{} of buffer {}, and nothing orders them: \
                         use spans that do not overlap, or two operations",
                        seen.part,
                        touch.part,
                        touch.range.start,
                        touch.range.end.min(seen.range.end),
                        touch.buffer.number()
                    ),
                });
            }
        }
        let slot = match touch.kind {
            Kind::Read => 0,
            Kind::Write => 1,
            Kind::Accumulate => 2,
        };
        if let Some(entry) = furthest.get_mut(slot) {
            let further = entry.is_none_or(|seen| {
                seen.buffer.number() != touch.buffer.number() || seen.range.end < touch.range.end
            });
            if further {
                *entry = Some(touch);
            }
        }
    }
    Ok(())
}

/// Everything that a list of jobs touches. A field that a job both reads and writes counts once, as
/// written; so do source and destination of a division in place.
pub(super) fn of_jobs(jobs: &[Job<Cpu>]) -> Vec<Touch> {
    let mut touches = Vec::new();
    for (part, job) in jobs.iter().enumerate() {
        let writes = job.writes();
        for read in job.reads() {
            let in_place = match job {
                Job::Divide(_) => writes.iter().any(|write| same_bytes(read, write)),
                _ => writes.iter().any(|write| std::ptr::eq(read, *write)),
            };
            if !in_place {
                touches.push(Touch::new(read, Kind::Read, part));
            }
        }
        touches.extend(writes.iter().map(|span| Touch::new(span, Kind::Write, part)));
        touches
            .extend(job.accumulates().iter().map(|span| Touch::new(span, Kind::Accumulate, part)));
    }
    touches
}

/// True if both are the same bytes.
pub(super) fn same_bytes(a: &Span<Cpu>, b: &Span<Cpu>) -> bool {
    Arc::ptr_eq(a.buffer(), b.buffer()) && a.range() == b.range()
}
