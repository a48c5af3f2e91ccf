//! What a weight does before and after its unit is gathered.

use gather8_kernels::{Backend, DType, Format, Job, Span};

use crate::error::Result;

/// One contiguous piece that every rank contributes to a unit's gather.
#[derive(Clone, Debug)]
pub struct Segment<B: Backend> {
    /// This rank's bytes, padding included: as many on every rank.
    pub source: Span<B>,
}

/// Takes the work that must be done on a unit's shards before they are gathered. All jobs of all
/// weights of the unit become one launch.
#[derive(Debug)]
pub struct Gather<B: Backend> {
    jobs: Vec<Job<B>>,
}

impl<B: Backend> Gather<B> {
    pub(crate) fn new() -> Self {
        Self { jobs: Vec::new() }
    }

    /// Adds a job; all jobs of a unit must be of one kind.
    pub fn push(&mut self, job: Job<B>) {
        self.jobs.push(job);
    }

    pub(crate) fn into_jobs(self) -> Vec<Job<B>> {
        self.jobs
    }
}

/// How the elements of a gathered weight are written.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Encoding<B: Backend> {
    /// Float8 codes of one scale. `record` is the
    /// [`BytesRecord`](gather8_kernels::layout::BytesRecord) that was written with the bytes: no
    /// later sync changes it, and the next cast waits for whoever reads it.
    Float8 {
        /// The codes' format.
        format: Format,
        /// The record.
        record: Span<B>,
    },
    /// As stored.
    Stored(DType),
}

/// A whole weight, gathered.
#[derive(Clone, Debug)]
pub struct Unsharded<B: Backend> {
    /// Row-major elements of the whole weight, without padding.
    pub bytes: Span<B>,
    /// How to read them.
    pub encoding: Encoding<B>,
}

/// The pre- and post-all-gather hooks of a weight. Called once when the unit is planned, not in
/// every step: what they describe is replayed.
pub trait AllGatherHooks<B: Backend>: Send + Sync {
    /// What is gathered of this weight.
    fn segments(&self) -> Vec<Segment<B>>;

    /// Describes what makes the segments' bytes from the shard; nothing for weights that are
    /// gathered as stored.
    ///
    /// # Errors
    /// A span that does not exist.
    fn pre_all_gather(&self, gather: &mut Gather<B>) -> Result<()>;

    /// The record that is written with the bytes, equal on every rank; if the weight has one.
    fn record(&self) -> Option<Span<B>>;

    /// Makes the whole weight from its gathered segments (`world` times the source's length each)
    /// and their record.
    ///
    /// # Errors
    /// A gathered part that is too short.
    fn post_all_gather(&self, parts: &[Span<B>], record: Option<Span<B>>) -> Result<Unsharded<B>>;
}
