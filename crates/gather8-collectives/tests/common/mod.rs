//! Ranks as threads, for the tests of this crate.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gather8_collectives::{Communicator, LocalWorld, Op};
use gather8_kernels::cpu::Cpu;
use gather8_kernels::{Backend, Memory, Span};

pub(crate) type Comm = Arc<dyn Communicator<Cpu>>;
pub(crate) type Stream = <Cpu as Backend>::Stream;

/// What a rank of a test has.
pub(crate) struct Rank {
    pub(crate) rank: u32,
    pub(crate) comm: Comm,
    pub(crate) cpu: Cpu,
    pub(crate) stream: Stream,
}

impl Rank {
    pub(crate) fn new(world: &LocalWorld, rank: u32) -> Self {
        let cpu = Cpu::builder().name(format!("rank {rank}")).build();
        let comm = world.rank(rank, cpu.clone()).unwrap();
        let stream = cpu.stream("main").unwrap();
        Self { rank, comm, cpu, stream }
    }

    pub(crate) fn zeros(&self, bytes: u64) -> Span<Cpu> {
        Span::whole(&self.cpu.alloc(bytes, Memory::Device).unwrap())
    }

    pub(crate) fn span_of(&self, bytes: &[u8]) -> Span<Cpu> {
        let span = self.zeros(bytes.len() as u64);
        self.cpu.upload(&self.stream, bytes, &span).unwrap();
        span
    }

    pub(crate) fn bytes(&self, span: &Span<Cpu>) -> Result<Vec<u8>, gather8_collectives::Error> {
        let mut bytes = vec![0; span.len() as usize];
        self.cpu
            .download(&self.stream, span, &mut bytes)
            .map_err(gather8_collectives::Error::from_backend)?;
        Ok(bytes)
    }
}

/// Runs every rank of a world on a thread of its own; what each returned, or `None` if it panicked.
pub(crate) fn on_ranks<T: Send>(world: u32, body: impl Fn(Rank) -> T + Sync) -> Vec<Option<T>> {
    let local = LocalWorld::new(world);
    thread::scope(|scope| {
        let ranks = (0..world)
            .map(|rank| {
                let rank = Rank::new(&local, rank);
                scope.spawn(|| body(rank))
            })
            .collect::<Vec<_>>();
        ranks.into_iter().map(|rank| rank.join().ok()).collect()
    })
}

/// An operation with a deadline that a healthy test never reaches.
pub(crate) fn op(sequence: u64, name: &'static str) -> Op<'static> {
    within(sequence, name, Duration::from_secs(60))
}

pub(crate) fn within(sequence: u64, name: &'static str, deadline: Duration) -> Op<'static> {
    Op { sequence, name, unit: "block.0", deadline }
}
