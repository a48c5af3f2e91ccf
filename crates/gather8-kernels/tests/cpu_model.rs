//! The order checker against a model that remembers everything: every access that was ever made,
//! and for every operation the full set of operations that come before it.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod cpu_support;

use std::collections::BTreeSet;
use std::ops::Range;

use cpu_support::{Random, device, tensor};
use gather8_kernels::backend::{Backend, Memory, Span};
use gather8_kernels::cpu::{Access, Cpu, Event, Stream};
use gather8_kernels::job::Amax;
use gather8_kernels::{DType, Error, Job};

const STREAMS: usize = 4;
const BYTES: u64 = 48;
const STEPS: usize = 400;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Read,
    Write,
    Accumulate,
}

struct Made {
    label: String,
    kind: Kind,
    range: Range<u64>,
}

/// Sets of operations, by their number in `made`.
type Set = BTreeSet<usize>;

#[derive(Default)]
struct Model {
    made: Vec<Made>,
    host: Set,
    before: [Set; STREAMS],
}

impl Model {
    /// Every operation that an access by this stream would race with.
    fn opponents(&self, stream: usize, kind: Kind, range: &Range<u64>) -> Vec<&str> {
        let is_before = |i: &usize| self.before[stream].contains(i) || self.host.contains(i);
        self.made
            .iter()
            .enumerate()
            .filter(|(i, made)| {
                let commutes = made.kind == kind && kind != Kind::Write;
                let overlaps = made.range.start < range.end && range.start < made.range.end;
                overlaps && !commutes && !is_before(i)
            })
            .map(|(_, made)| made.label.as_str())
            .collect()
    }
}

struct World {
    cpu: Cpu,
    streams: Vec<Stream>,
    shared: Span<Cpu>,
    empty: Span<Cpu>,
}

impl World {
    fn access(
        &self,
        stream: usize,
        kind: Kind,
        range: &Range<u64>,
        label: &str,
    ) -> gather8_kernels::Result<()> {
        let (on, span) = (&self.streams[stream], self.shared.sub(range.clone()).unwrap());
        match kind {
            Kind::Read => self.cpu.submit(on, label, &[Access::Read(span)], |_| Ok(())),
            Kind::Write => self.cpu.submit(on, label, &[Access::Write(span)], |_| Ok(())),
            Kind::Accumulate => {
                let src = tensor(&self.empty, DType::F32);
                self.cpu.run(on, &self.cpu.plan(&[Job::Amax(Amax { src, slot: span })])?)
            }
        }
    }
}

/// How many accesses were let through and how many refused.
fn play(seed: u64, memory: Memory) -> (usize, usize) {
    let cpu = Cpu::new();
    let world = World {
        streams: (0..STREAMS).map(|i| cpu.stream(&format!("s{i}")).unwrap()).collect(),
        shared: Span::whole(&cpu.alloc(BYTES, memory).unwrap()),
        empty: device(&cpu, 0),
        cpu,
    };
    let mut random = Random(seed);
    let mut below = |n: u64| random.next() % n;
    let mut model = Model::default();
    let mut events: Vec<(Event, Set)> = Vec::new();
    let (mut through, mut refused) = (0, 0);
    for step in 0..STEPS {
        let stream = below(STREAMS as u64) as usize;
        match below(20) {
            0..=9 => {
                let kind = [Kind::Read, Kind::Write, Kind::Accumulate][below(3) as usize];
                let range = match kind {
                    Kind::Accumulate => {
                        let word = below(BYTES / 4) * 4;
                        word..word + 4
                    }
                    _ => {
                        let start = below(BYTES);
                        start..start + 1 + below((BYTES - start).min(12))
                    }
                };
                let label = match kind {
                    // The name of a pass is not ours to choose.
                    Kind::Accumulate => "amax of 1 tensor".to_owned(),
                    _ => format!("{kind:?} {step}"),
                };
                // Host memory is checked in whole words.
                let checked = match memory {
                    Memory::Device => range.clone(),
                    Memory::Host => range.start & !3..range.end.next_multiple_of(4),
                };
                let opponents = model.opponents(stream, kind, &checked);
                match world.access(stream, kind, &range, &label) {
                    Ok(()) => {
                        assert!(opponents.is_empty(), "seed {seed}, step {step}: {opponents:?}");
                        let own = model.made.len();
                        model.made.push(Made { label, kind, range: checked });
                        model.before[stream].insert(own);
                        through += 1;
                    }
                    Err(Error::Unordered { first, second, .. }) => {
                        assert!(
                            opponents.contains(&first.as_str()),
                            "seed {seed}, step {step}: {first} is none of {opponents:?}"
                        );
                        assert_eq!(second, label);
                        refused += 1;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            10..=13 => {
                let event = world.cpu.record(&world.streams[stream]).unwrap();
                events.push((event, &model.before[stream] | &model.host));
            }
            14..=18 => {
                // Recent events order more.
                if let Some(back) = events.len().checked_sub(1 + below(6) as usize) {
                    let (event, set) = &events[back];
                    world.cpu.wait(&world.streams[stream], event, "w").unwrap();
                    model.before[stream].extend(set);
                }
            }
            _ => {
                if below(4) == 0 {
                    world.cpu.synchronize(&world.streams[stream]).unwrap();
                    let set = model.before[stream].clone();
                    model.host.extend(set);
                }
            }
        }
    }
    world.cpu.check().unwrap();
    (through, refused)
}

#[test]
#[cfg_attr(miri, ignore = "long, and its operations touch no memory")]
fn the_checker_refuses_exactly_what_the_model_does() {
    let (mut through, mut refused) = (0, 0);
    for seed in 0..150 {
        let (t, r) = play(seed, [Memory::Device, Memory::Host][seed as usize % 2]);
        through += t;
        refused += r;
    }
    // Both happen often enough to mean something.
    assert!(through > 2000 && refused > 2000, "{through} through, {refused} refused");
}
