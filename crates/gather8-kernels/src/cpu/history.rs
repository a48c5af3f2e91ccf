//! Who has touched which bytes of a buffer, and whether a new access comes after all of them.
//!
//! A history is a map of disjoint segments. Each keeps the last write, and the reads and the
//! accumulations since. An access conflicts with what it does not commute with: a read with the
//! write and the accumulations, an accumulation with the write and the reads, a write with all.
//! An access that has been found to come after others makes them superfluous where every later
//! conflict with them is a conflict with it too; those are forgotten, which keeps segments small.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::clock::Clock;

/// An operation, as errors name it.
#[derive(Debug)]
pub(super) struct Operation {
    /// Counts the backend's operations in the order of issue.
    pub(super) serial: u64,
    /// What is done, such as "cast of 7 tensors".
    pub(super) label: Arc<str>,
    /// The stream's name.
    pub(super) stream: Arc<str>,
}

/// An operation that has been issued: number `tick` of stream `stream`.
#[derive(Clone, Debug)]
pub(super) struct Stamp {
    pub(super) stream: usize,
    pub(super) tick: u64,
    pub(super) operation: Arc<Operation>,
}

impl Stamp {
    fn is_before(&self, clock: &Clock) -> bool {
        clock.covers(self.stream, self.tick)
    }
}

/// How bytes are touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Read only.
    Read,
    /// Written, or read and written.
    Write,
    /// Updated by atomic MAX or addition of whole words.
    Accumulate,
}

impl Kind {
    /// True if two operations may do this to the same bytes in either order, or at once.
    pub(super) fn commutes(self, other: Self) -> bool {
        self == other && self != Self::Write
    }
}

#[derive(Clone, Debug)]
struct Segment {
    end: u64,
    write: Option<Stamp>,
    reads: Vec<Stamp>,
    accumulations: Vec<Stamp>,
}

impl Segment {
    fn untouched(end: u64) -> Self {
        Self { end, write: None, reads: Vec::new(), accumulations: Vec::new() }
    }

    /// What an access of this kind conflicts with.
    fn opponents(&self, kind: Kind) -> impl Iterator<Item = &Stamp> {
        let reads = if kind == Kind::Read { &[][..] } else { &self.reads };
        let accumulations = if kind == Kind::Accumulate { &[][..] } else { &self.accumulations };
        self.write.iter().chain(reads).chain(accumulations)
    }

    fn note(&mut self, kind: Kind, clock: &Clock, stamp: &Stamp) {
        match kind {
            Kind::Write => {
                self.reads.clear();
                self.accumulations.clear();
                self.write = Some(stamp.clone());
            }
            // What comes after this read comes after every read that this one comes after.
            Kind::Read => {
                self.reads.retain(|read| !read.is_before(clock));
                self.reads.push(stamp.clone());
            }
            // The reads stay, although all of them come before this accumulation: the next one need
            // not come after this one, but must come after them.
            Kind::Accumulate => {
                self.accumulations.retain(|other| !other.is_before(clock));
                self.accumulations.push(stamp.clone());
            }
        }
    }

    /// Forgets what the host has waited for: every later operation comes after it.
    fn forget(&mut self, host: &Clock) -> bool {
        self.reads.retain(|stamp| !stamp.is_before(host));
        self.accumulations.retain(|stamp| !stamp.is_before(host));
        if self.write.as_ref().is_some_and(|stamp| stamp.is_before(host)) {
            self.write = None;
        }
        self.write.is_some() || !self.reads.is_empty() || !self.accumulations.is_empty()
    }
}

/// An earlier access that a new one is not ordered after, and the bytes that both touch.
#[derive(Debug)]
pub(super) struct Conflict {
    pub(super) first: Arc<Operation>,
    pub(super) range: Range<u64>,
}

/// The accesses to one buffer.
#[derive(Debug, Default)]
pub(super) struct History {
    /// By first byte; disjoint, none empty. Bytes in no segment are untouched.
    segments: BTreeMap<u64, Segment>,
    /// Segments at which the next clean-up happens.
    clean_at: usize,
}

impl History {
    const CLEAN_AT_LEAST: usize = 256;

    /// A conflict of an access whose operation comes after `clock`: the one with the operation that
    /// was issued last, since a forgotten wait leaves all that came before it unordered too.
    pub(super) fn conflict(
        &self,
        range: &Range<u64>,
        kind: Kind,
        clock: &Clock,
    ) -> Option<Conflict> {
        let before = match self.segments.get(&range.start) {
            Some(_) => None,
            None => self.segments.range(..range.start).next_back(),
        };
        before
            .into_iter()
            .chain(self.segments.range(range.start..range.end))
            .filter(|(_, segment)| segment.end > range.start)
            .flat_map(|(&start, segment)| {
                segment.opponents(kind).map(move |stamp| (start, segment.end, stamp))
            })
            .filter(|(_, _, stamp)| !stamp.is_before(clock))
            .max_by_key(|(start, _, stamp)| (stamp.operation.serial, Reverse(*start)))
            .map(|(start, end, stamp)| Conflict {
                first: Arc::clone(&stamp.operation),
                range: start.max(range.start)..end.min(range.end),
            })
    }

    /// Keeps an access that has no conflict. `clock` is what its operation comes after, `host` what
    /// the host has waited for.
    pub(super) fn note(
        &mut self,
        range: &Range<u64>,
        kind: Kind,
        clock: &Clock,
        host: &Clock,
        stamp: &Stamp,
    ) {
        // The same spans come again in every step.
        if let Some(segment) = self.segments.get_mut(&range.start)
            && segment.end == range.end
        {
            segment.note(kind, clock, stamp);
            return;
        }
        self.split(range.start);
        self.split(range.end);
        if kind == Kind::Write {
            let covered: Vec<u64> =
                self.segments.range(range.start..range.end).map(|(&start, _)| start).collect();
            for start in covered {
                self.segments.remove(&start);
            }
            let mut segment = Segment::untouched(range.end);
            segment.note(kind, clock, stamp);
            self.segments.insert(range.start, segment);
        } else {
            let mut at = range.start;
            let mut gaps = Vec::new();
            for (&start, segment) in self.segments.range_mut(range.start..range.end) {
                if at < start {
                    gaps.push(at..start);
                }
                segment.note(kind, clock, stamp);
                at = segment.end;
            }
            if at < range.end {
                gaps.push(at..range.end);
            }
            for gap in gaps {
                let mut segment = Segment::untouched(gap.end);
                segment.note(kind, clock, stamp);
                self.segments.insert(gap.start, segment);
            }
        }
        if self.segments.len() > self.clean_at.max(Self::CLEAN_AT_LEAST) {
            self.segments.retain(|_, segment| segment.forget(host));
            self.clean_at = 2 * self.segments.len();
        }
    }

    /// Makes `at` a boundary of segments.
    fn split(&mut self, at: u64) {
        if let Some((_, segment)) = self.segments.range_mut(..at).next_back()
            && segment.end > at
        {
            let tail = segment.clone();
            segment.end = at;
            self.segments.insert(at, tail);
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.segments.len()
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, History, Kind, Operation, Stamp};
    use std::sync::Arc;

    fn stamp(stream: usize, tick: u64) -> Stamp {
        let operation = Operation {
            serial: 100 * tick + stream as u64,
            label: Arc::from(format!("{stream}.{tick}")),
            stream: Arc::from(stream.to_string()),
        };
        Stamp { stream, tick, operation: Arc::new(operation) }
    }

    fn clock(ticks: &[u64]) -> Clock {
        let mut clock = Clock::default();
        for (stream, &tick) in ticks.iter().enumerate() {
            clock.advance(stream, tick);
        }
        clock
    }

    fn first(history: &History, range: std::ops::Range<u64>, kind: Kind, c: &Clock) -> String {
        history.conflict(&range, kind, c).map_or_else(String::new, |conflict| {
            format!("{}@{:?}", conflict.first.label, conflict.range)
        })
    }

    #[test]
    fn a_write_in_the_middle_is_found_from_all_sides() {
        let none = Clock::default();
        let mut history = History::default();
        history.note(&(10..20), Kind::Write, &none, &none, &stamp(0, 1));
        for kind in [Kind::Read, Kind::Write, Kind::Accumulate] {
            assert_eq!(first(&history, 0..10, kind, &none), "");
            assert_eq!(first(&history, 20..30, kind, &none), "");
            assert_eq!(first(&history, 0..11, kind, &none), "0.1@10..11");
            assert_eq!(first(&history, 19..30, kind, &none), "0.1@19..20");
            assert_eq!(first(&history, 12..13, kind, &none), "0.1@12..13");
            assert_eq!(first(&history, 0..90, kind, &none), "0.1@10..20");
            assert_eq!(first(&history, 0..90, kind, &clock(&[1])), "");
        }
    }

    #[test]
    fn reads_commute_and_both_hold_back_a_write() {
        let none = Clock::default();
        let mut history = History::default();
        history.note(&(0..8), Kind::Read, &none, &none, &stamp(0, 1));
        assert_eq!(first(&history, 4..12, Kind::Read, &none), "");
        history.note(&(4..12), Kind::Read, &none, &none, &stamp(1, 1));
        assert_eq!(history.len(), 3);
        assert_eq!(first(&history, 0..12, Kind::Write, &clock(&[1, 0])), "1.1@4..8");
        assert_eq!(first(&history, 0..12, Kind::Write, &clock(&[0, 1])), "0.1@0..4");
        assert_eq!(first(&history, 0..12, Kind::Write, &clock(&[1, 1])), "");
        history.note(&(0..12), Kind::Write, &clock(&[1, 1]), &none, &stamp(2, 1));
        assert_eq!(history.len(), 1, "a write replaces what it covers");
    }

    #[test]
    fn accumulations_commute_but_not_with_reads() {
        let none = Clock::default();
        let mut history = History::default();
        history.note(&(0..4), Kind::Accumulate, &none, &none, &stamp(0, 1));
        assert_eq!(first(&history, 0..4, Kind::Accumulate, &none), "");
        history.note(&(0..4), Kind::Accumulate, &none, &none, &stamp(1, 1));
        assert_eq!(first(&history, 0..4, Kind::Read, &clock(&[1])), "1.1@0..4");
        history.note(&(0..4), Kind::Read, &clock(&[1, 1]), &none, &stamp(2, 1));
        assert_eq!(first(&history, 0..4, Kind::Accumulate, &clock(&[1, 1])), "2.1@0..4");
        history.note(&(0..4), Kind::Accumulate, &clock(&[1, 1, 1]), &none, &stamp(3, 1));
        assert_eq!(first(&history, 0..4, Kind::Accumulate, &clock(&[1, 1])), "2.1@0..4");
        assert_eq!(first(&history, 0..4, Kind::Write, &clock(&[1, 1, 1])), "3.1@0..4");
    }

    #[test]
    fn a_later_read_of_a_stream_replaces_its_earlier_one() {
        let none = Clock::default();
        let mut history = History::default();
        for tick in 1..100 {
            history.note(&(0..4), Kind::Read, &clock(&[tick - 1]), &none, &stamp(0, tick));
        }
        assert_eq!(history.segments[&0].reads.len(), 1);
        assert_eq!(first(&history, 0..4, Kind::Write, &clock(&[98])), "0.99@0..4");
    }

    #[test]
    fn what_the_host_has_waited_for_is_forgotten() {
        let mut history = History::default();
        for tick in 1..10_000_u64 {
            let c = clock(&[tick - 1]);
            history.note(&(tick * 8..tick * 8 + 3), Kind::Read, &c, &c, &stamp(0, tick));
        }
        assert!(history.len() <= 2 * History::CLEAN_AT_LEAST, "{}", history.len());
        assert_eq!(
            first(&history, 0..100_000, Kind::Write, &clock(&[9998])),
            "0.9999@79992..79995"
        );
    }
}
