//! One rank's part of a weight and all that belongs to it.

use std::sync::Arc;

use gather8_kernels::job::{Cast, Emit, Master, Optimize};
use gather8_kernels::layout::BytesRecord;
use gather8_kernels::{Backend, DType, Format, Job, Memory, Span, Tensor};

use crate::config::{GroupConfig, MasterWeight, MomentType};
use crate::error::{Error, Result};
use crate::hooks::{AllGatherHooks, Encoding, Gather, Segment, Unsharded};
use crate::spec::{Sharding, WeightSpec};

/// A weight's shard in device memory: `ceil(rows / world)` rows, of which
/// [`Sharding::elements`] are the rank's own and the rest is padding that nothing reads.
#[derive(Debug)]
pub struct ShardedWeight<B: Backend> {
    pub(crate) spec: WeightSpec,
    pub(crate) sharding: Sharding,
    pub(crate) shard: Arc<B::Buffer>,
    pub(crate) float8: Option<Float8Shard<B>>,
    pub(crate) state: Option<OptimizerState<B>>,
}

/// The float8 side of a weight.
#[derive(Debug)]
pub(crate) struct Float8Shard<B: Backend> {
    pub(crate) format: Format,
    /// One byte per element, padding included; kept between steps.
    pub(crate) bytes: Arc<B::Buffer>,
    /// The [`BytesRecord`] of `bytes`.
    pub(crate) record: Span<B>,
    /// The weight's record in the amax table.
    pub(crate) scales: Span<B>,
    /// The weight's slot in the amax table.
    pub(crate) slot: usize,
    /// Where saturated values are counted, on request.
    pub(crate) saturated: Option<Span<B>>,
}

/// What the optimizer keeps of a trainable weight.
#[derive(Debug)]
pub(crate) struct OptimizerState<B: Backend> {
    /// The reduced gradient (f32), padding included.
    pub(crate) gradient: Arc<B::Buffer>,
    pub(crate) exp_avg: Arc<B::Buffer>,
    pub(crate) exp_avg_sq: Arc<B::Buffer>,
    pub(crate) moments: DType,
    pub(crate) master: MasterState<B>,
    /// The parameter group's number.
    pub(crate) group: usize,
}

#[derive(Debug)]
pub(crate) enum MasterState<B: Backend> {
    Itself,
    Copy(Arc<B::Buffer>),
    Remainder(Arc<B::Buffer>),
}

impl<B: Backend> OptimizerState<B> {
    pub(crate) fn alloc(
        backend: &B,
        weight: (&WeightSpec, Sharding),
        config: &GroupConfig,
        group: usize,
    ) -> Result<Self> {
        let (spec, sharding) = weight;
        let own = sharding.elements();
        let moments = match config.moments {
            MomentType::F32 => DType::F32,
            MomentType::Bf16 => DType::Bf16,
        };
        let master = match (spec.dtype, config.master) {
            (DType::Bf16, MasterWeight::F32) => {
                MasterState::Copy(backend.alloc(own * 4, Memory::Device)?)
            }
            (DType::Bf16, MasterWeight::Remainder) => {
                MasterState::Remainder(backend.alloc(own * 2, Memory::Device)?)
            }
            (_, MasterWeight::F32) => MasterState::Itself,
            (dtype, MasterWeight::Remainder) => {
                return Err(Error::Weight {
                    weight: spec.name.clone(),
                    problem: format!(
                        "its group keeps remainders, which only bf16 weights have, but it is stored in {}; put it into another group",
                        dtype.name()
                    ),
                });
            }
        };
        Ok(Self {
            gradient: backend.alloc(sharding.padded_elements() * 4, Memory::Device)?,
            exp_avg: backend.alloc(own * moments.size(), Memory::Device)?,
            exp_avg_sq: backend.alloc(own * moments.size(), Memory::Device)?,
            moments,
            master,
            group,
        })
    }
}

impl<B: Backend> ShardedWeight<B> {
    /// The weight's description.
    pub fn spec(&self) -> &WeightSpec {
        &self.spec
    }

    /// How it is sharded.
    pub fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// This rank's rows without padding.
    pub(crate) fn own(&self) -> Result<Tensor<B>> {
        let bytes = self.sharding.elements() * self.spec.dtype.size();
        Ok(Tensor::new(Span::new(&self.shard, 0..bytes)?, self.spec.dtype)?)
    }

    pub(crate) fn own_gradient(&self) -> Result<Option<Tensor<B>>> {
        let Some(state) = &self.state else { return Ok(None) };
        let span = Span::new(&state.gradient, 0..self.sharding.elements() * 4)?;
        Ok(Some(Tensor::new(span, DType::F32)?))
    }

    /// The optimizer's job; `emit` adds the float8 bytes.
    pub(crate) fn optimize(
        &self,
        group: Span<B>,
        control: &Span<B>,
        amax: Option<Span<B>>,
        emit: bool,
    ) -> Result<Option<Job<B>>> {
        let (Some(state), Some(grad)) = (&self.state, self.own_gradient()?) else {
            return Ok(None);
        };
        let own = self.sharding.elements();
        let emit = match &self.float8 {
            Some(float8) if emit => Some(Emit {
                dst: Span::new(&float8.bytes, 0..own)?,
                format: float8.format,
                scales: float8.scales.clone(),
                record: float8.record.clone(),
            }),
            _ => None,
        };
        Ok(Some(Job::Optimize(Optimize {
            grad,
            exp_avg: Tensor::new(Span::whole(&state.exp_avg), state.moments)?,
            exp_avg_sq: Tensor::new(Span::whole(&state.exp_avg_sq), state.moments)?,
            weight: self.own()?,
            master: match &state.master {
                MasterState::Itself => Master::Itself,
                MasterState::Copy(buffer) => Master::Copy(Span::whole(buffer)),
                MasterState::Remainder(buffer) => Master::Remainder(Span::whole(buffer)),
            },
            group,
            control: control.clone(),
            amax,
            emit,
        })))
    }
}

/// The bytes of a [`BytesRecord`].
pub(crate) const RECORD_BYTES: u64 = size_of::<BytesRecord>() as u64;

impl<B: Backend> AllGatherHooks<B> for ShardedWeight<B> {
    fn segments(&self) -> Vec<Segment<B>> {
        let source = match &self.float8 {
            Some(float8) => Span::whole(&float8.bytes),
            None => Span::whole(&self.shard),
        };
        vec![Segment { source }]
    }

    fn pre_all_gather(&self, gather: &mut Gather<B>) -> Result<()> {
        if let Some(float8) = &self.float8 {
            gather.push(Job::Cast(Cast {
                src: self.own()?,
                dst: Span::new(&float8.bytes, 0..self.sharding.elements())?,
                format: float8.format,
                scales: float8.scales.clone(),
                record: float8.record.clone(),
                saturated: float8.saturated.clone(),
                amax: None,
            }));
        }
        Ok(())
    }

    fn record(&self) -> Option<Span<B>> {
        self.float8.as_ref().map(|float8| float8.record.clone())
    }

    fn post_all_gather(&self, parts: &[Span<B>], record: Option<Span<B>>) -> Result<Unsharded<B>> {
        let missing = |what: &str| Error::Weight {
            weight: self.spec.name.clone(),
            problem: format!("the gather gave no {what}; report this"),
        };
        let part = parts.first().ok_or_else(|| missing("bytes"))?;
        match &self.float8 {
            Some(float8) => Ok(Unsharded {
                bytes: part.sub(0..self.spec.elements())?,
                encoding: Encoding::Float8 {
                    format: float8.format,
                    record: record.ok_or_else(|| missing("scale"))?,
                },
            }),
            None => Ok(Unsharded {
                bytes: part.sub(0..self.spec.elements() * self.spec.dtype.size())?,
                encoding: Encoding::Stored(self.spec.dtype),
            }),
        }
    }
}
