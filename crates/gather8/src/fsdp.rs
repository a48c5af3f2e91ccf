//! The runtime: what it consists of and what it knows about the step in progress.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gather8_collectives::order::OrderLog;
use gather8_collectives::table::AmaxTable;
use gather8_kernels::{Backend, DType, Span, Tensor};

use crate::arena::{Arena, Fences};
use crate::channel::Channel;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::optimizer::Optimizer;
use crate::spec::{UnitId, WeightId, WeightSpec};
use crate::unit::{GradientPlace, Unit};
use crate::view::Residence;
use crate::weight::ShardedWeight;

/// Where in the step a weight is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// The forward pass of a training step: every use announces one gradient.
    Forward,
    /// The backward pass.
    Backward,
    /// A forward pass without a backward pass: evaluation, or the recomputation of activations.
    Inference,
}

/// A fully sharded model on one rank.
///
/// Every rank makes the same calls in the same order. Calls may come from any thread, one at a
/// time; they issue work and return, except where they say that they wait.
pub struct Fsdp<B: Backend> {
    pub(crate) backend: B,
    pub(crate) config: Config,
    pub(crate) world: u32,
    pub(crate) rank: u32,
    pub(crate) weights: Vec<ShardedWeight<B>>,
    pub(crate) units: Vec<Unit<B>>,
    pub(crate) unit_of: Vec<UnitId>,
    pub(crate) by_name: HashMap<String, WeightId>,
    pub(crate) table: AmaxTable<B>,
    /// The table's slots after those of the weights.
    pub(crate) activation_slots: BTreeMap<String, usize>,
    pub(crate) optimizer: Optimizer<B>,
    pub(crate) streams: Streams<B>,
    pub(crate) gather: Channel<B>,
    pub(crate) reduce: Channel<B>,
    pub(crate) amax: Channel<B>,
    /// A u32 that casts count saturated values in.
    pub(crate) saturated: Option<Span<B>>,
    /// Full gradients of a weight's second use, before they are added.
    pub(crate) staging: Span<B>,
    /// What `reduce-scatter`s of later microbatches land in.
    pub(crate) scratch: Arc<B::Buffer>,
    pub(crate) state: Mutex<State<B>>,
}

/// The rank's streams.
pub(crate) struct Streams<B: Backend> {
    pub(crate) compute: B::Stream,
    pub(crate) gather: B::Stream,
    pub(crate) reduce: B::Stream,
    pub(crate) amax: B::Stream,
}

/// What changes from call to call.
pub(crate) struct State<B: Backend> {
    pub(crate) arena: Arena<B>,
    pub(crate) gradient_arena: Arena<B>,
    pub(crate) weights: Vec<WeightState>,
    pub(crate) units: Vec<UnitState<B>>,
    /// Units that are resharded after use, in the order of their first use.
    pub(crate) order: Vec<UnitId>,
    /// The unit that a weight was last asked of, of those that are not held.
    pub(crate) entered: Option<(UnitId, Phase)>,
    pub(crate) log: OrderLog,
    /// Where the log stood at the last two syncs.
    pub(crate) sync_positions: [u64; 2],
    /// Weights whose amaxes the next sync must take from the shards themselves.
    pub(crate) dirty: Vec<WeightId>,
    /// step() has run, sync() has not.
    pub(crate) stepped: bool,
    /// After the last sync; the gather stream waits for it once.
    pub(crate) synced: Option<B::Event>,
    pub(crate) gather_waits_for_sync: bool,
    /// After the last operation of the gather stream and of the reduce stream.
    pub(crate) last_gather: Option<B::Event>,
    pub(crate) last_reduce: Option<B::Event>,
    pub(crate) microbatches: u32,
    pub(crate) microbatch: u32,
    pub(crate) no_sync: bool,
    /// A capture has failed half-way.
    pub(crate) broken: bool,
    /// Launches that divide a unit's gradients, by unit, place and number of microbatches.
    pub(crate) divide: HashMap<(usize, usize, u32), Arc<B::Plan>>,
    /// Launches that add a gradient from the staging memory, by weight, place and type.
    pub(crate) add: HashMap<(usize, usize, DType), Arc<B::Plan>>,
    /// Launches that record an amax, by slot and bank, and what they read.
    pub(crate) record: HashMap<(usize, usize), (Tensor<B>, B::Plan)>,
    pub(crate) traffic: Traffic,
}

/// Bytes of collectives that this rank has issued so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// World × padded shard bytes of every gather.
    pub gathered_bytes: u64,
    /// World × padded shard bytes (f32) of every gradient reduction.
    pub reduced_bytes: u64,
    /// Gathers of a unit.
    pub gathers: u64,
}

impl Traffic {
    pub(crate) fn since(self, then: Self) -> Self {
        Self {
            gathered_bytes: self.gathered_bytes - then.gathered_bytes,
            reduced_bytes: self.reduced_bytes - then.reduced_bytes,
            gathers: self.gathers - then.gathers,
        }
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.gathered_bytes += more.gathered_bytes;
        self.reduced_bytes += more.reduced_bytes;
        self.gathers += more.gathers;
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct WeightState {
    /// Counts changes of the shard, from 1.
    pub(crate) version: u64,
    /// The version that the float8 bytes are of; 0 for none.
    pub(crate) bytes_version: u64,
    /// The version at the last sync.
    pub(crate) synced: u64,
    /// Gradients that this microbatch's forward pass announced, and that have arrived.
    pub(crate) expected: u32,
    pub(crate) arrived: u32,
    /// The same over the step.
    pub(crate) arrived_in_step: u32,
    /// Its part of the unit's full gradient holds something.
    pub(crate) filled: bool,
}

pub(crate) struct UnitState<B: Backend> {
    pub(crate) residence: Option<Arc<Residence<B>>>,
    /// The unit is gathered and has not been used yet.
    pub(crate) ahead: bool,
    /// Number of the place that its full gradients are in.
    pub(crate) gradients: Option<usize>,
    /// The unit's own place for gradients that are kept over microbatches.
    pub(crate) kept: Option<GradientPlace<B>>,
    /// Microbatches whose gradients have been scattered in this step.
    pub(crate) reductions: u32,
    /// Uses of memory that the unit does not share: its own places, or borrowed shards.
    pub(crate) fences: Fences<B>,
    pub(crate) gradient_fences: Fences<B>,
    /// Declared unused for this step.
    pub(crate) unused: bool,
}

impl<B: Backend> Default for UnitState<B> {
    fn default() -> Self {
        Self {
            residence: None,
            ahead: false,
            gradients: None,
            kept: None,
            reductions: 0,
            fences: Vec::new(),
            gradient_fences: Vec::new(),
            unused: false,
        }
    }
}

impl<B: Backend> Fsdp<B> {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in the group.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The configuration that it was built with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The stream on which views wait, gradients are taken and the optimizer runs. A trainer's own
    /// kernels go here, or on a stream that is [registered](crate::WeightView::register).
    pub fn compute_stream(&self) -> &B::Stream {
        &self.streams.compute
    }

    /// A weight by name.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn weight_id(&self, name: &str) -> Result<WeightId> {
        self.by_name.get(name).copied().ok_or_else(|| {
            Error::unknown_name("weight", name, self.weights().map(|spec| &*spec.name))
        })
    }

    /// A unit by name.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn unit_id(&self, name: &str) -> Result<UnitId> {
        let position = self.units.iter().position(|unit| unit.name == name);
        position.map(UnitId).ok_or_else(|| {
            Error::unknown_name("unit", name, self.units.iter().map(|unit| &*unit.name))
        })
    }

    /// Every weight's description, in order of their ids.
    pub fn weights(&self) -> impl Iterator<Item = &WeightSpec> {
        self.weights.iter().map(|weight| &weight.spec)
    }

    /// The sharded weight.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn sharded(&self, id: WeightId) -> Result<&ShardedWeight<B>> {
        self.weights
            .get(id.0)
            .ok_or_else(|| Error::unknown_number("weight", id.0, self.weights.len()))
    }

    pub(crate) fn unit(&self, id: UnitId) -> Result<&Unit<B>> {
        self.units.get(id.0).ok_or_else(|| Error::unknown_number("unit", id.0, self.units.len()))
    }

    /// Bytes issued so far.
    pub fn traffic(&self) -> Traffic {
        self.lock().traffic
    }

    /// A weight's version: 1 after the start, one more after every step and every other change. Steps
    /// that the device skips count too: the host does not wait to learn of them.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn version(&self, id: WeightId) -> Result<u64> {
        self.sharded(id)?;
        Ok(self.lock().weight(id)?.version)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State<B>> {
        // A panic in a caller's thread leaves the bookkeeping as it was between two statements;
        // the device's own order checks still hold.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Drop for Fsdp<B> {
    /// The streams end what they were given before they go, and a gather in flight waits for peers up
    /// to its deadline: not while a panic unwinds.
    fn drop(&mut self) {
        if self.world > 1 && std::thread::panicking() {
            for channel in [&self.gather, &self.reduce, &self.amax] {
                channel.communicator.abort_handle().abort("its thread panicked");
            }
        }
    }
}

impl<B: Backend> State<B> {
    pub(crate) fn weight(&mut self, id: WeightId) -> Result<&mut WeightState> {
        let count = self.weights.len();
        self.weights.get_mut(id.0).ok_or_else(|| Error::unknown_number("weight", id.0, count))
    }

    /// True if a guard keeps the unit gathered.
    pub(crate) fn is_guarded(&mut self, id: UnitId) -> Result<bool> {
        let residence = self.unit(id)?.residence.as_ref();
        Ok(residence.is_some_and(|residence| residence.guards.load(Ordering::Acquire) > 0))
    }

    pub(crate) fn unit(&mut self, id: UnitId) -> Result<&mut UnitState<B>> {
        let count = self.units.len();
        self.units.get_mut(id.0).ok_or_else(|| Error::unknown_number("unit", id.0, count))
    }
}
