//! A unit as planned: where its weights land when it is gathered, where its gradients gather
//! before they are scattered, and the launches that serve them. Built once.

use std::ops::Range;
use std::sync::Arc;

use gather8_kernels::{Backend, DType, Job, Memory, Span, Tensor};

use crate::error::Result;
use crate::hooks::{AllGatherHooks, Gather, Unsharded};
use crate::spec::UnitSpec;
use crate::weight::ShardedWeight;

/// Segments start at multiples of this: enough for every vector access and for NCCL.
const ALIGNMENT: u64 = 256;

/// A planned unit.
pub(crate) struct Unit<B: Backend> {
    pub(crate) name: String,
    pub(crate) held: bool,
    /// Its weights' numbers.
    pub(crate) weights: Range<usize>,
    /// Casts every float8 shard of the unit.
    pub(crate) cast: Option<B::Plan>,
    /// One per arena slot, or one of its own.
    pub(crate) places: Vec<Place<B>>,
    /// World × padded shard bytes, all weights.
    pub(crate) gathered_bytes: u64,
    /// One per gradient slot, or one of its own.
    pub(crate) gradients: Vec<GradientPlace<B>>,
    /// Adds a later microbatch's scattered gradients to the shards'.
    pub(crate) accumulate: Option<B::Plan>,
    /// World × padded shard bytes in f32, all trainable weights.
    pub(crate) reduced_bytes: u64,
}

/// Where a unit is gathered to.
pub(crate) struct Place<B: Backend> {
    /// Source and destination of every segment; empty in a world of 1, where nothing moves.
    pub(crate) parts: Vec<(Span<B>, Span<B>)>,
    /// The whole weights.
    pub(crate) unsharded: Vec<Unsharded<B>>,
}

/// Where a unit's full gradients are.
pub(crate) struct GradientPlace<B: Backend> {
    /// Per weight of the unit: world × padded rows in f32; `None` for frozen weights.
    pub(crate) full: Vec<Option<Span<B>>>,
    /// Scatters into the shards' gradients: the first microbatch of a step.
    pub(crate) first: Vec<(Span<B>, Span<B>)>,
    /// Scatters into scratch memory: later microbatches, which are then added.
    pub(crate) later: Vec<(Span<B>, Span<B>)>,
}

const fn align(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Bytes that a unit's weights need when gathered.
pub(crate) fn place_bytes<B: Backend>(weights: &[ShardedWeight<B>], world: u32) -> u64 {
    if world == 1 {
        return 0;
    }
    weights
        .iter()
        .flat_map(AllGatherHooks::segments)
        .map(|segment| align(segment.source.len() * u64::from(world)))
        .sum()
}

/// Bytes that a unit's full gradients need.
pub(crate) fn gradient_bytes<B: Backend>(weights: &[ShardedWeight<B>], world: u32) -> u64 {
    let bytes = |weight: &ShardedWeight<B>| align(full_gradient_bytes(weight, world));
    weights.iter().filter(|weight| weight.state.is_some()).map(bytes).sum()
}

/// Bytes that a unit's scattered gradients need before they are added to the shards'.
pub(crate) fn scratch_bytes<B: Backend>(weights: &[ShardedWeight<B>]) -> u64 {
    let bytes = |weight: &ShardedWeight<B>| align(weight.sharding.padded_elements() * 4);
    weights.iter().filter(|weight| weight.state.is_some()).map(bytes).sum()
}

fn full_gradient_bytes<B: Backend>(weight: &ShardedWeight<B>, world: u32) -> u64 {
    weight.sharding.padded_elements() * u64::from(world) * 4
}

/// What a unit is planned from.
pub(crate) struct UnitPlan<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) world: u32,
    pub(crate) spec: &'a UnitSpec,
    /// Number of the unit's first weight.
    pub(crate) first: usize,
    pub(crate) weights: &'a [ShardedWeight<B>],
    /// Arena slots and gradient slots that it may be given.
    pub(crate) slots: Vec<Arc<B::Buffer>>,
    pub(crate) gradient_slots: Vec<Arc<B::Buffer>>,
    /// Scattered gradients of later microbatches.
    pub(crate) scratch: &'a Arc<B::Buffer>,
}

impl<B: Backend> UnitPlan<'_, B> {
    pub(crate) fn build(self) -> Result<Unit<B>> {
        let mut gather = Gather::new();
        for weight in self.weights {
            weight.pre_all_gather(&mut gather)?;
        }
        let casts = gather.into_jobs();
        let cast = if casts.is_empty() { None } else { Some(self.backend.plan(&casts)?) };
        let sources = self.weights.iter().flat_map(AllGatherHooks::segments);
        let gathered_bytes =
            sources.map(|segment| segment.source.len() * u64::from(self.world)).sum();
        let (slots, gradient_slots) = if self.spec.held {
            let gathered = place_bytes(self.weights, self.world);
            let gradients = gradient_bytes(self.weights, self.world);
            (
                vec![self.backend.alloc(gathered, Memory::Device)?],
                vec![self.backend.alloc(gradients, Memory::Device)?],
            )
        } else {
            (self.slots.clone(), self.gradient_slots.clone())
        };
        let places = slots.iter().map(|slot| self.place(slot)).collect::<Result<_>>()?;
        let gradients = gradient_slots
            .iter()
            .map(|slot| gradient_place(self.weights, self.world, slot, self.scratch))
            .collect::<Result<_>>()?;
        let trainable = self.weights.iter().filter(|weight| weight.state.is_some());
        Ok(Unit {
            name: self.spec.name.clone(),
            held: self.spec.held,
            weights: self.first..self.first + self.weights.len(),
            cast,
            places,
            gathered_bytes,
            gradients,
            accumulate: self.accumulate()?,
            reduced_bytes: trainable.map(|w| full_gradient_bytes(w, self.world)).sum(),
        })
    }

    fn place(&self, slot: &Arc<B::Buffer>) -> Result<Place<B>> {
        let mut place = Place { parts: Vec::new(), unsharded: Vec::new() };
        if self.world == 1 {
            for weight in self.weights {
                let parts: Vec<_> = weight.segments().into_iter().map(|s| s.source).collect();
                place.unsharded.push(weight.post_all_gather(&parts, weight.record())?);
            }
            return Ok(place);
        }
        let mut at = 0;
        for weight in self.weights {
            let mut parts = Vec::new();
            for segment in weight.segments() {
                let bytes = segment.source.len() * u64::from(self.world);
                let destination = Span::new(slot, at..at + bytes)?;
                at += align(bytes);
                parts.push(destination.clone());
                place.parts.push((segment.source, destination));
            }
            place.unsharded.push(weight.post_all_gather(&parts, weight.record())?);
        }
        Ok(place)
    }

    fn accumulate(&self) -> Result<Option<B::Plan>> {
        let mut jobs = Vec::new();
        let mut at = 0;
        for weight in self.weights {
            let Some(state) = &weight.state else { continue };
            let bytes = weight.sharding.padded_elements() * 4;
            jobs.push(Job::Accumulate(gather8_kernels::job::Accumulate {
                src: Tensor::new(Span::new(self.scratch, at..at + bytes)?, DType::F32)?,
                dst: Tensor::new(Span::whole(&state.gradient), DType::F32)?,
            }));
            at += align(bytes);
        }
        if jobs.is_empty() { Ok(None) } else { Ok(Some(self.backend.plan(&jobs)?)) }
    }
}

/// Lays a unit's full gradients out in `slot`.
pub(crate) fn gradient_place<B: Backend>(
    weights: &[ShardedWeight<B>],
    world: u32,
    slot: &Arc<B::Buffer>,
    scratch: &Arc<B::Buffer>,
) -> Result<GradientPlace<B>> {
    let mut place = GradientPlace { full: Vec::new(), first: Vec::new(), later: Vec::new() };
    let (mut at, mut scratch_at) = (0, 0);
    for weight in weights {
        let Some(state) = &weight.state else {
            place.full.push(None);
            continue;
        };
        let bytes = full_gradient_bytes(weight, world);
        let full = Span::new(slot, at..at + bytes)?;
        at += align(bytes);
        let shard = weight.sharding.padded_elements() * 4;
        let temporary = Span::new(scratch, scratch_at..scratch_at + shard)?;
        scratch_at += align(shard);
        place.first.push((full.clone(), Span::whole(&state.gradient)));
        place.later.push((full.clone(), temporary));
        place.full.push(Some(full));
    }
    Ok(place)
}
