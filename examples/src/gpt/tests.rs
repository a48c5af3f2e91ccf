//! Gradients against finite differences, and how often every weight is asked for.

use std::sync::Arc;

use anyhow::{Result, anyhow};

use super::{Gpt, Shape, weights};
use crate::random::Stream;
use crate::reference::{Reference, Uses};
use crate::text::{Batch, Windows};
use crate::weights::{Phase, Weights};

const TINY: Shape = Shape { vocabulary: 13, context: 6, width: 8, heads: 2, layers: 2 };

/// A tiny model away from its initial values, where every gradient is large enough to measure.
fn tiny() -> (Arc<Reference>, Gpt, Batch) {
    let specs = weights(&TINY);
    let store = Arc::new(Reference::new(&specs, 11));
    for (id, spec) in specs.iter().enumerate() {
        let noise = Stream::new(12, &spec.name);
        store.update(id, |values| {
            for (position, value) in values.iter_mut().enumerate() {
                *value += noise.uniform(position as u64, 0.2);
            }
        });
    }
    let text: Vec<u8> = (0..200).map(|i| Stream::new(13, "text").below(i, 13) as u8).collect();
    let batch = Windows::new(&text, TINY.context, 14).unwrap().batch(0, 0..3);
    (store.clone(), Gpt::new(TINY, store).unwrap(), batch)
}

fn loss(model: &Gpt, batch: &Batch) -> f64 {
    model.train(batch, 1.0).unwrap()
}

#[test]
fn gradients_agree_with_finite_differences() {
    let (store, model, batch) = tiny();
    loss(&model, &batch);
    let specs = weights(&TINY);
    let gradients: Vec<Vec<f32>> =
        (0..specs.len()).map(|id| store.accumulated(id).unwrap()).collect();
    let mut checked = 0;
    for (id, (spec, gradient)) in specs.iter().zip(&gradients).enumerate() {
        let norm = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 1e-3, "{}: a gradient of {norm} proves nothing", spec.name);
        // Along the gradient, and along random directions, which a part that is missing cannot hide
        // from; all of length 1.
        for direction in 0..6 {
            let signs = Stream::new(direction, &spec.name);
            let along: Vec<f64> = match direction {
                0 => gradient.iter().map(|&g| f64::from(g) / norm).collect(),
                _ => (0..gradient.len() as u64)
                    .map(|i| if signs.bits(i) & 1 == 0 { 1.0 } else { -1.0 })
                    .map(|sign| sign / (gradient.len() as f64).sqrt())
                    .collect(),
            };
            let moved = |distance: f64| {
                let before = store.weight(id, Phase::Forward).unwrap();
                store.update(id, |values| {
                    for (value, a) in values.iter_mut().zip(&along) {
                        *value += (distance * a) as f32;
                    }
                });
                let loss = loss(&model, &batch);
                store.update(id, |values| values.copy_from_slice(&before));
                loss
            };
            // Fourth-order central difference.
            let h = 0.02;
            let measured =
                (8.0 * (moved(h) - moved(-h)) - (moved(2.0 * h) - moved(-2.0 * h))) / (12.0 * h);
            let expected: f64 = gradient.iter().zip(&along).map(|(&g, a)| f64::from(g) * a).sum();
            // f32 losses near 3 carry 2.4e-7 of rounding each, which h turns into about 2e-5.
            let allowed = 5e-5 + 2e-3 * norm;
            assert!(
                (measured - expected).abs() < allowed,
                "{} direction {direction}: {measured} measured, {expected} computed, norm {norm}",
                spec.name
            );
            checked += 1;
        }
    }
    assert_eq!(checked, specs.len() * 6);
}

#[test]
fn the_factor_scales_gradients_but_not_the_loss() {
    let (store, model, batch) = tiny();
    let whole = loss(&model, &batch);
    let before = store.accumulated(5).unwrap();
    assert_eq!(model.train(&batch, 2.0).unwrap(), whole);
    let after = store.accumulated(5).unwrap();
    for (b, a) in before.iter().zip(&after) {
        assert!((a - 3.0 * b).abs() <= 1e-6 + 1e-5 * a.abs(), "{b} then {a}");
    }
}

#[test]
fn every_weight_is_used_once_and_the_tied_one_twice() {
    let (store, model, batch) = tiny();
    loss(&model, &batch);
    for (spec, uses) in weights(&TINY).iter().zip(store.uses()) {
        let tied = spec.name == "tokens.weight";
        // Only operators that need the values for their argument's gradient ask again.
        let asks = !spec.name.ends_with("bias") && spec.name != "positions.weight";
        let expected = Uses {
            forward: 1 + usize::from(tied),
            backward: usize::from(asks),
            gradients: 1 + usize::from(tied),
        };
        assert_eq!(uses, expected, "{}", spec.name);
    }
}

/// A store that fails at one weight in one phase.
struct Failing(Arc<Reference>, usize, Phase);

impl Weights for Failing {
    fn weight(&self, id: usize, phase: Phase) -> Result<Arc<[f32]>> {
        if (id, phase) == (self.1, self.2) {
            return Err(anyhow!("weight {id} is out of reach"));
        }
        self.0.weight(id, phase)
    }

    fn gradient(&self, id: usize, gradient: &[f32]) -> Result<()> {
        self.0.gradient(id, gradient)
    }
}

#[test]
fn an_error_of_the_store_arrives_in_its_own_words() {
    let (store, _, batch) = tiny();
    for (id, phase) in [(0, Phase::Forward), (6, Phase::Forward), (6, Phase::Backward)] {
        let model = Gpt::new(TINY, Arc::new(Failing(store.clone(), id, phase))).unwrap();
        let error = model.train(&batch, 1.0).unwrap_err();
        assert_eq!(error.to_string(), format!("weight {id} is out of reach"));
    }
}

#[test]
fn blocks_report_their_gradients_from_the_last_to_the_first() {
    struct Order(Arc<Reference>, std::sync::Mutex<Vec<usize>>);
    impl Weights for Order {
        fn weight(&self, id: usize, phase: Phase) -> Result<Arc<[f32]>> {
            self.0.weight(id, phase)
        }
        fn gradient(&self, id: usize, gradient: &[f32]) -> Result<()> {
            self.1.lock().unwrap().push(weights(&TINY)[id].unit);
            self.0.gradient(id, gradient)
        }
    }
    let (store, _, batch) = tiny();
    let order = Arc::new(Order(store, std::sync::Mutex::default()));
    Gpt::new(TINY, order.clone()).unwrap().train(&batch, 1.0).unwrap();
    let mut blocks = order.1.lock().unwrap().clone();
    blocks.retain(|&unit| unit > 0);
    blocks.dedup();
    assert_eq!(blocks, [2, 1]);
}
