//! From a microbatch's full gradients to the shards' reduced ones.

use std::sync::Arc;

use gather8_collectives::Reduce;
use gather8_kernels::job::{Accumulate, Divide};
use gather8_kernels::{Backend, DType, Job, Span, Tensor};
use tracing::trace_span;

use crate::error::{Error, Result};
use crate::fsdp::{Fsdp, State};
use crate::spec::{UnitId, WeightId};
use crate::unit::{GradientPlace, Unit, gradient_bytes, gradient_place};

impl<B: Backend> Fsdp<B> {
    /// Begins a step of `microbatches` forward and backward passes; gradients are averaged over
    /// them and over the ranks. Without this call a step has one. Every rank passes the same number:
    /// the next [`sync`](Self::sync) finds out if one did not. Until the step's first forward pass a
    /// further call replaces it.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] once the step's first forward pass has begun, or for 0 microbatches.
    pub fn begin_step(&self, microbatches: u32) -> Result<()> {
        let mut state = self.lock();
        let problem = if microbatches == 0 {
            Some("a step needs at least 1 microbatch")
        } else if state.microbatch > 0 || state.weights.iter().any(|weight| weight.expected > 0) {
            Some("the step before has not ended: call step() or discard_gradients() first")
        } else {
            None
        };
        if let Some(problem) = problem {
            return Err(Error::OutOfOrder { call: "begin_step", problem: problem.into() });
        }
        if state.microbatches != microbatches {
            state.log.note_value("number", "microbatches", microbatches as f32);
        }
        state.microbatches = microbatches;
        Ok(())
    }

    /// With `true`, microbatches keep their full gradients on this rank and reduce nothing, until
    /// one runs with `false`. Every rank sets the same at the same place: the next
    /// [`sync`](Self::sync) finds out if one did not. Saves traffic; costs [`full_gradient_bytes`](Self::full_gradient_bytes)
    /// of memory on every rank.
    pub fn set_no_sync(&self, no_sync: bool) {
        let mut state = self.lock();
        if no_sync && state.units.iter().all(|unit| unit.kept.is_none()) {
            tracing::info!(bytes = self.full_gradient_bytes(), "no_sync keeps full gradients");
        }
        if state.no_sync != no_sync {
            state.log.note_value("no_sync", "gradients", f32::from(u8::from(no_sync)));
        }
        state.no_sync = no_sync;
    }

    /// Bytes that `no_sync` costs: the full gradients of every unit that is not held, in f32.
    pub fn full_gradient_bytes(&self) -> u64 {
        let units = self.units.iter().filter(|unit| !unit.held);
        units
            .filter_map(|unit| self.weights.get(unit.weights.clone()))
            .map(|weights| gradient_bytes(weights, self.world))
            .sum()
    }

    /// Takes this rank's gradient of a whole weight for the microbatch in progress, from the host.
    /// Gradients of several uses are added. When all that the unit's forward pass announced have
    /// arrived, they are divided by world × microbatches and reduced, and the unit is resharded.
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::OutOfOrder`] for a frozen weight or one whose forward pass
    /// announced no more gradients; a failure of the device or of a collective.
    pub fn gradient(&self, id: WeightId, values: &[f32]) -> Result<()> {
        let spec = &self.sharded(id)?.spec;
        if values.len() as u64 != spec.elements() {
            return Err(Error::Length {
                weight: spec.name.clone(),
                what: "its gradient",
                got: values.len() as u64,
                expected: spec.elements(),
            });
        }
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.explained(self.take_gradient(id, |state, part, add| {
            let compute = &self.streams.compute;
            if !add {
                return Ok(self.backend.upload(compute, bytes, part)?);
            }
            let staging = self.staging.sub(0..part.len())?;
            self.backend.upload(compute, bytes, &staging)?;
            self.add_staged(state, id, DType::F32, part)
        }))
    }

    /// The same from device memory, F32 or BF16, in the order of the compute stream.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient).
    pub fn gradient_from(&self, id: WeightId, values: &Tensor<B>) -> Result<()> {
        let spec = &self.sharded(id)?.spec;
        if !matches!(values.dtype, DType::F32 | DType::Bf16) {
            return Err(Error::Weight {
                weight: spec.name.clone(),
                problem: format!(
                    "its gradient must be f32 or bf16, not {}: convert it",
                    values.dtype.name()
                ),
            });
        }
        if values.elements() != spec.elements() {
            return Err(Error::Length {
                weight: spec.name.clone(),
                what: "its gradient",
                got: values.elements(),
                expected: spec.elements(),
            });
        }
        self.explained(self.take_gradient(id, |state, part, add| {
            let compute = &self.streams.compute;
            if !add && values.dtype == DType::F32 {
                return Ok(self.backend.copy(compute, &values.span, part)?);
            }
            if !add {
                self.backend.fill(compute, part, 0)?;
            }
            let staging = self.staging.sub(0..values.span.len())?;
            self.backend.copy(compute, &values.span, &staging)?;
            self.add_staged(state, id, values.dtype, part)
        }))
    }

    /// Adds what was copied into the staging memory. Its plans are made once: they are over memory
    /// of our own, whatever memory gradients arrive in.
    fn add_staged(
        &self,
        state: &mut State<B>,
        id: WeightId,
        dtype: DType,
        part: &Span<B>,
    ) -> Result<()> {
        let place = state.unit(self.unit_of(id)?)?.gradients.unwrap_or(KEPT);
        let plan = match state.add.get(&(id.0, place, dtype)) {
            Some(plan) => Arc::clone(plan),
            None => {
                let bytes = part.len() / DType::F32.size() * dtype.size();
                let src = Tensor::new(self.staging.sub(0..bytes)?, dtype)?;
                let dst = Tensor::new(part.clone(), DType::F32)?;
                let plan = self.backend.plan(&[Job::Accumulate(Accumulate { src, dst })])?;
                let plan = Arc::new(plan);
                state.add.insert((id.0, place, dtype), Arc::clone(&plan));
                plan
            }
        };
        Ok(self.backend.run(&self.streams.compute, &plan)?)
    }

    fn take_gradient(
        &self,
        id: WeightId,
        write: impl FnOnce(&mut State<B>, &Span<B>, bool) -> Result<()>,
    ) -> Result<()> {
        self.check()?;
        let sharded = self.sharded(id)?;
        let unit_id = self.unit_of(id)?;
        let mut state = self.lock();
        let state = &mut *state;
        let refuse = |problem: String| Err(Error::OutOfOrder { call: "gradient", problem });
        if !sharded.spec.trainable {
            return refuse(format!("weight `{}` is frozen and takes none", sharded.spec.name));
        }
        let weight = state.weight(id)?;
        if weight.arrived >= weight.expected {
            return refuse(format!(
                "weight `{}` has {} of {} announced gradients already: ask for the weight in Phase::Forward once per use",
                sharded.spec.name, weight.arrived, weight.expected
            ));
        }
        let add = weight.filled;
        self.open_gradients(state, unit_id)?;
        let local = id.0 - self.unit(unit_id)?.weights.start;
        let part = self.gradient_place(state, unit_id)?.full.get(local).cloned().flatten();
        let Some(part) = part else {
            return refuse(format!("weight `{}` has no gradient memory", sharded.spec.name));
        };
        write(state, &part.sub(0..sharded.spec.elements() * 4)?, add)?;
        let weight = state.weight(id)?;
        weight.filled = true;
        weight.arrived += 1;
        weight.arrived_in_step += 1;
        if !self.awaits_gradients(state, unit_id)? {
            if !state.no_sync {
                self.reduce_unit(state, unit_id)?;
            }
            if !self.unit(unit_id)?.held && !state.is_guarded(unit_id)? {
                self.release(state, unit_id)?;
            }
        }
        Ok(())
    }

    /// Gives the unit memory for full gradients if it has none.
    fn open_gradients(&self, state: &mut State<B>, id: UnitId) -> Result<()> {
        if state.unit(id)?.gradients.is_some() {
            return Ok(());
        }
        let unit = self.unit(id)?;
        let (number, fences) = if unit.held {
            (0, std::mem::take(&mut state.unit(id)?.gradient_fences))
        } else if state.no_sync || state.unit(id)?.kept.is_some() {
            // Kept until a microbatch with sync: memory of the unit's own, made at the first use.
            if state.unit(id)?.kept.is_none() {
                let weights = self.weights.get(unit.weights.clone()).unwrap_or_default();
                let bytes = gradient_bytes(weights, self.world);
                let buffer = self.backend.alloc(bytes, gather8_kernels::Memory::Device)?;
                let place = gradient_place(weights, self.world, &buffer, &self.scratch)?;
                state.unit(id)?.kept = Some(place);
            }
            (KEPT, std::mem::take(&mut state.unit(id)?.gradient_fences))
        } else {
            let taken = state.gradient_arena.take(&unit.name)?;
            (taken.number, taken.fences)
        };
        for fence in &fences {
            self.backend.wait(&self.streams.compute, fence, "gradient-into-free-slot")?;
        }
        state.unit(id)?.gradients = Some(number);
        Ok(())
    }

    fn gradient_place<'a>(
        &'a self,
        state: &'a mut State<B>,
        id: UnitId,
    ) -> Result<&'a GradientPlace<B>> {
        let unit = self.unit(id)?;
        let state = state.unit(id)?;
        let place = match state.gradients {
            Some(KEPT) => state.kept.as_ref(),
            Some(number) => unit.gradients.get(number),
            None => None,
        };
        place.ok_or_else(|| Error::OutOfOrder {
            call: "gradient",
            problem: format!("unit `{}` has no gradients in progress", unit.name),
        })
    }

    /// Divides, reduces and scatters a unit's full gradients.
    fn reduce_unit(&self, state: &mut State<B>, id: UnitId) -> Result<()> {
        let unit = self.unit(id)?;
        let Some(number) = state.unit(id)?.gradients else { return Ok(()) };
        let _entered =
            trace_span!("reduce_scatter", unit = %unit.name, bytes = unit.reduced_bytes).entered();
        let (compute, reduce) = (&self.streams.compute, &self.streams.reduce);
        for weight_number in unit.weights.clone() {
            if state.weight(WeightId(weight_number))?.filled {
                continue;
            }
            let local = weight_number - unit.weights.start;
            let part = self.gradient_place(state, id)?.full.get(local).cloned().flatten();
            if let Some(part) = part {
                self.backend.fill(compute, &part, 0)?;
            }
        }
        let plan = self.divide(state, id, number)?;
        self.backend.run(compute, &plan)?;
        let divided = self.backend.record(compute)?;
        self.backend.wait(reduce, &divided, "reduce-after-divide")?;
        let first = state.unit(id)?.reductions == 0;
        state.log.note("reduce-scatter", &unit.name, unit.reduced_bytes);
        state.traffic.reduced_bytes += unit.reduced_bytes;
        let place = self.gradient_place(state, id)?;
        let parts = if first { &place.first } else { &place.later };
        let op = self.reduce.op("reduce-scatter", &unit.name);
        self.reduce.communicator.reduce_scatter(op, Reduce::SumF32, parts, reduce)?;
        if let (false, Some(accumulate)) = (first, &unit.accumulate) {
            self.backend.run(reduce, accumulate)?;
        }
        let reduced = self.backend.record(reduce)?;
        state.last_reduce = Some(reduced.clone());
        for weight_number in unit.weights.clone() {
            state.weight(WeightId(weight_number))?.filled = false;
        }
        let shares_arena = !unit.held && number != KEPT;
        let unit_state = state.unit(id)?;
        unit_state.reductions += 1;
        unit_state.gradients = None;
        if shares_arena {
            state.gradient_arena.give_back(number, vec![reduced]);
        } else {
            unit_state.gradient_fences = vec![reduced];
        }
        Ok(())
    }

    fn divide(&self, state: &mut State<B>, id: UnitId, number: usize) -> Result<Arc<B::Plan>> {
        let key = (id.0, number, state.microbatches);
        if let Some(plan) = state.divide.get(&key) {
            return Ok(Arc::clone(plan));
        }
        let divisor = self.world as f32 * state.microbatches as f32;
        let mut jobs = Vec::new();
        for part in self.gradient_place(state, id)?.full.iter().flatten() {
            let tensor = Tensor::new(part.clone(), DType::F32)?;
            jobs.push(Job::Divide(Divide { src: tensor.clone(), dst: tensor, divisor }));
        }
        let plan = Arc::new(self.backend.plan(&jobs)?);
        state.divide.insert(key, Arc::clone(&plan));
        Ok(plan)
    }

    /// Ends a microbatch: everything gathered is resharded, and every announced gradient must have
    /// arrived. What had no gradients at all, an evaluation say, is ended too and counts as none; so a
    /// rank that has no samples for a microbatch gives gradients of zero.
    ///
    /// # Errors
    /// [`Error::MissingGradient`]; a failure of the device or of a collective.
    pub fn finish_backward(&self) -> Result<()> {
        self.check()?;
        let mut state = self.lock();
        let state = &mut *state;
        for number in 0..self.units.len() {
            self.release(state, UnitId(number))?;
        }
        state.entered = None;
        // Looked at before any is reset, so that a call that fails can be repeated.
        for (weight, number) in self.weights.iter().zip(0..) {
            let counts = state.weight(WeightId(number))?;
            if counts.arrived != counts.expected {
                let (arrived, expected) = (counts.arrived, counts.expected);
                return Err(self.missing(weight.spec.name.clone(), number, arrived, expected)?);
            }
        }
        state.microbatch += u32::from(state.weights.iter().any(|counts| counts.arrived > 0));
        for counts in &mut state.weights {
            counts.arrived = 0;
            counts.expected = 0;
        }
        Ok(())
    }

    pub(crate) fn missing(
        &self,
        weight: String,
        number: usize,
        arrived: u32,
        expected: u32,
    ) -> Result<Error> {
        let unit = self.unit(self.unit_of(WeightId(number))?)?.name.clone();
        Ok(Error::MissingGradient { weight, unit, arrived, expected })
    }

    /// Says that a unit takes no part in this step: its weights need no gradients and stay as they
    /// are. Gradients that its forward pass has announced are no longer expected. Every rank must say
    /// so.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] if one of its gradients has arrived in this step; [`Error::Unknown`].
    pub fn declare_unused(&self, unit: UnitId) -> Result<()> {
        let Unit { name, weights, .. } = self.unit(unit)?;
        let mut state = self.lock();
        for number in weights.clone() {
            if state.weight(WeightId(number))?.arrived_in_step > 0 {
                let weight = &self.sharded(WeightId(number))?.spec.name;
                return Err(Error::OutOfOrder {
                    call: "declare_unused",
                    problem: format!(
                        "a gradient of weight `{weight}` of unit `{name}` has arrived in this step: take the step with it, or forget all of them with discard_gradients()"
                    ),
                });
            }
        }
        for number in weights.clone() {
            state.weight(WeightId(number))?.expected = 0;
        }
        state.log.note("declare-unused", name, 0);
        state.unit(unit)?.unused = true;
        Ok(())
    }

    /// Forgets the gradients of the step in progress.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn discard_gradients(&self) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        for number in 0..self.units.len() {
            self.release(state, UnitId(number))?;
        }
        self.clear_gradients(state)
    }

    pub(crate) fn clear_gradients(&self, state: &mut State<B>) -> Result<()> {
        for (number, unit) in self.units.iter().enumerate() {
            let unit_state = state.unit(UnitId(number))?;
            unit_state.reductions = 0;
            unit_state.unused = false;
            if let Some(place) = unit_state.gradients.take() {
                // Written on the compute stream, as the next user's first write will be.
                if !unit.held && place != KEPT {
                    state.gradient_arena.give_back(place, Vec::new());
                }
            }
        }
        for weight in &mut state.weights {
            weight.expected = 0;
            weight.arrived = 0;
            weight.arrived_in_step = 0;
            weight.filled = false;
        }
        state.microbatch = 0;
        state.microbatches = 1;
        state.entered = None;
        Ok(())
    }
}

/// The number of a unit's own place for gradients that are kept over microbatches.
const KEPT: usize = usize::MAX;
