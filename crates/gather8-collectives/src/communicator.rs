//! The trait that every way of moving bytes between ranks implements.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gather8_kernels::{Backend, Span};

use crate::error::Result;

/// One collective operation as its caller names it. Every rank of a communicator issues the same
/// operations in the same order.
#[derive(Clone, Copy, Debug)]
pub struct Op<'a> {
    /// Counts the operations of this communicator, from 0; the same on every rank.
    pub sequence: u64,
    /// What is done, such as `all-gather`.
    pub name: &'a str,
    /// The unit or table that it is done for.
    pub unit: &'a str,
    /// How long the peers may keep this rank waiting, from the moment at which its own stream
    /// reaches the operation.
    pub deadline: Duration,
}

/// How an all-reduce or reduce-scatter combines elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduce {
    /// Unsigned 32-bit MAX: amax words.
    MaxU32,
    /// f32 SUM. In rank order on Local, Tcp and Mpi.
    SumF32,
    /// BF16 SUM: added in f32 in rank order and rounded once (nearest even) on Local, Tcp and Mpi.
    SumBf16,
    /// f64 SUM: the gradient norm.
    SumF64,
}

impl Reduce {
    /// Bytes per element.
    pub const fn size(self) -> u64 {
        match self {
            Self::SumBf16 => 2,
            Self::MaxU32 | Self::SumF32 => 4,
            Self::SumF64 => 8,
        }
    }
}

/// A group of ranks that issue collectives together.
///
/// Issuing returns at once; the bytes have moved when the stream has passed the operation. Lengths
/// are checked against each other before anything is issued. An operation that fails later (a lost
/// peer, a missed deadline) poisons the communicator: every later call returns the first error.
///
/// Calls on one communicator come from one thread at a time, in an order that is the same on every
/// rank.
pub trait Communicator<B: Backend>: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> u32;

    /// Ranks in the group.
    fn world(&self) -> u32;

    /// Gathers every part: rank r's `source` lands at `r * source.len()` of each rank's
    /// destination. A part is `(source, destination)` with `destination.len() == world *
    /// source.len()`; the source may lie inside the destination at its own place. All parts move
    /// as one group.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if a part's lengths do not fit; the communicator's
    /// first failure.
    fn all_gather(&self, op: Op<'_>, parts: &[(Span<B>, Span<B>)], on: &B::Stream) -> Result<()>;

    /// Reduces every part and leaves rank r with the r-th of `world` equal pieces: `source.len() ==
    /// world * destination.len()`. All parts move as one group.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    fn reduce_scatter(
        &self,
        op: Op<'_>,
        reduce: Reduce,
        parts: &[(Span<B>, Span<B>)],
        on: &B::Stream,
    ) -> Result<()>;

    /// Reduces a span in place.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if the span is no whole number of elements; the
    /// communicator's first failure.
    fn all_reduce(&self, op: Op<'_>, reduce: Reduce, span: &Span<B>, on: &B::Stream) -> Result<()>;

    /// Copies `root`'s bytes to every rank's span.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); also if `root` is no rank of the group.
    fn broadcast(&self, op: Op<'_>, root: u32, span: &Span<B>, on: &B::Stream) -> Result<()>;

    /// Returns when every rank's host has called it.
    ///
    /// # Errors
    /// The communicator's first failure.
    fn barrier(&self, op: Op<'_>) -> Result<()>;

    /// A new communicator of the ranks that pass the same colour, ordered by `key`, then by rank;
    /// `None` for a rank that passes none. Every rank of this communicator calls it.
    ///
    /// # Errors
    /// The communicator's first failure; a missed deadline.
    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Arc<dyn Communicator<B>>>>;

    /// A handle by which any thread can end what is in flight.
    fn abort_handle(&self) -> AbortHandle;

    /// Fails if an operation has failed; never waits.
    ///
    /// # Errors
    /// That operation's error.
    fn check(&self) -> Result<()>;

    /// Exchanges small host messages: what each rank passed, in rank order. For start-up agreement
    /// and for finding the first difference after the fact; not for the step.
    ///
    /// # Errors
    /// The communicator's first failure; a missed deadline.
    fn exchange(&self, op: Op<'_>, message: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// Ends what a communicator has in flight, from any thread; every operation then fails on this
/// rank, and the peers learn of it.
#[derive(Clone)]
pub struct AbortHandle(Arc<dyn Fn(&str) + Send + Sync>);

impl AbortHandle {
    /// Wraps what an implementation does on abort; it must be safe to call more than once.
    pub fn new(abort: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(abort))
    }

    /// Aborts; the reason appears in the errors.
    pub fn abort(&self, reason: &str) {
        (self.0)(reason);
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbortHandle")
    }
}
