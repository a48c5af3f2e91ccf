//! A small GPT on candle whose parameters all live in a weight store.
//!
//! Blocks of pre-norm attention and a squared-ReLU multilayer perceptron, learned positions, and a
//! head that shares its weight with the token embedding. Every operator that has a weight asks the
//! store for it in its forward pass, asks again in its backward pass, and reports the gradient there;
//! candle keeps activations and order only.

mod embedding;
mod layer_norm;
mod linear;
mod model;
mod operator;
mod softmax;
#[cfg(test)]
mod tests;

pub use model::Gpt;

use crate::random::Stream;

/// Sizes of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Different tokens.
    pub vocabulary: usize,
    /// Tokens of one sequence.
    pub context: usize,
    /// Values per token between blocks.
    pub width: usize,
    /// Attention heads; they divide the width.
    pub heads: usize,
    /// Blocks.
    pub layers: usize,
}

/// What a weight is before training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
    /// Uniform with mean 0 and this standard deviation.
    Uniform(f64),
}

/// A weight of the model, described without any runtime.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightSpec {
    /// Unique name.
    pub name: String,
    /// Rows first; a linear weight is outputs x inputs.
    pub shape: Vec<usize>,
    /// The unit that is gathered with it: 0 is the root, which stays gathered for a microbatch;
    /// block `i` is unit `i + 1`.
    pub unit: usize,
    /// Whether it is gathered in float8; otherwise in BF16.
    pub float8: bool,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Its values before training.
    pub init: Init,
}

impl WeightSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The initial values of a range of elements, by seed and name alone.
    pub fn values(&self, seed: u64, elements: std::ops::Range<usize>) -> Vec<f32> {
        let stream = Stream::new(seed, &self.name);
        let value = |element: usize| match self.init {
            Init::Ones => 1.0,
            Init::Zeros => 0.0,
            Init::Uniform(deviation) => stream.uniform(element as u64, deviation),
        };
        elements.map(value).collect()
    }
}

/// Where weights stand in [`weights`]: the root first, then `PER_BLOCK` of every block.
mod place {
    pub(super) const TOKENS: usize = 0;
    pub(super) const POSITIONS: usize = 1;
    pub(super) const FINAL_NORM: usize = 2;
    pub(super) const BLOCKS: usize = 4;

    pub(super) const ATTENTION_NORM: usize = 0;
    pub(super) const QUERY_KEY_VALUE: usize = 2;
    pub(super) const PROJECTION: usize = 3;
    pub(super) const PERCEPTRON_NORM: usize = 4;
    pub(super) const UP: usize = 6;
    pub(super) const DOWN: usize = 7;
    pub(super) const PER_BLOCK: usize = 8;
}

/// Every weight of the model in the order of its ids. A norm's bias follows its weight.
pub fn weights(shape: &Shape) -> Vec<WeightSpec> {
    let Shape { vocabulary, context, width, layers, .. } = *shape;
    let plain = |name: String, shape: Vec<usize>, unit, init| WeightSpec {
        name,
        shape,
        unit,
        float8: false,
        decay: false,
        init,
    };
    let norm = |name: String, unit| {
        [
            plain(format!("{name}.weight"), vec![width], unit, Init::Ones),
            plain(format!("{name}.bias"), vec![width], unit, Init::Zeros),
        ]
    };
    let linear = |name: String, rows, columns, unit, gain: f64| WeightSpec {
        name,
        shape: vec![rows, columns],
        unit,
        float8: true,
        decay: true,
        init: Init::Uniform(gain / (columns as f64).sqrt()),
    };
    // Outputs that are added to the residual stream start smaller by the number of additions (GPT-2).
    let residual = 1.0 / (2.0 * layers as f64).sqrt();

    let mut all = vec![
        plain("tokens.weight".into(), vec![vocabulary, width], 0, Init::Uniform(0.05)),
        plain("positions.weight".into(), vec![context, width], 0, Init::Uniform(0.02)),
    ];
    all.extend(norm("final_norm".into(), 0));
    for block in 0..layers {
        let unit = block + 1;
        let name = |part: &str| format!("blocks.{block}.{part}");
        all.extend(norm(name("attention_norm"), unit));
        all.push(linear(name("query_key_value.weight"), 3 * width, width, unit, 1.0));
        all.push(linear(name("projection.weight"), width, width, unit, residual));
        all.extend(norm(name("perceptron_norm"), unit));
        all.push(linear(name("up.weight"), 4 * width, width, unit, 1.0));
        all.push(linear(name("down.weight"), width, 4 * width, unit, residual));
    }
    all
}
