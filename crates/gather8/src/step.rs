//! The optimizer step and the sync that follows it.

use std::sync::Arc;

use gather8_collectives::Reduce;
use gather8_kernels::job::Amax;
use gather8_kernels::layout::ControlRecord;
use gather8_kernels::{Backend, Job, Tensor};
use tracing::trace_span;

use crate::error::{Error, Result};
use crate::fsdp::{Fsdp, State};
use crate::optimizer::{GROUP_BYTES, group_record};
use crate::spec::WeightId;

/// What a step decided; reading it waits for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StepReport {
    /// Steps done.
    pub steps: u64,
    /// Steps skipped because a gradient held a NaN or an infinity.
    pub skipped: u64,
    /// The last step was one of them.
    pub found_inf: bool,
    /// The global gradient norm of the last step, before clipping. Elements that are NaN or infinite
    /// are left out: they are what `found_inf` tells.
    pub grad_norm: f64,
    /// What the gradients were multiplied with.
    pub factor: f32,
    /// The largest amax of any float8 weight at the last sync.
    pub amax_max: f32,
    /// Values that casts have saturated since the last report, if the configuration counts them.
    pub saturated: u64,
}

impl<B: Backend> Fsdp<B> {
    /// One optimizer step over every trainable shard: global norm, clipping, AdamW. Issued, not
    /// waited for. [`sync`](Self::sync) must follow.
    ///
    /// # Errors
    /// [`Error::StepWithoutSync`]; [`Error::MissingGradient`]; [`Error::OutOfOrder`] if the step
    /// had fewer or more microbatches than announced; a failure of the device or of a collective.
    pub fn step(&self) -> Result<()> {
        self.check()?;
        self.explained(self.step_unexplained())
    }

    fn step_unexplained(&self) -> Result<()> {
        if self.lock().weights.iter().any(|weight| weight.expected > 0) {
            self.finish_backward()?;
        }
        let mut state = self.lock();
        let state = &mut *state;
        self.refuse_step(state)?;
        let _entered = trace_span!("optimizer").entered();
        for number in 0..self.units.len() {
            // Changing a weight that is in use would change what the user sees.
            self.release(state, crate::spec::UnitId(number))?;
        }
        let compute = &self.streams.compute;
        if let Some(reduced) = &state.last_reduce {
            self.backend.wait(compute, reduced, "norm-after-reduce")?;
        }
        let any_unused = state.units.iter().any(|unit| unit.unused);
        if any_unused {
            self.clear_unused(state)?;
        }
        self.exchange_norm(state)?;
        if let Some(gathered) = &state.last_gather {
            self.backend.wait(compute, gathered, "step-after-gather")?;
        }
        if let Some(synced) = &state.synced {
            // Not implied by the gather: a sync may have come after it.
            self.backend.wait(compute, synced, "step-after-sync")?;
        }
        for unit in &state.units {
            for fence in &unit.fences {
                self.backend.wait(compute, fence, "step-after-use")?;
            }
        }
        let bank = self.table.recording_bank();
        if any_unused {
            for plan in self
                .plan_steps(bank, |unit| state.units.get(unit).is_some_and(|state| !state.unused))?
            {
                self.backend.run(compute, &plan)?;
            }
        } else {
            for plan in self.optimizer.steps.get(bank).into_iter().flatten() {
                self.backend.run(compute, plan)?;
            }
        }
        for (number, weight) in self.weights.iter().enumerate() {
            let unused = self
                .unit_of
                .get(number)
                .and_then(|unit| state.units.get(unit.0))
                .is_some_and(|unit| unit.unused);
            if weight.spec.trainable && !unused {
                state.weight(WeightId(number))?.version += 1;
            }
        }
        state.stepped = true;
        state.log.note("step", "", 0);
        self.clear_gradients(state)
    }

    fn refuse_step(&self, state: &mut State<B>) -> Result<()> {
        if state.stepped {
            return Err(Error::StepWithoutSync);
        }
        // A step of nothing but frozen and unused weights has no backward pass.
        let mut trains = false;
        for (number, weight) in self.weights.iter().enumerate() {
            let unit = self.unit_of(WeightId(number))?;
            trains |= weight.spec.trainable && !state.unit(unit)?.unused;
        }
        let (run, announced) = (state.microbatch, state.microbatches);
        if trains && run != announced {
            let cure = if run < announced {
                "run the others, each with its gradients, or forget these with discard_gradients()"
            } else {
                "forget them with discard_gradients(), and announce as many with begin_step()"
            };
            return Err(Error::OutOfOrder {
                call: "step",
                problem: format!("{run} of {announced} announced microbatches have run: {cure}"),
            });
        }
        for (number, weight) in self.weights.iter().enumerate() {
            let unit_id = self.unit_of(WeightId(number))?;
            let unit = state.unit(unit_id)?;
            if unit.unused || !weight.spec.trainable {
                continue;
            }
            if unit.gradients.is_some() {
                return Err(Error::OutOfOrder {
                    call: "step",
                    problem: format!(
                        "unit `{}` still keeps its full gradients: run the last microbatch after set_no_sync(false)",
                        self.unit(unit_id)?.name
                    ),
                });
            }
            let arrived = state.weight(WeightId(number))?.arrived_in_step;
            if arrived == 0 {
                return Err(self.missing(weight.spec.name.clone(), number, 0, 1)?);
            }
        }
        Ok(())
    }

    /// What earlier steps have left in the gradients of units that take no part must not count in the
    /// norm.
    fn clear_unused(&self, state: &mut State<B>) -> Result<()> {
        for (number, weight) in self.weights.iter().enumerate() {
            let unused = state.unit(self.unit_of(WeightId(number))?)?.unused;
            if let (true, Some(gradient)) = (unused, weight.own_gradient()?) {
                self.backend.fill(&self.streams.compute, &gradient.span, 0)?;
            }
        }
        Ok(())
    }

    /// The global norm and what follows from it, on the device.
    fn exchange_norm(&self, state: &mut State<B>) -> Result<()> {
        let (compute, reduce) = (&self.streams.compute, &self.streams.reduce);
        if let Some(norm) = &self.optimizer.norm {
            self.backend.run(compute, norm)?;
        }
        self.backend.run(compute, &self.optimizer.sum)?;
        let summed = self.backend.record(compute)?;
        self.backend.wait(reduce, &summed, "exchange-after-norm")?;
        let op = self.reduce.op("all-reduce", "gradient norm");
        state.log.note(op.name, op.unit, self.optimizer.total.len());
        self.reduce.communicator.all_reduce(op, Reduce::SumF64, &self.optimizer.total, reduce)?;
        let exchanged = self.backend.record(reduce)?;
        self.backend.wait(compute, &exchanged, "decide-after-exchange")?;
        Ok(self.backend.run(compute, &self.optimizer.decide)?)
    }

    /// The step's launches for one bank, for the units that take part: one launch per combination
    /// of types, as backends split them.
    pub(crate) fn plan_steps(
        &self,
        bank: usize,
        takes_part: impl Fn(usize) -> bool,
    ) -> Result<Vec<B::Plan>> {
        let mut jobs = Vec::new();
        for (number, weight) in self.weights.iter().enumerate() {
            let (Some(state), Some(unit)) = (&weight.state, self.unit_of.get(number)) else {
                continue;
            };
            if !takes_part(unit.0) {
                continue;
            }
            let amax = match &weight.float8 {
                Some(float8) => Some(self.table.slot_word(bank, float8.slot)?),
                None => None,
            };
            let group = self.optimizer.group_span(state.group)?;
            jobs.extend(weight.optimize(
                group,
                &self.optimizer.control,
                amax,
                self.optimizer.emit,
            )?);
        }
        if jobs.is_empty() { Ok(Vec::new()) } else { Ok(vec![self.backend.plan(&jobs)?]) }
    }

    /// Exchanges every amax of the model in one all-reduce and turns them into scales. Issued, not
    /// waited for: a weight that is no longer finite is reported by a later call, on every rank.
    ///
    /// # Errors
    /// [`gather8_collectives::Error::NonFiniteWeights`] from an earlier sync; a failure of the
    /// device or of a collective.
    pub fn sync(&self) -> Result<()> {
        self.check()?;
        self.explained(self.sync_unexplained())
    }

    fn sync_unexplained(&self) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        let _entered = trace_span!("sync").entered();
        let (compute, amax) = (&self.streams.compute, &self.streams.amax);
        let bank = self.table.recording_bank();
        let dirty = std::mem::take(&mut state.dirty);
        let mut jobs = Vec::new();
        for id in &dirty {
            let weight = self.sharded(*id)?;
            if let Some(float8) = &weight.float8 {
                let slot = self.table.slot_word(bank, float8.slot)?;
                jobs.push(Job::Amax(Amax { src: weight.own()?, slot }));
            }
        }
        if !jobs.is_empty() {
            if let Some(synced) = &state.synced {
                self.backend.wait(compute, synced, "amax-after-sync")?;
            }
            let plan = self.backend.plan(&jobs)?;
            self.backend.run(compute, &plan)?;
        }
        let recorded = self.backend.record(compute)?;
        self.backend.wait(amax, &recorded, "sync-after-step")?;
        if let Some(gathered) = &state.last_gather {
            // Casts read the scales that the sync is about to change.
            self.backend.wait(amax, gathered, "sync-after-cast")?;
        }
        let op = self.amax.op("all-reduce", "amax table");
        state.log.note(op.name, op.unit, 0);
        let digest = state.log.digest();
        self.table.sync(&*self.amax.communicator, op, digest, amax)?;
        let [earlier, last] = state.sync_positions;
        state.log.agree(earlier);
        state.sync_positions = [last, state.log.position()];
        state.synced = Some(self.backend.record(amax)?);
        state.gather_waits_for_sync = true;
        state.stepped = false;
        state.weights.iter_mut().for_each(|weight| weight.synced = weight.version);
        Ok(())
    }

    /// [`sync`](Self::sync), then waits for it and reports what it found.
    ///
    /// # Errors
    /// As `sync`, with its own findings.
    pub fn sync_blocking(&self) -> Result<()> {
        self.sync()?;
        self.explained(self.backend.synchronize(&self.streams.amax).map_err(Error::from))?;
        self.check()
    }

    /// What every rank passes, in rank order: a loss to average, a wish to stop. Every rank calls it;
    /// it waits for all of them, on the host alone. `what` names it in errors.
    ///
    /// # Errors
    /// A rank that is lost or does not come within the deadline.
    pub fn exchange(&self, what: &str, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        let op = self.amax.op("exchange", what);
        self.explained(self.amax.communicator.exchange(op, message).map_err(Error::from))
    }

    /// Fails if anything issued earlier has failed: a device, a peer, a weight that is no longer
    /// finite, ranks that went apart. Never waits, except for the peers' logs in the last case.
    ///
    /// # Errors
    /// The first failure.
    pub fn check(&self) -> Result<()> {
        let checks = || -> Result<()> {
            if self.lock().broken {
                let problem = "an earlier capture has failed, of which this runtime has been told and the device has not: make a new one, from a checkpoint".to_owned();
                return Err(Error::Capture { problem });
            }
            self.table.check()?;
            self.gather.communicator.check()?;
            self.reduce.communicator.check()?;
            self.amax.communicator.check()?;
            Ok(self.backend.check()?)
        };
        self.explained(checks())
    }

    /// Says what stands behind a collective's failure: if the ranks have issued different
    /// operations, the first difference. The state must not be locked.
    pub(crate) fn explained<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Collective(error) => {
                let log = self.lock().log.clone();
                let deadline = self.config.deadline.duration();
                self.table.explain(error, &*self.amax.communicator, &log, deadline).into()
            }
            other => other,
        })
    }

    /// Sets a parameter group's learning rate for the steps to come, in stream order. Every rank sets
    /// the same, several in the same order: the next [`sync`](Self::sync) finds out if one did not.
    ///
    /// # Errors
    /// [`Error::Config`] for a negative or non-finite rate; [`Error::Unknown`].
    pub fn set_lr(&self, group: &str, lr: f32) -> Result<()> {
        if !(lr.is_finite() && lr >= 0.0) {
            return Err(Error::Config(format!(
                "the learning rate of group `{group}` must be 0 or a positive number, not {lr}"
            )));
        }
        // No negative zero.
        let lr = lr + 0.0;
        let found = self.optimizer.groups.iter().position(|(name, _)| name == group);
        let number = found.ok_or_else(|| {
            let names = self.optimizer.groups.iter().map(|(name, _)| &**name);
            Error::unknown_name("parameter group", group, names)
        })?;
        let at = number as u64 * GROUP_BYTES
            + std::mem::offset_of!(gather8_kernels::layout::GroupRecord, lr) as u64;
        let span = self.optimizer.records.sub(at..at + 4)?;
        self.lock().log.note_value("learning rate", group, lr);
        Ok(self.backend.upload(&self.streams.compute, &lr.to_le_bytes(), &span)?)
    }

    /// Sets every group's learning rate to its configured one times `factor`.
    ///
    /// # Errors
    /// As [`set_lr`](Self::set_lr).
    pub fn scale_lr(&self, factor: f32) -> Result<()> {
        for (name, group) in &self.optimizer.groups {
            self.set_lr(name, group_record(self.config.optimizer.mode, group).lr * factor)?;
        }
        Ok(())
    }

    /// Sets the loss scale whose inverse the optimizer applies to every gradient, the same on every
    /// rank, as [`set_lr`](Self::set_lr).
    ///
    /// # Errors
    /// [`Error::Config`] unless it is a positive number whose inverse is one too.
    pub fn set_loss_scale(&self, scale: f32) -> Result<()> {
        if !(scale.is_finite() && scale > 0.0 && scale.recip().is_finite()) {
            return Err(Error::Config(format!(
                "the loss scale must be a positive number whose inverse is finite, not {scale}"
            )));
        }
        let at = std::mem::offset_of!(ControlRecord, inverse_loss_scale) as u64;
        let span = self.optimizer.control.sub(at..at + 4)?;
        self.lock().log.note_value("loss scale", "optimizer", scale);
        Ok(self.backend.upload(&self.streams.compute, &scale.recip().to_le_bytes(), &span)?)
    }

    /// What the last step decided and the last sync found. Waits for both.
    ///
    /// # Errors
    /// A failure of the device or of a collective.
    pub fn report(&self) -> Result<StepReport> {
        self.explained(self.read_report())
    }

    fn read_report(&self) -> Result<StepReport> {
        let mut bytes = vec![0; size_of::<ControlRecord>()];
        self.backend.download(&self.streams.compute, &self.optimizer.control, &mut bytes)?;
        let control: ControlRecord = bytemuck::pod_read_unaligned(&bytes);
        let table = self.table.snapshot(&self.streams.amax)?;
        let (history, _) = self.config.scaling.ring();
        let history = history as usize;
        let mut amax_max: f32 = 0.0;
        for weight in &self.weights {
            let Some(float8) = &weight.float8 else { continue };
            let Some(record) = table.records.get(float8.slot) else { continue };
            let newest = (record.position as usize + history - 1) % history;
            let amax = table.rings.get(float8.slot * history + newest).copied().unwrap_or(0.0);
            amax_max = amax_max.max(amax);
        }
        let saturated = self.take_saturated()?;
        self.check()?;
        Ok(StepReport {
            steps: control.step,
            skipped: control.skipped,
            found_inf: control.found_inf != 0,
            grad_norm: control.norm,
            factor: control.factor,
            amax_max,
            saturated,
        })
    }

    fn take_saturated(&self) -> Result<u64> {
        let Some(span) = &self.saturated else { return Ok(0) };
        let mut bytes = [0; 4];
        self.backend.download(&self.streams.gather, span, &mut bytes)?;
        self.backend.fill(&self.streams.gather, span, 0)?;
        Ok(u64::from(u32::from_le_bytes(bytes)))
    }

    /// Records the amax of a layer input or an output gradient in its slot, in the order of the
    /// compute stream. Calls between two syncs accumulate.
    ///
    /// The launch is prepared once per slot, bank and tensor: a tensor at the same place as in the
    /// step before costs a launch alone, another one an allocation, which waits for the device. The
    /// last tensor's memory is kept.
    ///
    /// # Errors
    /// [`Error::Unknown`]; a failure of the device.
    pub fn record_amax(&self, slot: &str, tensor: &Tensor<B>) -> Result<()> {
        self.check()?;
        let mut state = self.lock();
        let state = &mut *state;
        let (slot, bank) = (self.activation_slot(slot)?, self.table.recording_bank());
        if let Some(synced) = &state.synced {
            self.backend.wait(&self.streams.compute, synced, "amax-after-sync")?;
        }
        let same = |known: &Tensor<B>| {
            Arc::ptr_eq(known.span.buffer(), tensor.span.buffer())
                && known.span.range() == tensor.span.range()
                && known.dtype == tensor.dtype
        };
        let plan = match state.record.get(&(slot, bank)) {
            Some((known, plan)) if same(known) => plan,
            _ => {
                let word = self.table.slot_word(bank, slot)?;
                let job = Job::Amax(Amax { src: tensor.clone(), slot: word });
                let prepared = (tensor.clone(), self.backend.plan(&[job])?);
                &state.record.entry((slot, bank)).insert_entry(prepared).into_mut().1
            }
        };
        Ok(self.backend.run(&self.streams.compute, plan)?)
    }

    pub(crate) fn activation_slot(&self, name: &str) -> Result<usize> {
        self.activation_slots.get(name).copied().ok_or_else(|| {
            let names = self.activation_slots.keys().map(|name| &**name);
            Error::unknown_name("amax slot", name, names)
        })
    }

    /// The scale that the last sync published for a layer input or output gradient, and how many
    /// syncs found it non-finite. Waits for the sync.
    ///
    /// # Errors
    /// [`Error::Unknown`]; a failure of the device.
    pub fn activation_scale(&self, slot: &str) -> Result<(f32, u32)> {
        let number = self.activation_slot(slot)?;
        let table = self.table.snapshot(&self.streams.amax)?;
        let record = table.records.get(number).copied().unwrap_or_default();
        Ok((record.published, record.non_finite))
    }
}
