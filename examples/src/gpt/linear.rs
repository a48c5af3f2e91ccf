//! y = x W^T for a weight of outputs x inputs in a store.

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

use super::operator::{Handle, argument, ordered, result};
use crate::weights::Phase;

/// The operator; the last dimension of its argument is the weight's columns.
pub(super) struct Linear(pub(super) Handle);

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Self(weight) = self;
        let x = argument(storage, layout)?;
        let x = Tensor::from_slice(x, (x.len() / weight.columns, weight.columns), &Device::Cpu)?;
        let y = x.matmul(&weight.tensor(Phase::Forward)?.t()?)?;
        let mut shape = layout.dims().to_vec();
        shape.pop();
        shape.push(weight.rows);
        Ok(result(ordered(&y)?, shape))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let Self(weight) = self;
        let shape = x.shape().clone();
        let x = x.detach().reshape(((), weight.columns))?;
        let dy = dy.detach().reshape(((), weight.rows))?;
        // The weight first: reporting the gradient may let go of it.
        let dx = dy.matmul(&weight.tensor(Phase::Backward)?)?;
        weight.report(&ordered(&dy.t()?.matmul(&x)?)?)?;
        dx.reshape(shape).map(Some)
    }
}
