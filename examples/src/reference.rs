//! Weights as plain arrays, which nobody shards or casts: what the model's own tests run on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, anyhow, bail};

use crate::gpt::WeightSpec;
use crate::weights::{Phase, Weights};

/// How often a weight was asked for, and got a gradient.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uses {
    /// Requests of the forward pass.
    pub forward: usize,
    /// Requests of the backward pass.
    pub backward: usize,
    /// Gradients.
    pub gradients: usize,
}

struct Weight {
    values: Arc<[f32]>,
    gradient: Vec<f32>,
    uses: Uses,
}

/// A weight store in f32.
pub struct Reference(Mutex<Vec<Weight>>);

impl Reference {
    /// Weights with their initial values under `seed`.
    pub fn new(specs: &[WeightSpec], seed: u64) -> Self {
        let weight = |spec: &WeightSpec| Weight {
            values: spec.values(seed, 0..spec.len()).into(),
            gradient: vec![0.0; spec.len()],
            uses: Uses::default(),
        };
        Self(Mutex::new(specs.iter().map(weight).collect()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests and gradients of every weight so far.
    pub fn uses(&self) -> Vec<Uses> {
        self.lock().iter().map(|weight| weight.uses).collect()
    }

    /// The gradient of a weight, added up.
    pub fn accumulated(&self, id: usize) -> Option<Vec<f32>> {
        self.lock().get(id).map(|weight| weight.gradient.clone())
    }

    /// Changes the values of a weight.
    pub fn update(&self, id: usize, change: impl FnOnce(&mut [f32])) {
        if let Some(weight) = self.lock().get_mut(id) {
            let mut values = weight.values.to_vec();
            change(&mut values);
            weight.values = values.into();
        }
    }
}

impl Weights for Reference {
    fn weight(&self, id: usize, phase: Phase) -> Result<Arc<[f32]>> {
        let mut weights = self.lock();
        let weight = weights.get_mut(id).ok_or_else(|| anyhow!("there is no weight {id}"))?;
        match phase {
            Phase::Forward => weight.uses.forward += 1,
            Phase::Backward => weight.uses.backward += 1,
        }
        Ok(weight.values.clone())
    }

    fn gradient(&self, id: usize, gradient: &[f32]) -> Result<()> {
        let mut weights = self.lock();
        let weight = weights.get_mut(id).ok_or_else(|| anyhow!("there is no weight {id}"))?;
        if gradient.len() != weight.gradient.len() {
            bail!(
                "weight {id} has {} values, its gradient {}",
                weight.gradient.len(),
                gradient.len()
            );
        }
        weight.uses.gradients += 1;
        for (sum, g) in weight.gradient.iter_mut().zip(gradient) {
            *sum += g;
        }
        Ok(())
    }
}
