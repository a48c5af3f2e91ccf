//! What a training loop asks of the runtime around its weights.

use anyhow::Result;

/// One step, as the runtime saw it; equal on every rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepStats {
    /// Euclidean norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// Bytes that all-gathers delivered to each rank: world x padded shard, added up.
    pub gathered_bytes: u64,
    /// Bytes that each rank put into reduce-scatters.
    pub reduced_bytes: u64,
    /// The largest absolute value of any float8 weight.
    pub amax_max: f64,
    /// Weights that the cast to float8 clamped.
    pub saturated: u64,
}

/// The runtime's side of a training loop; one per rank.
pub trait Driver: Send {
    /// Starts microbatch `index` of `count` of a step.
    ///
    /// # Errors
    /// Whatever the runtime refuses.
    fn begin_microbatch(&mut self, index: usize, count: usize) -> Result<()>;

    /// Ends a microbatch: every weight gradient has been reported.
    ///
    /// # Errors
    /// A gradient that is missing, or whatever the runtime refuses.
    fn finish_backward(&mut self) -> Result<()>;

    /// The mean of `value` over all ranks, and whether any of them wants to stop.
    ///
    /// # Errors
    /// A rank that is gone.
    fn agree(&mut self, value: f64, stop: bool) -> Result<(f64, bool)>;

    /// Clips the gradient, updates the weights with this learning rate, and makes them ready for the
    /// next step.
    ///
    /// # Errors
    /// Whatever the runtime refuses.
    fn step(&mut self, learning_rate: f64) -> Result<StepStats>;
}
