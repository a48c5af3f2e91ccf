//! Layer normalisation with weight and bias (Ba, Kiros and Hinton, 2016).

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

use super::operator::{Handle, argument, ordered, result};
use crate::weights::Phase;

/// Added to the variance.
const EPSILON: f32 = 1e-5;

/// y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension.
pub(super) struct LayerNorm {
    pub(super) weight: Handle,
    pub(super) bias: Handle,
}

/// Mean and 1 / standard deviation of a row.
fn moments(row: &[f32]) -> (f32, f32) {
    let count = row.len() as f32;
    let mean = row.iter().sum::<f32>() / count;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / count;
    (mean, 1.0 / (variance + EPSILON).sqrt())
}

impl CustomOp1 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let weight = self.weight.values(Phase::Forward)?;
        let bias = self.bias.values(Phase::Forward)?;
        let x = argument(storage, layout)?;
        let mut y = Vec::with_capacity(x.len());
        for row in x.chunks_exact(weight.len()) {
            let (mean, inverse) = moments(row);
            let scaled = row.iter().zip(weight.iter().zip(bias.iter()));
            y.extend(scaled.map(|(x, (w, b))| (x - mean) * inverse * w + b));
        }
        Ok(result(y, layout.shape()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let weight = self.weight.values(Phase::Backward)?;
        let width = weight.len();
        let (mut d_weight, mut d_bias) = (vec![0.0; width], vec![0.0; width]);
        let mut dx = Vec::with_capacity(x.elem_count());
        let mut normal = vec![0.0; width];
        let mut scaled = vec![0.0; width];
        for (x, dy) in ordered(x)?.chunks_exact(width).zip(ordered(dy)?.chunks_exact(width)) {
            let (mean, inverse) = moments(x);
            for (n, x) in normal.iter_mut().zip(x) {
                *n = (x - mean) * inverse;
            }
            for (s, (d, w)) in scaled.iter_mut().zip(dy.iter().zip(weight.iter())) {
                *s = d * w;
            }
            for (sum, (d, n)) in d_weight.iter_mut().zip(dy.iter().zip(&normal)) {
                *sum += d * n;
            }
            for (sum, d) in d_bias.iter_mut().zip(dy) {
                *sum += d;
            }
            // With n = (x - mean) * inverse and s = dy * weight, over a row:
            // dx = inverse * (s - mean(s) - n * mean(s * n)).
            let mean_s = scaled.iter().sum::<f32>() / width as f32;
            let mean_sn =
                scaled.iter().zip(&normal).map(|(s, n)| s * n).sum::<f32>() / width as f32;
            let row = scaled.iter().zip(&normal);
            dx.extend(row.map(|(s, n)| inverse * (s - mean_s - n * mean_sn)));
        }
        self.weight.report(&d_weight)?;
        self.bias.report(&d_bias)?;
        Tensor::from_vec(dx, x.shape(), &Device::Cpu).map(Some)
    }
}
