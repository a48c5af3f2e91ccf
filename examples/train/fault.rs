//! Ways to break a training, so that the checks of its result can be seen to fail.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use gather8_examples::gpt::WeightSpec;
use gather8_examples::weights::{Phase, Weights};

use crate::options::Fault;

/// The unit that `stale` and `drop-gradient` break: the first block.
const UNIT: usize = 1;

/// A weight store with a fault.
pub(crate) struct Faulty {
    weights: Arc<dyn Weights>,
    specs: Vec<WeightSpec>,
    fault: Fault,
    first: Mutex<HashMap<usize, Arc<[f32]>>>,
}

impl Faulty {
    /// `weights`, broken by `fault` if there is one.
    pub(crate) fn wrap(
        weights: Arc<dyn Weights>,
        specs: &[WeightSpec],
        fault: Option<Fault>,
    ) -> Arc<dyn Weights> {
        match fault {
            None => weights,
            Some(fault) => {
                Arc::new(Self { weights, specs: specs.to_vec(), fault, first: Mutex::default() })
            }
        }
    }

    fn spec(&self, id: usize, holds: impl Fn(&WeightSpec) -> bool) -> bool {
        self.specs.get(id).is_some_and(holds)
    }
}

impl Weights for Faulty {
    fn weight(&self, id: usize, phase: Phase) -> Result<Arc<[f32]>> {
        // The gather takes place all the same.
        let values = self.weights.weight(id, phase)?;
        match self.fault {
            Fault::Scale if self.spec(id, |spec| spec.unit > 0 && spec.float8) => {
                Ok(values.iter().map(|value| value / 64.0).collect())
            }
            Fault::Stale if self.spec(id, |spec| spec.unit == UNIT) => {
                let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(first.entry(id).or_insert(values).clone())
            }
            Fault::Scale | Fault::Stale | Fault::DropGradient => Ok(values),
        }
    }

    fn gradient(&self, id: usize, gradient: &[f32]) -> Result<()> {
        if self.fault == Fault::DropGradient && self.spec(id, |spec| spec.unit == UNIT) {
            return self.weights.gradient(id, &vec![0.0; gradient.len()]);
        }
        self.weights.gradient(id, gradient)
    }
}
