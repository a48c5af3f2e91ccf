//! Gathering units ahead of use and giving their memory back after.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use gather8_kernels::Backend;
use tracing::trace_span;

use crate::error::{Error, Result};
use crate::fsdp::{Fsdp, Phase, State};
use crate::spec::{UnitId, WeightId};
use crate::view::{Residence, WeightView};

/// A unit that stays gathered as long as this or another guard of it lives: the way for trainers
/// that know when a block begins and ends. What ends every stay ends this one too:
/// [`finish_backward`](Fsdp::finish_backward), [`step`](Fsdp::step), [`reshard`](Fsdp::reshard) and
/// [`discard_gradients`](Fsdp::discard_gradients); then the guard is of no effect.
pub struct UnitGuard<'a, B: Backend> {
    fsdp: &'a Fsdp<B>,
    unit: UnitId,
    residence: Arc<Residence<B>>,
    /// Counted among the residence's guards.
    counts: bool,
}

impl<B: Backend> UnitGuard<'_, B> {
    /// One of the unit's weights.
    ///
    /// # Errors
    /// [`Error::Weight`] if the weight is not of this unit; [`Error::UsedAfterReshard`].
    pub fn weight(&self, id: WeightId) -> Result<WeightView<B>> {
        let unit = self.fsdp.unit(self.unit)?;
        if !unit.weights.contains(&id.0) {
            return Err(Error::Weight {
                weight: self.fsdp.sharded(id)?.spec.name.clone(),
                problem: format!("it is not part of unit `{}`", unit.name),
            });
        }
        let mut state = self.fsdp.lock();
        let current = state.unit(self.unit)?.residence.as_ref();
        if !current.is_some_and(|residence| Arc::ptr_eq(residence, &self.residence)) {
            return Err(Error::UsedAfterReshard {
                weight: self.fsdp.sharded(id)?.spec.name.clone(),
                unit: unit.name.clone(),
            });
        }
        self.fsdp.view(&mut state, id)
    }

    /// Leaves the unit gathered until something else reshards it: the end of another guard, too.
    pub fn keep(mut self) {
        self.counts = false;
        self.residence.guards.fetch_sub(1, Ordering::AcqRel);
    }

    /// Gives the unit's memory back now, if this is its last guard, and says if that failed; dropping
    /// does the same in silence.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn reshard(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.counts) {
            return Ok(());
        }
        let mut state = self.fsdp.lock();
        let last = self.residence.guards.fetch_sub(1, Ordering::AcqRel) == 1;
        let current = state.unit(self.unit)?.residence.as_ref();
        // A later stay is not this guard's.
        if last && current.is_some_and(|residence| Arc::ptr_eq(residence, &self.residence)) {
            self.fsdp.release(&mut state, self.unit)?;
        }
        Ok(())
    }
}

impl<B: Backend> Drop for UnitGuard<'_, B> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!(%error, "reshard");
        }
    }
}

impl<B: Backend> Fsdp<B> {
    /// A gathered weight, for autograd engines that have no hooks around a block.
    ///
    /// Forward: its unit is gathered if it is not resident, units of other weights that are not
    /// held are resharded (the last one stays for the backward pass), the next unit in the order of
    /// the first pass is gathered ahead, and one gradient is expected. Backward: the same in
    /// reverse, but units are resharded when their last expected gradient has
    /// [arrived](Self::gradient), or, if they expect none, when another unit is asked for. A unit that
    /// is used several times with others between is best [held](crate::UnitSpec::held).
    ///
    /// # Errors
    /// [`Error::StaleBytes`], [`Error::ArenaExhausted`], a failure of a collective.
    pub fn weight(&self, id: WeightId, phase: Phase) -> Result<WeightView<B>> {
        self.check()?;
        self.explained(self.weight_unexplained(id, phase))
    }

    fn weight_unexplained(&self, id: WeightId, phase: Phase) -> Result<WeightView<B>> {
        let spec = &self.sharded(id)?.spec;
        let unit_id = self.unit_of(id)?;
        let mut state = self.lock();
        if phase == Phase::Forward && spec.trainable && state.unit(unit_id)?.unused {
            return Err(Error::OutOfOrder {
                call: "weight",
                problem: format!(
                    "unit `{}` of weight `{}` was declared unused for this step, so its gradients would be lost: ask for it in Phase::Inference",
                    self.unit(unit_id)?.name,
                    spec.name
                ),
            });
        }
        let held = self.unit(unit_id)?.held;
        let enters = !held
            && (state.entered != Some((unit_id, phase))
                || state.unit(unit_id)?.residence.is_none());
        if enters {
            self.leave_others(&mut state, unit_id, phase)?;
        }
        self.ensure(&mut state, unit_id)?;
        self.enter(&mut state, unit_id)?;
        if enters {
            state.entered = Some((unit_id, phase));
            if !state.order.contains(&unit_id) {
                state.order.push(unit_id);
            }
            self.prefetch_around(&mut state, unit_id, phase)?;
        }
        if phase == Phase::Forward && self.sharded(id)?.spec.trainable {
            state.weight(id)?.expected += 1;
        }
        self.view(&mut state, id)
    }

    /// Gathers a unit and keeps it until the guard is gone.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn unshard(&self, unit: UnitId) -> Result<UnitGuard<'_, B>> {
        self.check()?;
        let issue = || {
            let mut state = self.lock();
            let residence = self.ensure(&mut state, unit)?;
            self.enter(&mut state, unit)?;
            residence.guards.fetch_add(1, Ordering::AcqRel);
            Ok(residence)
        };
        let residence = self.explained(issue())?;
        Ok(UnitGuard { fsdp: self, unit, residence, counts: true })
    }

    /// Starts gathering a unit that is needed soon. Does nothing if it is resident.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn prefetch(&self, unit: UnitId) -> Result<()> {
        self.check()?;
        let mut state = self.lock();
        if state.unit(unit)?.residence.is_none() {
            self.ensure(&mut state, unit)?;
        }
        Ok(())
    }

    /// Gives a unit's gathered memory back; views of its weights become invalid. Does nothing if it
    /// is not resident.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn reshard(&self, unit: UnitId) -> Result<()> {
        let mut state = self.lock();
        self.release(&mut state, unit)
    }

    /// True while a unit is gathered.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn is_resident(&self, unit: UnitId) -> Result<bool> {
        Ok(self.lock().unit(unit)?.residence.is_some())
    }

    pub(crate) fn unit_of(&self, id: WeightId) -> Result<UnitId> {
        self.sharded(id)?;
        self.unit_of
            .get(id.0)
            .copied()
            .ok_or_else(|| Error::unknown_number("weight", id.0, self.weights.len()))
    }

    fn view(&self, state: &mut State<B>, id: WeightId) -> Result<WeightView<B>> {
        let weight = self.sharded(id)?;
        let unit_id = self.unit_of(id)?;
        let unit = self.unit(unit_id)?;
        let residence = state.unit(unit_id)?.residence.clone();
        let residence = residence.ok_or_else(|| Error::UsedAfterReshard {
            weight: weight.spec.name.clone(),
            unit: unit.name.clone(),
        })?;
        let unsharded = unit
            .places
            .get(residence.place)
            .and_then(|place| place.unsharded.get(id.0 - unit.weights.start))
            .cloned()
            .ok_or_else(|| Error::Weight {
                weight: weight.spec.name.clone(),
                problem: "its unit was gathered to a place that does not exist; report this".into(),
            })?;
        Ok(WeightView {
            backend: self.backend.clone(),
            residence,
            unsharded,
            name: weight.spec.name.clone(),
            shape: weight.spec.shape.clone(),
            stream: self.streams.compute.clone(),
        })
    }

    /// Reshards what `entering` a unit leaves behind.
    fn leave_others(&self, state: &mut State<B>, entering: UnitId, phase: Phase) -> Result<()> {
        // First what has been used. What is only gathered ahead goes if its slot is needed then.
        for ahead in [false, true] {
            for (number, unit) in self.units.iter().enumerate() {
                let other = UnitId(number);
                let there = state.unit(other)?.residence.is_some() && !unit.held;
                if other == entering || !there || state.is_guarded(other)? {
                    continue;
                }
                if state.unit(other)?.ahead != ahead {
                    continue;
                }
                let keep = if ahead {
                    state.unit(entering)?.residence.is_some() || state.arena.free() > 0
                } else {
                    phase == Phase::Backward && self.awaits_gradients(state, other)?
                };
                if !keep {
                    self.release(state, other)?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn awaits_gradients(&self, state: &mut State<B>, unit: UnitId) -> Result<bool> {
        for id in self.unit(unit)?.weights.clone() {
            let weight = state.weight(WeightId(id))?;
            if weight.arrived < weight.expected {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn prefetch_around(&self, state: &mut State<B>, unit: UnitId, phase: Phase) -> Result<()> {
        let Some(position) = state.order.iter().position(|&other| other == unit) else {
            return Ok(());
        };
        for distance in 1..=self.config.gather.prefetch as usize {
            let neighbour = match phase {
                Phase::Backward => position.checked_sub(distance),
                Phase::Forward | Phase::Inference => Some(position + distance),
            };
            let Some(&next) = neighbour.and_then(|at| state.order.get(at)) else { break };
            if state.unit(next)?.residence.is_some() {
                continue;
            }
            if state.arena.free() == 0 {
                break;
            }
            self.ensure(state, next)?;
        }
        Ok(())
    }

    /// Makes the compute stream wait for a unit that is now used for the first time.
    fn enter(&self, state: &mut State<B>, id: UnitId) -> Result<()> {
        let unit = state.unit(id)?;
        if !std::mem::take(&mut unit.ahead) {
            return Ok(());
        }
        if let Some(residence) = &unit.residence {
            self.backend.wait(&self.streams.compute, &residence.ready, "use-after-gather")?;
            residence.add_consumer(&self.streams.compute);
        }
        Ok(())
    }

    /// Casts what must be cast and gathers the unit, ahead of use, unless it is resident.
    fn ensure(&self, state: &mut State<B>, id: UnitId) -> Result<Arc<Residence<B>>> {
        if let Some(residence) = &state.unit(id)?.residence {
            return Ok(Arc::clone(residence));
        }
        let unit = self.unit(id)?;
        let span = trace_span!("unshard", unit = %unit.name);
        let _entered = span.enter();
        let stale = self.refuse_stale(state, id)?;
        let on = &self.streams.gather;
        if state.gather_waits_for_sync {
            if let Some(synced) = &state.synced {
                self.backend.wait(on, synced, "gather-after-sync")?;
            }
            state.gather_waits_for_sync = false;
        }
        let (place_number, fences) = if unit.held {
            (0, std::mem::take(&mut state.unit(id)?.fences))
        } else {
            let taken = state.arena.take(&unit.name)?;
            let mut fences = taken.fences;
            fences.append(&mut state.unit(id)?.fences);
            (taken.number, fences)
        };
        for fence in &fences {
            self.backend.wait(on, fence, "gather-into-free-slot")?;
        }
        if let (Some(cast), true) = (&unit.cast, stale) {
            let _entered = trace_span!("cast", unit = %unit.name).entered();
            self.backend.run(on, cast)?;
            for number in unit.weights.clone() {
                let weight = state.weight(WeightId(number))?;
                weight.bytes_version = weight.version;
            }
        }
        let place = unit.places.get(place_number).ok_or_else(|| Error::Unknown {
            what: "unit",
            which: format!("`{}`'s slot {place_number}", unit.name),
            known: unit.places.len().to_string(),
        })?;
        if !place.parts.is_empty() {
            let _entered =
                trace_span!("all_gather", unit = %unit.name, bytes = unit.gathered_bytes).entered();
            let op = self.gather.op("all-gather", &unit.name);
            state.log.note(op.name, op.unit, unit.gathered_bytes);
            self.gather.communicator.all_gather(op, &place.parts, on)?;
        }
        state.traffic.gathered_bytes += unit.gathered_bytes;
        state.traffic.gathers += 1;
        let ready = self.backend.record(on)?;
        state.last_gather = Some(ready.clone());
        state.unit(id)?.ahead = true;
        let residence = Arc::new(Residence {
            unit_name: unit.name.clone(),
            place: place_number,
            ready,
            released: AtomicBool::new(false),
            guards: AtomicUsize::new(0),
            consumers: Mutex::new(Vec::new()),
        });
        state.unit(id)?.residence = Some(Arc::clone(&residence));
        Ok(residence)
    }

    /// True if a float8 weight of the unit must be cast; an error if a weight was changed and the ranks
    /// have not synced since: scales are not known yet, and the gather would not wait for the change.
    fn refuse_stale(&self, state: &mut State<B>, id: UnitId) -> Result<bool> {
        let mut stale = false;
        for number in self.unit(id)?.weights.clone() {
            let weight_id = WeightId(number);
            let sharded = self.sharded(weight_id)?;
            let weight = state.weight(weight_id)?;
            let unsynced = weight.version != weight.synced;
            if sharded.float8.is_none() && unsynced {
                return Err(Error::Unsynced { weight: sharded.spec.name.clone() });
            }
            if sharded.float8.is_none() || weight.bytes_version == weight.version {
                continue;
            }
            if unsynced {
                return Err(Error::StaleBytes {
                    weight: sharded.spec.name.clone(),
                    bytes: weight.bytes_version,
                    weight_version: weight.version,
                });
            }
            stale = true;
        }
        Ok(stale)
    }

    pub(crate) fn release(&self, state: &mut State<B>, id: UnitId) -> Result<()> {
        let Some(residence) = state.unit(id)?.residence.take() else { return Ok(()) };
        let unit = self.unit(id)?;
        let _entered = trace_span!("reshard", unit = %unit.name).entered();
        residence.released.store(true, Ordering::Release);
        state.unit(id)?.ahead = false;
        let fences = residence
            .consumers()
            .iter()
            .map(|stream| self.backend.record(stream))
            .collect::<Result<Vec<_>, _>>()?;
        // Views read what is the unit's own: its place if it is held, the shards and their bytes in
        // a world of 1, and in any world the records of float8 bytes, which the next cast rewrites.
        let borrowed = unit.places.get(residence.place).is_some_and(|place| place.parts.is_empty());
        if borrowed || unit.held || unit.cast.is_some() {
            state.unit(id)?.fences = fences.clone();
        }
        if !unit.held {
            state.arena.give_back(residence.place, fences);
        }
        Ok(())
    }
}
