//! The line between a model and whatever holds its parameters.

use std::sync::{Arc, Mutex};

use anyhow::Result;

/// Which half of a microbatch asks for a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
}

/// A store of weights. A model knows its weights by their place in [`crate::gpt::weights`] and never
/// owns one.
///
/// One store serves one rank; its methods are called from that rank's thread, in program order.
pub trait Weights: Send + Sync + 'static {
    /// The whole weight `id` as f32, row by row. Gathers the weight's unit when it is not resident.
    ///
    /// # Errors
    /// Whatever keeps the store from producing the weight; the sentence reaches the user unchanged.
    fn weight(&self, id: usize, phase: Phase) -> Result<Arc<[f32]>>;

    /// Takes the gradient of weight `id`, whole, row by row, for this rank's microbatch. Called once
    /// for every use of the weight in the forward pass: a tied weight's gradient arrives twice, and
    /// the store adds.
    ///
    /// # Errors
    /// Whatever keeps the store from taking the gradient.
    fn gradient(&self, id: usize, gradient: &[f32]) -> Result<()>;
}

/// Keeps the first error of a weight store while an autograd engine carries only its own error type.
///
/// candle turns an error of an operator into text, and with `RUST_BACKTRACE` set into pages of it. The
/// original waits here until the call into the engine has returned.
#[derive(Debug, Clone, Default)]
pub struct FirstError(Arc<Mutex<Option<anyhow::Error>>>);

impl FirstError {
    /// Keeps `error` unless an earlier one is kept, and returns what the engine carries instead.
    pub fn keep(&self, error: anyhow::Error) -> candle_core::Error {
        // Built directly: the engine's constructors capture a backtrace.
        let carried = candle_core::Error::Msg(format!("{error:#}"));
        let mut kept = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        kept.get_or_insert(error);
        carried
    }

    /// The kept error, or the innermost sentence of the engine's own.
    pub fn explain(&self, engine: candle_core::Error) -> anyhow::Error {
        let mut kept = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        kept.take().unwrap_or_else(|| anyhow::anyhow!("{}", innermost(&engine)))
    }
}

/// Strips the engine's wrapping: backtraces, contexts, paths.
fn innermost(error: &candle_core::Error) -> &candle_core::Error {
    use candle_core::Error as E;
    match error {
        E::WithBacktrace { inner, .. } | E::Context { inner, .. } | E::WithPath { inner, .. } => {
            innermost(inner)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_of_the_store_wins() {
        let first = FirstError::default();
        let carried = first.keep(anyhow::anyhow!("the weight is gone"));
        first.keep(anyhow::anyhow!("a consequence"));
        let shown = first.explain(carried.bt().context("while training"));
        assert_eq!(shown.to_string(), "the weight is gone");
    }

    #[test]
    fn an_error_of_the_engine_loses_its_wrapping() {
        let wrapped = candle_core::Error::Msg("shape mismatch".into()).bt().context("in matmul");
        assert_eq!(FirstError::default().explain(wrapped).to_string(), "shape mismatch");
    }
}
