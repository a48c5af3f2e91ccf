//! Operators without weights that candle would spread over many passes: the causal softmax of
//! attention, and the cross entropy of logits.

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

use super::operator::{argument, ordered, result};

/// Softmax of `scale` x scores over the positions up to each query's own; zero beyond. The last two
/// dimensions of the argument are queries x keys, of one length.
pub(super) struct CausalSoftmax {
    pub(super) scale: f32,
    pub(super) context: usize,
}

/// Turns a row into exp(x - max) and returns the sum.
fn exponentials(row: &mut [f32]) -> f32 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in row {
        *x = (*x - max).exp();
        sum += *x;
    }
    sum
}

impl CustomOp1 for CausalSoftmax {
    fn name(&self) -> &'static str {
        "causal_softmax"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut y = argument(storage, layout)?.to_vec();
        for square in y.chunks_exact_mut(self.context * self.context) {
            for (query, row) in square.chunks_exact_mut(self.context).enumerate() {
                let (seen, beyond) = row.split_at_mut(query + 1);
                beyond.fill(0.0);
                for x in &mut *seen {
                    *x *= self.scale;
                }
                let inverse = 1.0 / exponentials(seen);
                for x in seen {
                    *x *= inverse;
                }
            }
        }
        Ok(result(y, layout.shape()))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let mut dx = ordered(dy)?;
        // dx = scale * y * (dy - sum(y * dy)) over a row; y is zero beyond the query.
        for (d, y) in dx.chunks_exact_mut(self.context).zip(ordered(y)?.chunks_exact(self.context))
        {
            let dot = d.iter().zip(y).map(|(d, y)| d * y).sum::<f32>();
            for (d, y) in d.iter_mut().zip(y) {
                *d = self.scale * y * (*d - dot);
            }
        }
        Tensor::from_vec(dx, x.shape(), &Device::Cpu).map(Some)
    }
}

/// Mean of -ln(softmax(logits)[target]) over all rows of the last dimension, in nats.
pub(super) struct CrossEntropy {
    pub(super) targets: Vec<u8>,
    pub(super) vocabulary: usize,
}

impl CrossEntropy {
    fn logit<'a>(&self, row: &'a mut [f32], target: u8) -> Result<&'a mut f32> {
        row.get_mut(usize::from(target)).ok_or_else(|| {
            candle_core::Error::Msg(format!(
                "target {target} lies outside a vocabulary of {}",
                self.vocabulary
            ))
        })
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut logits = argument(storage, layout)?.to_vec();
        let mut sum = 0.0;
        for (row, &target) in logits.chunks_exact_mut(self.vocabulary).zip(&self.targets) {
            let total = exponentials(row);
            // ln of the quotient of the two exponentials; -ln(0) of a far-off logit is infinite,
            // which is also what the loss is then to f32.
            sum -= f64::from(*self.logit(row, target)? / total).ln();
        }
        Ok(result(vec![(sum / self.targets.len() as f64) as f32], ()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let factor = dy.to_scalar::<f32>()? / self.targets.len() as f32;
        let mut dx = ordered(x)?;
        for (row, &target) in dx.chunks_exact_mut(self.vocabulary).zip(&self.targets) {
            let scale = factor / exponentials(row);
            for p in &mut *row {
                *p *= scale;
            }
            *self.logit(row, target)? -= factor;
        }
        Tensor::from_vec(dx, x.shape(), &Device::Cpu).map(Some)
    }
}
