//! Look-up of token embeddings, and learned positions.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::operator::{Handle, argument, ordered, result};
use crate::weights::Phase;

/// Rows of a weight by token. Its argument is the anchor: a variable that makes candle record the
/// graph at all, whose value takes no part.
pub(super) struct Embedding {
    pub(super) weight: Handle,
    pub(super) tokens: Vec<u8>,
    pub(super) sequences: usize,
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = self.weight.columns;
        let weight = self.weight.values(Phase::Forward)?;
        let mut y = Vec::with_capacity(self.tokens.len() * width);
        for &token in &self.tokens {
            let start = usize::from(token) * width;
            let row = weight.get(start..start + width).ok_or_else(|| {
                candle_core::Error::Msg(format!(
                    "token {token} lies outside a vocabulary of {}",
                    self.weight.rows
                ))
            })?;
            y.extend_from_slice(row);
        }
        let context = self.tokens.len() / self.sequences.max(1);
        Ok(result(y, (self.sequences, context, width)))
    }

    fn bwd(&self, anchor: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let width = self.weight.columns;
        let mut gradient = vec![0.0; self.weight.rows * width];
        for (&token, dy) in self.tokens.iter().zip(ordered(dy)?.chunks_exact(width)) {
            let start = usize::from(token) * width;
            for (sum, d) in gradient.iter_mut().skip(start).zip(dy) {
                *sum += d;
            }
        }
        self.weight.report(&gradient)?;
        // candle panics on a tracked argument without a gradient.
        anchor.zeros_like().map(Some)
    }
}

/// Adds row t of a weight to position t of every sequence.
pub(super) struct Positions(pub(super) Handle);

impl CustomOp1 for Positions {
    fn name(&self) -> &'static str {
        "positions"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let weight = self.0.values(Phase::Forward)?;
        let x = argument(storage, layout)?;
        let y = x.iter().zip(weight.iter().cycle()).map(|(x, w)| x + w).collect();
        Ok(result(y, layout.shape()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let mut gradient = vec![0.0; self.0.rows * self.0.columns];
        for sequence in ordered(dy)?.chunks_exact(gradient.len()) {
            for (sum, d) in gradient.iter_mut().zip(sequence) {
                *sum += d;
            }
        }
        self.0.report(&gradient)?;
        Ok(Some(dy.clone()))
    }
}
