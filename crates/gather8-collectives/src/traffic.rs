//! Bytes and operations, counted from what callers pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gather8_kernels::{Backend, Span};

use crate::communicator::{AbortHandle, Communicator, Op, Reduce};
use crate::error::Result;

/// What a communicator was asked to move, by this rank, since it was wrapped. Only operations that
/// were issued count, each once, when it is issued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of all-gather destinations: `world * source` for each part.
    pub gathered_bytes: u64,
    /// Bytes of reduce-scatter sources and of all-reduced spans.
    pub reduced_bytes: u64,
    /// All-gathers, reduce-scatters, all-reduces and broadcasts; a group of parts is one.
    pub operations: u64,
}

#[derive(Debug, Default)]
struct Counters {
    gathered: AtomicU64,
    reduced: AtomicU64,
    operations: AtomicU64,
}

/// A communicator that counts. Communicators split from it count into the same counters.
pub struct Counting<B: Backend> {
    inner: Arc<dyn Communicator<B>>,
    counters: Arc<Counters>,
}

impl<B: Backend> Counting<B> {
    /// Counts what goes through the result, from zero.
    pub fn new(inner: Arc<dyn Communicator<B>>) -> Self {
        Self { inner, counters: Arc::default() }
    }

    /// The counts so far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            gathered_bytes: self.counters.gathered.load(Ordering::Relaxed),
            reduced_bytes: self.counters.reduced.load(Ordering::Relaxed),
            operations: self.counters.operations.load(Ordering::Relaxed),
        }
    }

    fn count(&self, gathered: u64, reduced: u64) {
        self.counters.gathered.fetch_add(gathered, Ordering::Relaxed);
        self.counters.reduced.fetch_add(reduced, Ordering::Relaxed);
        self.counters.operations.fetch_add(1, Ordering::Relaxed);
    }
}

impl<B: Backend> Communicator<B> for Counting<B> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn all_gather(&self, op: Op<'_>, parts: &[(Span<B>, Span<B>)], on: &B::Stream) -> Result<()> {
        self.inner.all_gather(op, parts, on)?;
        self.count(parts.iter().map(|(_, destination)| destination.len()).sum(), 0);
        Ok(())
    }

    fn reduce_scatter(
        &self,
        op: Op<'_>,
        reduce: Reduce,
        parts: &[(Span<B>, Span<B>)],
        on: &B::Stream,
    ) -> Result<()> {
        self.inner.reduce_scatter(op, reduce, parts, on)?;
        self.count(0, parts.iter().map(|(source, _)| source.len()).sum());
        Ok(())
    }

    fn all_reduce(&self, op: Op<'_>, reduce: Reduce, span: &Span<B>, on: &B::Stream) -> Result<()> {
        self.inner.all_reduce(op, reduce, span, on)?;
        self.count(0, span.len());
        Ok(())
    }

    fn broadcast(&self, op: Op<'_>, root: u32, span: &Span<B>, on: &B::Stream) -> Result<()> {
        self.inner.broadcast(op, root, span, on)?;
        self.count(0, 0);
        Ok(())
    }

    fn barrier(&self, op: Op<'_>) -> Result<()> {
        self.inner.barrier(op)
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Arc<dyn Communicator<B>>>> {
        let child = self.inner.split(color, key)?;
        Ok(child.map(|inner| -> Arc<dyn Communicator<B>> {
            Arc::new(Self { inner, counters: Arc::clone(&self.counters) })
        }))
    }

    fn abort_handle(&self) -> AbortHandle {
        self.inner.abort_handle()
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }

    fn exchange(&self, op: Op<'_>, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.inner.exchange(op, message)
    }
}
