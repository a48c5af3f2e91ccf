//! The optimizer's records and launches, and learning-rate schedules.

use std::collections::BTreeMap;

use gather8_kernels::job::{Control, Norm, SumNorms};
use gather8_kernels::layout::{ControlRecord, GroupRecord, NormRecord, norm_tiles};
use gather8_kernels::{Backend, Job, Memory, Span};
use serde::{Deserialize, Serialize};

use crate::config::{Config, GroupConfig, OptimizerMode};
use crate::error::{Error, Result};
use crate::weight::ShardedWeight;

/// A learning rate over time: linear warm-up, then constant or half a cosine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Schedule {
    /// Steps over which the rate grows linearly from near 0 to its peak.
    pub warmup: u64,
    /// Steps in all; after them the rate stays at its end. 0: constant after the warm-up.
    pub steps: u64,
    /// The end of the cosine, as a fraction of the peak.
    pub end: f32,
}

impl Default for Schedule {
    fn default() -> Self {
        Self { warmup: 0, steps: 0, end: 0.1 }
    }
}

impl Schedule {
    /// Warm-up, then a cosine down to a tenth of the peak.
    pub fn cosine(warmup: u64, steps: u64) -> Self {
        Self { warmup, steps, ..Self::default() }
    }

    /// The factor on the peak rate in step `step`, counted from 0: `(step + 1) / warmup` during the
    /// warm-up, then `end + (1 - end) * (1 + cos(pi * progress)) / 2`.
    pub fn factor(&self, step: u64) -> f32 {
        if step < self.warmup {
            return ((step + 1) as f64 / self.warmup as f64) as f32;
        }
        if self.steps <= self.warmup {
            return 1.0;
        }
        let progress =
            ((step - self.warmup) as f64 / (self.steps - self.warmup) as f64).clamp(0.0, 1.0);
        let end = f64::from(self.end);
        (end + (1.0 - end) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())) as f32
    }
}

/// The groups' records, the control record and the passes around them.
pub(crate) struct Optimizer<B: Backend> {
    /// Names and settings, in the order of the records.
    pub(crate) groups: Vec<(String, GroupConfig)>,
    pub(crate) records: Span<B>,
    pub(crate) control: Span<B>,
    pub(crate) total: Span<B>,
    pub(crate) norm: Option<B::Plan>,
    pub(crate) sum: B::Plan,
    pub(crate) decide: B::Plan,
    /// The step itself, one per bank of the amax table.
    pub(crate) steps: [Vec<B::Plan>; 2],
    /// The optimizer writes float8 bytes along.
    pub(crate) emit: bool,
}

pub(crate) const GROUP_BYTES: u64 = size_of::<GroupRecord>() as u64;

/// Betas and their complements, formed in f64 and rounded once.
pub(crate) fn group_record(mode: OptimizerMode, group: &GroupConfig) -> GroupRecord {
    let (beta1, beta2) = group.betas;
    GroupRecord {
        beta1,
        beta2,
        lr: group.lr,
        weight_decay: group.weight_decay,
        eps: group.eps,
        mode: match mode {
            OptimizerMode::Adamw => 0,
            OptimizerMode::AdamL2 => 1,
        },
        b1: beta1 as f32,
        one_minus_b1: (1.0 - beta1) as f32,
        b2: beta2 as f32,
        one_minus_b2: (1.0 - beta2) as f32,
        correction1: 1.0,
        correction2: 1.0,
        reserved: [0; 2],
    }
}

/// The groups that the model's weights name, in order of their names.
pub(crate) fn groups_in_use<'a>(
    config: &Config,
    weights: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<Vec<(String, GroupConfig)>> {
    let mut groups = BTreeMap::new();
    for (weight, group) in weights {
        let settings = config.optimizer.group(group).ok_or_else(|| Error::Weight {
            weight: weight.to_owned(),
            problem: format!(
                "its parameter group `{group}` is not in the configuration; add optimizer.groups.{group}"
            ),
        })?;
        groups.insert(group.to_owned(), settings);
    }
    Ok(groups.into_iter().collect())
}

impl<B: Backend> Optimizer<B> {
    /// Allocates and fills the records and plans the passes; the step's own plans come last, when
    /// the amax table exists.
    pub(crate) fn new(
        backend: &B,
        stream: &B::Stream,
        config: &Config,
        groups: Vec<(String, GroupConfig)>,
        weights: &[ShardedWeight<B>],
        emit: bool,
    ) -> Result<Self> {
        let records: Vec<_> =
            groups.iter().map(|(_, group)| group_record(config.optimizer.mode, group)).collect();
        let control = ControlRecord {
            max_norm: config.optimizer.max_grad_norm,
            inverse_loss_scale: 1.0,
            factor: 1.0,
            skip_on_found_inf: u32::from(config.optimizer.skip_on_found_inf),
            ..ControlRecord::default()
        };
        let alloc = |bytes: usize| -> Result<Span<B>> {
            Ok(Span::whole(&backend.alloc(bytes as u64, Memory::Device)?))
        };
        let group_span = alloc(std::mem::size_of_val(records.as_slice()))?;
        backend.upload(stream, bytemuck::cast_slice(&records), &group_span)?;
        let control_span = alloc(size_of::<ControlRecord>())?;
        backend.upload(stream, bytemuck::bytes_of(&control), &control_span)?;
        let total = alloc(size_of::<NormRecord>())?;

        let mut gradients = Vec::new();
        for weight in weights {
            gradients.extend(weight.own_gradient()?);
        }
        let record = size_of::<NormRecord>() as u64;
        let tiles: u64 = gradients.iter().map(|tensor| norm_tiles(tensor.elements())).sum();
        let tile_span = alloc((tiles * record) as usize)?;
        let mut jobs = Vec::new();
        let mut at = 0;
        for src in gradients {
            let bytes = norm_tiles(src.elements()) * record;
            jobs.push(Job::Norm(Norm { src, tiles: tile_span.sub(at..at + bytes)? }));
            at += bytes;
        }
        let sum = SumNorms { tiles: tile_span, total: total.clone() };
        let decide = Control {
            total: total.clone(),
            control: control_span.clone(),
            groups: group_span.clone(),
        };
        Ok(Self {
            groups,
            norm: if jobs.is_empty() { None } else { Some(backend.plan(&jobs)?) },
            sum: backend.plan(&[Job::SumNorms(sum)])?,
            decide: backend.plan(&[Job::Control(decide)])?,
            records: group_span,
            control: control_span,
            total,
            steps: [Vec::new(), Vec::new()],
            emit,
        })
    }

    pub(crate) fn group_span(&self, group: usize) -> Result<Span<B>> {
        let at = group as u64 * GROUP_BYTES;
        Ok(self.records.sub(at..at + GROUP_BYTES)?)
    }
}
