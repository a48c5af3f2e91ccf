//! What the operators share: access to one weight, and slices of candle's tensors.

use std::sync::Arc;

use anyhow::anyhow;
use candle_core::{CpuStorage, Device, Layout, Result, Shape, Tensor};

use crate::weights::{FirstError, Phase, Weights};

/// One weight of a store, as an operator holds it.
#[derive(Clone)]
pub(super) struct Handle {
    pub(super) store: Arc<dyn Weights>,
    pub(super) first_error: FirstError,
    pub(super) id: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Handle {
    /// The weight's values.
    pub(super) fn values(&self, phase: Phase) -> Result<Arc<[f32]>> {
        let values =
            self.store.weight(self.id, phase).map_err(|error| self.first_error.keep(error))?;
        if values.len() != self.rows * self.columns {
            return Err(self.first_error.keep(anyhow!(
                "the store returned {} values for weight {}, which has {} x {}",
                values.len(),
                self.id,
                self.rows,
                self.columns
            )));
        }
        Ok(values)
    }

    /// The weight as a tensor of rows x columns.
    pub(super) fn tensor(&self, phase: Phase) -> Result<Tensor> {
        Tensor::from_slice(&self.values(phase)?, (self.rows, self.columns), &Device::Cpu)
    }

    /// Reports the weight's gradient.
    pub(super) fn report(&self, gradient: &[f32]) -> Result<()> {
        self.store.gradient(self.id, gradient).map_err(|error| self.first_error.keep(error))
    }
}

/// The values of an operator's argument, which must lie in order.
pub(super) fn argument<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let ordered = layout.contiguous_offsets();
    let values = storage.as_slice::<f32>()?;
    ordered.and_then(|(start, end)| values.get(start..end)).ok_or_else(|| {
        candle_core::Error::Msg(format!("an operator needs ordered values, got {layout:?}"))
    })
}

/// The values of a tensor in order.
pub(super) fn ordered(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// An operator's result.
pub(super) fn result(values: Vec<f32>, shape: impl Into<Shape>) -> (CpuStorage, Shape) {
    (CpuStorage::F32(values), shape.into())
}
