//! From a description of the model to a running [`Fsdp`].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use gather8_collectives::order::OrderLog;
use gather8_collectives::table::{AmaxTable, SlotKind, SlotSpec, TableConfig};
use gather8_collectives::{Communicator, Op};
use gather8_kernels::{Backend, DType, Format, Memory, Span, scalar};

use crate::agreement;
use crate::arena::{Arena, Kind};
use crate::channel::Channel;
use crate::config::{Config, GatherType};
use crate::error::{Error, Result};
use crate::fsdp::{Fsdp, State, Streams, Traffic, UnitState, WeightState};
use crate::optimizer::{Optimizer, groups_in_use};
use crate::spec::{Sharding, UnitId, UnitSpec, WeightId, WeightSpec};
use crate::unit::{UnitPlan, gradient_bytes, place_bytes, scratch_bytes};
use crate::weight::{Float8Shard, OptimizerState, RECORD_BYTES, ShardedWeight};

/// Describes a model, unit by unit, in the order of the forward pass.
pub struct FsdpBuilder<B: Backend> {
    config: Config,
    backend: B,
    communicator: Arc<dyn Communicator<B>>,
    units: Vec<UnitSpec>,
    activations: Vec<SlotSpec>,
}

impl<B: Backend> FsdpBuilder<B> {
    pub(crate) fn new(config: Config, backend: B, communicator: Arc<dyn Communicator<B>>) -> Self {
        Self { config, backend, communicator, units: Vec::new(), activations: Vec::new() }
    }

    /// Adds a unit.
    pub fn unit(mut self, unit: UnitSpec) -> Self {
        self.units.push(unit);
        self
    }

    /// Adds several.
    pub fn units(mut self, units: impl IntoIterator<Item = UnitSpec>) -> Self {
        self.units.extend(units);
        self
    }

    /// Adds a slot for the amax of a layer input, synced with those of the weights.
    pub fn input_slot(self, name: impl Into<String>, format: Format) -> Self {
        self.activation(name.into(), SlotKind::Input, format)
    }

    /// Adds a slot for the amax of an output gradient.
    pub fn gradient_slot(self, name: impl Into<String>, format: Format) -> Self {
        self.activation(name.into(), SlotKind::Gradient, format)
    }

    fn activation(mut self, name: String, kind: SlotKind, format: Format) -> Self {
        let delayed = self.config.scaling.is_delayed();
        self.activations.push(SlotSpec { name, kind, format, delayed });
        self
    }

    /// Allocates, fills the shards and agrees with the other ranks. `init` returns the given rows
    /// of a weight, row-major in f32; BF16 and F16 weights start at those values rounded to nearest
    /// even, with a remainder of zero. It is called for this rank's own rows only.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Weight`], [`Error::Init`]; [`Error::Disagreement`] if another
    /// rank was given a different model or configuration; a failure of the device or of a
    /// collective, a float8 weight with a NaN or an infinity among them.
    pub fn build<E>(
        self,
        mut init: impl FnMut(&WeightSpec, Range<u64>) -> std::result::Result<Vec<f32>, E>,
    ) -> Result<Fsdp<B>>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.config.check()?;
        let names = self.check_units()?;
        let (world, rank) = (self.communicator.world(), self.communicator.rank());
        let deadline = self.config.deadline.duration();
        let op = Op { sequence: 0, name: "agreement", unit: "model", deadline };
        agreement::check(&*self.communicator, op, &self.config, &self.units, &self.activations)?;
        let channel = || -> Result<Channel<B>> {
            let child = self.communicator.split(Some(0), rank)?;
            let child = child.ok_or_else(|| {
                Error::Config("the communicator gave no child for the colour asked for".into())
            })?;
            Ok(Channel::new(child, deadline))
        };
        let (gather, reduce, amax) = (channel()?, channel()?, channel()?);
        let streams = Streams {
            compute: self.backend.stream("compute")?,
            gather: self.backend.stream("gather")?,
            reduce: self.backend.stream("reduce")?,
            amax: self.backend.stream("amax")?,
        };

        let table = self.table(&streams.amax)?;
        let saturated = if self.config.gather.count_saturated {
            Some(Span::whole(&self.backend.alloc(4, Memory::Device)?))
        } else {
            None
        };
        let specs = self.units.iter().flat_map(|unit| &unit.weights);
        let groups = groups_in_use(
            &self.config,
            specs.filter(|spec| spec.trainable).map(|spec| (&*spec.name, &*spec.group)),
        )?;
        let mut weights = Vec::new();
        for unit in &self.units {
            for spec in &unit.weights {
                let slot =
                    weights.iter().filter(|w: &&ShardedWeight<B>| w.float8.is_some()).count();
                let sharding = Sharding::new(spec, world, rank);
                let padded = sharding.padded_elements();
                let float8 = if self.is_float8(spec) {
                    Some(Float8Shard {
                        format: self.config.gather.format,
                        bytes: self.backend.alloc(padded, Memory::Device)?,
                        record: Span::whole(&self.backend.alloc(RECORD_BYTES, Memory::Device)?),
                        scales: table.slot_record(slot)?,
                        slot,
                        saturated: saturated.clone(),
                    })
                } else {
                    None
                };
                let state = match groups.iter().position(|(name, _)| *name == spec.group) {
                    Some(group) if spec.trainable => {
                        let settings = groups.get(group).map(|(_, settings)| settings.clone());
                        let settings = settings.unwrap_or_default();
                        Some(OptimizerState::alloc(
                            &self.backend,
                            (spec, sharding),
                            &settings,
                            group,
                        )?)
                    }
                    _ => None,
                };
                let bytes = padded * spec.dtype.size();
                let shard = self.backend.alloc(bytes, Memory::Device)?;
                weights.push(ShardedWeight { spec: spec.clone(), sharding, shard, float8, state });
            }
        }

        let emit = self.config.scaling.is_delayed() && !self.config.gather.count_saturated;
        let optimizer =
            Optimizer::new(&self.backend, &streams.compute, &self.config, groups, &weights, emit)?;
        let planned = self.plan_units(&weights, world)?;
        let staging_bytes = weights
            .iter()
            .filter(|weight| weight.state.is_some())
            .map(|weight| weight.spec.elements() * 4)
            .max()
            .unwrap_or(0);
        let staging = Span::whole(&self.backend.alloc(staging_bytes, Memory::Device)?);
        let weight_states =
            vec![WeightState { version: 1, ..WeightState::default() }; weights.len()];
        let state = State {
            arena: planned.arena,
            gradient_arena: planned.gradient_arena,
            weights: weight_states,
            units: planned.units.iter().map(|_| UnitState::default()).collect(),
            order: Vec::new(),
            entered: None,
            log: OrderLog::new(),
            sync_positions: [0; 2],
            dirty: Vec::new(),
            stepped: false,
            synced: None,
            gather_waits_for_sync: false,
            last_gather: None,
            last_reduce: None,
            microbatches: 1,
            microbatch: 0,
            no_sync: false,
            broken: false,
            divide: HashMap::new(),
            add: HashMap::new(),
            record: HashMap::new(),
            traffic: Traffic::default(),
        };
        let mut unit_of = Vec::new();
        for (number, unit) in planned.units.iter().enumerate() {
            unit_of.extend(unit.weights.clone().map(|_| UnitId(number)));
        }
        let first_activation = weights.iter().filter(|weight| weight.float8.is_some()).count();
        let activation_slots = (self.activations.iter().zip(first_activation..))
            .map(|(slot, number)| (slot.name.clone(), number))
            .collect();
        let mut fsdp = Fsdp {
            backend: self.backend,
            config: self.config,
            world,
            rank,
            weights,
            units: planned.units,
            unit_of,
            by_name: names,
            table,
            activation_slots,
            optimizer,
            streams,
            gather,
            reduce,
            amax,
            saturated,
            staging,
            scratch: planned.scratch,
            state: Mutex::new(state),
        };
        fsdp.optimizer.steps = [fsdp.plan_steps(0, |_| true)?, fsdp.plan_steps(1, |_| true)?];
        fsdp.fill(&mut init)?;
        Ok(fsdp)
    }

    fn is_float8(&self, spec: &WeightSpec) -> bool {
        spec.float8 && self.config.gather.dtype == GatherType::Float8
    }

    fn check_units(&self) -> Result<HashMap<String, WeightId>> {
        let mut names = HashMap::new();
        let mut units = std::collections::HashSet::new();
        for unit in &self.units {
            check_name("unit", &unit.name)?;
            if !units.insert(&unit.name) {
                return Err(Error::Config(format!("two units are called `{}`", unit.name)));
            }
            for spec in &unit.weights {
                check_name("weight", &spec.name)?;
                check_name("parameter group", &spec.group)?;
                spec.check()?;
                let id = WeightId(names.len());
                if names.insert(spec.name.clone(), id).is_some() {
                    return Err(Error::Weight {
                        weight: spec.name.clone(),
                        problem: "two weights have this name; tied weights are one weight that is asked for twice".into(),
                    });
                }
            }
        }
        for slot in &self.activations {
            check_name("amax slot", &slot.name)?;
        }
        Ok(names)
    }

    fn table(&self, stream: &B::Stream) -> Result<AmaxTable<B>> {
        let delayed = self.config.scaling.is_delayed();
        let weights = self.units.iter().flat_map(|unit| &unit.weights);
        let mut slots: Vec<_> = weights
            .filter(|spec| self.is_float8(spec))
            .map(|spec| SlotSpec {
                name: spec.name.clone(),
                kind: SlotKind::Weight,
                format: self.config.gather.format,
                delayed,
            })
            .collect();
        slots.extend(self.activations.iter().cloned());
        let (history, algorithm) = self.config.scaling.ring();
        let mut config = TableConfig::default();
        (config.history, config.algorithm, config.rule) = (history, algorithm, self.config.scale);
        Ok(AmaxTable::new(&self.backend, stream, config, &slots)?)
    }

    fn plan_units(&self, weights: &[ShardedWeight<B>], world: u32) -> Result<Planned<B>> {
        let mut rest = weights;
        let mut split = Vec::new();
        for unit in &self.units {
            let (own, others) = rest.split_at_checked(unit.weights.len()).unwrap_or((rest, &[]));
            split.push(own);
            rest = others;
        }
        let shared = || self.units.iter().zip(&split).filter(|(unit, _)| !unit.held);
        let largest = |bytes: &dyn Fn(&[ShardedWeight<B>]) -> u64| -> u64 {
            shared().map(|(_, weights)| bytes(weights)).max().unwrap_or(0)
        };
        let (gather, backend) = (&self.config.gather, &self.backend);
        let bytes = largest(&|weights| place_bytes(weights, world));
        let arena = Arena::new(backend, Kind::Gathered, gather.arena_slots, bytes)?;
        let bytes = largest(&|weights| gradient_bytes(weights, world));
        let gradient_arena = Arena::new(backend, Kind::Gradients, gather.gradient_slots, bytes)?;
        let scratch_len = split.iter().map(|weights| scratch_bytes(weights)).max().unwrap_or(0);
        let scratch = self.backend.alloc(scratch_len, Memory::Device)?;
        let mut units = Vec::new();
        let mut first = 0;
        for (spec, weights) in self.units.iter().zip(&split) {
            let plan = UnitPlan {
                backend: &self.backend,
                world,
                spec,
                first,
                weights,
                slots: arena.buffers().cloned().collect(),
                gradient_slots: gradient_arena.buffers().cloned().collect(),
                scratch: &scratch,
            };
            units.push(plan.build()?);
            first += weights.len();
        }
        Ok(Planned { arena, gradient_arena, scratch, units })
    }
}

/// Names stand in errors, logs and messages between ranks.
fn check_name(what: &str, name: &str) -> Result<()> {
    if (1..=256).contains(&name.len()) && !name.contains(char::is_control) {
        return Ok(());
    }
    let shown: String = name.chars().take(64).collect();
    Err(Error::Config(format!(
        "{what} name `{}` has {} bytes; it must have 1 to 256, none of them a control character",
        shown.escape_debug(),
        name.len()
    )))
}

struct Planned<B: Backend> {
    arena: Arena<B>,
    gradient_arena: Arena<B>,
    scratch: Arc<B::Buffer>,
    units: Vec<crate::unit::Unit<B>>,
}

impl<B: Backend> Fsdp<B> {
    /// Begins the description of a model.
    pub fn builder(
        config: Config,
        backend: B,
        communicator: Arc<dyn Communicator<B>>,
    ) -> FsdpBuilder<B> {
        FsdpBuilder::new(config, backend, communicator)
    }

    /// Fills the shards, seeds every ring from them and makes the first scales.
    fn fill<E>(
        &self,
        init: &mut impl FnMut(&WeightSpec, Range<u64>) -> std::result::Result<Vec<f32>, E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        for (number, weight) in self.weights.iter().enumerate() {
            let rows = weight.sharding.range();
            let mut values = if rows.is_empty() {
                Vec::new()
            } else {
                init(&weight.spec, rows).map_err(|source| Error::Init {
                    weight: weight.spec.name.clone(),
                    source: Arc::from(source.into()),
                })?
            };
            if weight.spec.dtype == DType::Bf16 {
                for value in &mut values {
                    *value = scalar::bf16_to_f32(scalar::f32_to_bf16(*value));
                }
            }
            self.write_master(WeightId(number), &values)?;
            self.mark_modified(WeightId(number))?;
        }
        for weight in &mut self.lock().weights {
            weight.version = 1;
        }
        self.sync_blocking()?;
        self.backend.synchronize(&self.streams.compute)?;
        Ok(())
    }
}
