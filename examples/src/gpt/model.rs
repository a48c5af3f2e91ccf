//! The model: operators in order, and a microbatch through them and back.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};

use super::embedding::{Embedding, Positions};
use super::layer_norm::LayerNorm;
use super::linear::Linear;
use super::operator::Handle;
use super::softmax::{CausalSoftmax, CrossEntropy};
use super::{Shape, WeightSpec, place, weights};
use crate::text::Batch;
use crate::weights::{FirstError, Weights};

/// A GPT over a weight store that holds [`weights`] of its shape.
pub struct Gpt {
    shape: Shape,
    specs: Vec<WeightSpec>,
    store: Arc<dyn Weights>,
    first_error: FirstError,
}

impl Gpt {
    /// A model of this shape over `store`.
    ///
    /// # Errors
    /// A width that the heads do not divide.
    pub fn new(shape: Shape, store: Arc<dyn Weights>) -> Result<Self> {
        if shape.heads == 0 || !shape.width.is_multiple_of(shape.heads) {
            anyhow::bail!("{} heads do not divide a width of {}", shape.heads, shape.width);
        }
        Ok(Self { shape, specs: weights(&shape), store, first_error: FirstError::default() })
    }

    /// Mean loss of a microbatch in nats per token; reports the gradient of `factor` x that loss for
    /// every weight.
    ///
    /// # Errors
    /// The store's first error, in its own words; a batch of another context than the model's.
    pub fn train(&self, batch: &Batch, factor: f64) -> Result<f64> {
        let span = tracing::debug_span!("forward").entered();
        let loss = self.loss(batch).map_err(|error| self.first_error.explain(error))?;
        let value = loss.to_scalar::<f32>().map_err(|error| self.first_error.explain(error))?;
        drop(span);
        let _span = tracing::debug_span!("backward").entered();
        let scaled = loss.affine(factor, 0.0);
        scaled.and_then(|loss| loss.backward()).map_err(|error| self.first_error.explain(error))?;
        Ok(f64::from(value))
    }

    fn handle(&self, id: usize) -> Handle {
        let shape = self.specs.get(id).map_or(&[] as &[usize], |spec| &spec.shape);
        let rows = shape.first().copied().unwrap_or(0);
        Handle {
            store: self.store.clone(),
            first_error: self.first_error.clone(),
            id,
            rows,
            columns: shape.iter().skip(1).product(),
        }
    }

    fn norm(&self, x: &Tensor, id: usize) -> candle_core::Result<Tensor> {
        let norm = LayerNorm { weight: self.handle(id), bias: self.handle(id + 1) };
        x.contiguous()?.apply_op1(norm)
    }

    fn linear(&self, x: &Tensor, id: usize) -> candle_core::Result<Tensor> {
        x.contiguous()?.apply_op1(Linear(self.handle(id)))
    }

    fn loss(&self, batch: &Batch) -> candle_core::Result<Tensor> {
        let Shape { vocabulary, context, layers, .. } = self.shape;
        let tokens = batch.sequences * context;
        if tokens == 0 || batch.tokens.len() != tokens || batch.targets.len() != tokens {
            return Err(candle_core::Error::Msg(format!(
                "a batch of {} sequences of {context} has {} tokens and {} targets",
                batch.sequences,
                batch.tokens.len(),
                batch.targets.len()
            )));
        }
        // Without a variable candle records no graph and `backward` calls no operator.
        let anchor = Var::zeros((), DType::F32, &Device::Cpu)?;
        let mut x = anchor.as_tensor().apply_op1(Embedding {
            weight: self.handle(place::TOKENS),
            tokens: batch.tokens.clone(),
            sequences: batch.sequences,
        })?;
        x = x.apply_op1(Positions(self.handle(place::POSITIONS)))?;
        for block in 0..layers {
            let first = place::BLOCKS + block * place::PER_BLOCK;
            x = (&x + self.attention(&x, first)?)?;
            x = (&x + self.perceptron(&x, first)?)?;
        }
        let x = self.norm(&x, place::FINAL_NORM)?;
        let logits = self.linear(&x, place::TOKENS)?;
        logits.apply_op1(CrossEntropy { targets: batch.targets.clone(), vocabulary })
    }

    /// Causal attention of several heads (Vaswani et al., 2017).
    fn attention(&self, x: &Tensor, first: usize) -> candle_core::Result<Tensor> {
        let (sequences, context, width) = x.dims3()?;
        let heads = self.shape.heads;
        let depth = width / heads;
        let x = self.norm(x, first + place::ATTENTION_NORM)?;
        let x = self.linear(&x, first + place::QUERY_KEY_VALUE)?;
        let x = x.reshape((sequences, context, 3, heads, depth))?;
        // Each: sequences, heads, context, depth.
        let part = |index| x.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let (query, key, value) = (part(0)?, part(1)?, part(2)?);
        let scores = query.matmul(&key.t()?)?;
        let softmax = CausalSoftmax { scale: 1.0 / (depth as f32).sqrt(), context };
        let mixed = scores.apply_op1(softmax)?.matmul(&value)?;
        let mixed = mixed.transpose(1, 2)?.reshape((sequences, context, width))?;
        self.linear(&mixed, first + place::PROJECTION)
    }

    /// Two linear layers around a squared ReLU (So et al., 2021: Primer).
    fn perceptron(&self, x: &Tensor, first: usize) -> candle_core::Result<Tensor> {
        let x = self.norm(x, first + place::PERCEPTRON_NORM)?;
        let x = self.linear(&x, first + place::UP)?.relu()?.sqr()?;
        self.linear(&x, first + place::DOWN)
    }
}
