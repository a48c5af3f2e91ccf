//! The CPU backend: streams are threads, and the order of accesses is proved.
//!
#![doc = include_str!("README.md")]

mod access;
mod backend;
mod buffer;
mod clock;
mod failure;
mod graph;
mod history;
mod lane;
mod operands;
mod passes;
mod plan;
mod stream;
mod tasks;
mod views;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};

use access::{Touch, Touches};
use clock::Clock;
use failure::Failure;
use history::{Operation, Stamp};
use lane::{Step, Work, lock};

pub use access::Access;
pub use buffer::Buffer;
pub use graph::Graph;
pub use plan::Plan;
pub use stream::{Event, Stream};
pub use views::{View, Views, Written};

/// In which order streams get to run what events leave free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Schedule {
    /// As soon as possible.
    #[default]
    InOrder,
    /// With pauses of up to 0.2 ms before each operation, drawn from a generator with this seed:
    /// a second check on the order, for tests.
    Random(u64),
}

/// How a [`Cpu`] is made.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    name: String,
    threads: usize,
    schedule: Schedule,
    dropped: Vec<(String, Option<u64>)>,
}

impl Builder {
    /// The name in errors; `cpu` by default.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Threads that share a large pass, 1 by default. The results do not depend on it.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// The schedule, [`Schedule::InOrder`] by default.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// For tests: the waits with this id (or only the `nth`, from 0) are left out, so that what
    /// they order is refused as [`Error::Unordered`].
    pub fn drop_wait(mut self, id: impl Into<String>, nth: impl Into<Option<u64>>) -> Self {
        self.dropped.push((id.into(), nth.into()));
        self
    }

    /// The backend.
    pub fn build(self) -> Cpu {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Cpu(Arc::new(Core {
            owner: NEXT.fetch_add(1, Ordering::Relaxed),
            options: self,
            buffers: AtomicU64::new(0),
            failure: Arc::new(Failure::default()),
            ledger: Mutex::default(),
            capture: Mutex::default(),
        }))
    }
}

/// The CPU as a device. Clones are the same device; see the module's page for how it works.
#[derive(Clone)]
pub struct Cpu(Arc<Core>);

struct Core {
    owner: u64,
    options: Builder,
    /// Buffers made so far.
    buffers: AtomicU64,
    failure: Arc<Failure>,
    /// Held while an operation is checked, noted and queued, so that all three have one order.
    ledger: Mutex<Ledger>,
    /// The graph that is being captured.
    capture: Mutex<Option<graph::Capture>>,
}

#[derive(Default)]
struct Ledger {
    /// Streams made so far.
    streams: usize,
    /// Operations issued so far.
    operations: u64,
    /// What the host has waited for; every later operation comes after it.
    host: Clock,
    /// Waits by id, in the order of their first use, and how often each was issued.
    waits: Vec<(&'static str, u64)>,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu(`{}`)", self.0.options.name)
    }
}

impl Cpu {
    /// A backend with the defaults.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// A backend with other settings.
    pub fn builder() -> Builder {
        Builder {
            name: "cpu".to_owned(),
            threads: 1,
            schedule: Schedule::default(),
            dropped: Vec::new(),
        }
    }

    /// The ids of all waits that were issued so far, each once, in the order of first use.
    pub fn waits_seen(&self) -> Vec<&'static str> {
        lock(&self.0.ledger).waits.iter().map(|(id, _)| *id).collect()
    }

    /// How many waits with this id were issued so far.
    pub fn wait_count(&self, id: &str) -> u64 {
        let ledger = lock(&self.0.ledger);
        ledger.waits.iter().find(|(seen, _)| *seen == id).map_or(0, |(_, count)| *count)
    }

    /// Issues an operation of another crate's making, such as a collective: `work` runs on the
    /// stream's thread when everything that the operation comes after is over, and reaches the
    /// bytes of `accesses` through [`Views`], by index. What it returns as an error becomes the
    /// backend's failure, a panic too. Other operations on the stream wait while it runs, so it
    /// must not block for longer than the caller can bear.
    ///
    /// `label` names the operation in errors, such as "all-gather of `block.3`".
    ///
    /// # Errors
    /// [`Error::Unordered`] if an access is not ordered after a conflicting one; [`Error::Job`] if
    /// two accesses overlap and one of them writes, a span belongs to another backend, or a graph is
    /// being captured, which could not repeat `work`; what an earlier operation failed with. Nothing is issued then, and `work` is dropped.
    pub fn submit(
        &self,
        on: &Stream,
        label: impl Into<String>,
        accesses: &[Access],
        work: impl FnOnce(
            &mut Views<'_>,
        ) -> std::result::Result<(), Arc<dyn std::error::Error + Send + Sync>>
        + Send
        + 'static,
    ) -> Result<()> {
        if lock(&self.0.capture).is_some() {
            return Err(Error::Job {
                pass: "submit",
                problem: "a captured graph could not repeat it: issue it outside of the capture"
                    .to_owned(),
            });
        }
        let touches = accesses
            .iter()
            .enumerate()
            .map(|(part, access)| Touch::new(access.span(), access.kind(), part));
        let touches = Touches::new(self.0.owner, "submit", "span", touches)?;
        let accesses = accesses.to_vec();
        let work = move || {
            // SAFETY: this operation was admitted with these accesses, opens them once, and
            // `Touches::new` has found them disjoint.
            let mut views = unsafe { Views::open(&accesses) };
            work(&mut views)?;
            views.commit();
            Ok(())
        };
        self.issue(on, label.into().into(), &touches, Box::new(work)).map(drop)
    }

    /// Checks, notes and queues an operation; returns its number on the stream, and itself with all
    /// that it comes after.
    fn issue(
        &self,
        on: &Stream,
        label: Arc<str>,
        touches: &Touches,
        work: Work,
    ) -> Result<(u64, Clock)> {
        self.0.failure.check()?;
        self.own(on.0.owner, "issuing an operation", "stream")?;
        let mut ledger = lock(&self.0.ledger);
        let serial = ledger.operations;
        let operation = Arc::new(Operation { serial, label, stream: Arc::clone(&on.0.name) });
        let mut issued = lock(&on.0.issued);
        issued.clock.join(&ledger.host);
        touches.check(&operation, &issued.clock)?;
        ledger.operations += 1;
        issued.tick += 1;
        let tick = issued.tick;
        let stamp = Stamp { stream: on.0.number, tick, operation: Arc::clone(&operation) };
        touches.note(&issued.clock, &ledger.host, &stamp);
        issued.clock.advance(on.0.number, tick);
        on.0.lane.push(Step::Run(operation, work));
        Ok((tick, issued.clock.clone()))
    }

    /// Blocks until operation `tick` of a stream is over; `clock` then lies behind the host.
    fn reach(&self, progress: &lane::Progress, tick: u64, clock: &Clock) -> Result<()> {
        progress.wait(tick);
        lock(&self.0.ledger).host.join(clock);
        self.0.failure.check()
    }

    /// Refuses handles of another backend: their clocks mean nothing here.
    fn own(&self, owner: u64, what: &str, handle: &str) -> Result<()> {
        if owner == self.0.owner {
            return Ok(());
        }
        Err(Error::Device {
            device: self.0.options.name.clone(),
            what: what.to_owned(),
            reason: format!("the {handle} belongs to another backend: make it on this one"),
        })
    }
}
