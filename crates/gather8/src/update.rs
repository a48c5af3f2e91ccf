//! Changes of a weight from outside the optimizer.

use gather8_kernels::scalar;
use gather8_kernels::{Backend, DType, Span};

use crate::error::{Error, Result};
use crate::fsdp::Fsdp;
use crate::spec::WeightId;
use crate::weight::MasterState;

impl<B: Backend> Fsdp<B> {
    /// Changes a weight's shard on the host: `change` gets this rank's rows as full-precision master
    /// values, row-major. Every rank makes the call, with or without rows. Waits for the device.
    /// The float8 bytes and the ring of past amaxes are dropped: [`sync`](Self::sync) must follow,
    /// and the next cast does not saturate.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] while the weight's unit is gathered; a failure of the device.
    pub fn update(&self, id: WeightId, change: impl FnOnce(&mut [f32])) -> Result<()> {
        self.refuse_resident(id, "update")?;
        let mut values = self.master(id)?;
        change(&mut values);
        self.write_master(id, &values)?;
        self.mark_modified(id)
    }

    /// Says that the weight's shard was changed through its raw memory, by work issued on the
    /// compute stream. The same consequences as [`update`](Self::update), on every rank.
    ///
    /// # Errors
    /// [`Error::Unknown`]; a failure of the device.
    pub fn mark_modified(&self, id: WeightId) -> Result<()> {
        let weight = self.sharded(id)?;
        let mut state = self.lock();
        state.log.note("update or mark_modified", &weight.spec.name, 0);
        let counts = state.weight(id)?;
        counts.version += 1;
        counts.bytes_version = 0;
        if let Some(float8) = &weight.float8 {
            if let Some(gathered) = &state.last_gather {
                self.backend.wait(&self.streams.amax, gathered, "sync-after-cast")?;
            }
            self.table.seed(float8.slot, &self.streams.amax)?;
            if !state.dirty.contains(&id) {
                state.dirty.push(id);
            }
        }
        Ok(())
    }

    /// Goes on after a sync found a weight that was not finite, once every rank has repaired it (by
    /// [`update`](Self::update), say): calls stop returning that error, and the next
    /// [`sync`](Self::sync) decides anew. The refused sync has dropped the amaxes of all weights, so
    /// every float8 weight is taken as modified. Every rank calls it. Moments stay as they are: NaNs
    /// that a step without `skip_on_found_inf` has put there make the next step's weights NaN again.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn acknowledge(&self) -> Result<()> {
        self.table.acknowledge();
        for (number, weight) in self.weights.iter().enumerate() {
            if weight.float8.is_some() {
                self.mark_modified(WeightId(number))?;
            }
        }
        Ok(())
    }

    fn refuse_resident(&self, id: WeightId, call: &'static str) -> Result<()> {
        let unit = self.unit_of(id)?;
        if self.is_resident(unit)? {
            return Err(Error::OutOfOrder {
                call,
                problem: format!(
                    "unit `{}` is gathered; reshard it before changing its weights",
                    self.unit(unit)?.name
                ),
            });
        }
        Ok(())
    }

    /// This rank's rows of a weight in full precision: the BF16 weight joined with its remainder,
    /// the F32 copy, or the shard itself. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Unknown`]; a failure of the device.
    pub fn master(&self, id: WeightId) -> Result<Vec<f32>> {
        let weight = self.sharded(id)?;
        match weight.state.as_ref().map(|state| &state.master) {
            Some(MasterState::Copy(copy)) => self.fetch(&Span::whole(copy)),
            Some(MasterState::Remainder(low)) => {
                let high: Vec<u16> = self.fetch(&weight.own()?.span)?;
                let low: Vec<u16> = self.fetch(&Span::whole(low))?;
                Ok(high.iter().zip(&low).map(|(&high, &low)| scalar::join(high, low)).collect())
            }
            _ => self.shard(id),
        }
    }

    /// Looks for pairs of weight and remainder that no step can have made: ±0 with a negative
    /// remainder, the trace of a NaN that was split without care, of memory that was never set, or
    /// of a weight and a remainder of different steps. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Weight`] with the first such element; a failure of the device.
    pub fn validate(&self, id: WeightId) -> Result<()> {
        let weight = self.sharded(id)?;
        let Some(MasterState::Remainder(low)) = weight.state.as_ref().map(|state| &state.master)
        else {
            return Ok(());
        };
        let high: Vec<u16> = self.fetch(&weight.own()?.span)?;
        let low: Vec<u16> = self.fetch(&Span::whole(low))?;
        let Some(at) = scalar::validate_all(&high, &low) else { return Ok(()) };
        let columns = weight.sharding.row_elements.max(1);
        let row = weight.sharding.range().start + at as u64 / columns;
        Err(Error::Weight {
            weight: weight.spec.name.clone(),
            problem: format!(
                "row {row}, element {} holds a zero with a negative remainder, which no step makes; restore a checkpoint",
                at as u64 % columns
            ),
        })
    }

    /// This rank's rows of a weight as the forward pass rounds them (BF16 or F16 widened, or F32).
    /// Waits for the device.
    ///
    /// # Errors
    /// [`Error::Unknown`]; a failure of the device.
    pub fn shard(&self, id: WeightId) -> Result<Vec<f32>> {
        let weight = self.sharded(id)?;
        if weight.spec.dtype == DType::F32 {
            return self.fetch(&weight.own()?.span);
        }
        let bits: Vec<u16> = self.fetch(&weight.own()?.span)?;
        let widen =
            if weight.spec.dtype == DType::F16 { scalar::f16_to_f32 } else { scalar::bf16_to_f32 };
        Ok(bits.into_iter().map(widen).collect())
    }

    /// This rank's shard in device memory, without padding. After changing it, on the compute
    /// stream, call [`mark_modified`](Self::mark_modified); a master weight beside it is the
    /// caller's to change too, through [`update`](Self::update).
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn shard_span(&self, id: WeightId) -> Result<Span<B>> {
        Ok(self.sharded(id)?.own()?.span)
    }

    /// This rank's reduced gradient of the last step, averaged over world and microbatches, before
    /// clipping. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::OutOfOrder`] for a frozen weight.
    pub fn shard_gradient(&self, id: WeightId) -> Result<Vec<f32>> {
        let weight = self.sharded(id)?;
        let Some(gradient) = weight.own_gradient()? else {
            return Err(Error::OutOfOrder {
                call: "shard_gradient",
                problem: format!("weight `{}` is frozen and has none", weight.spec.name),
            });
        };
        if let Some(reduced) = &self.lock().last_reduce {
            self.backend.wait(&self.streams.compute, reduced, "norm-after-reduce")?;
        }
        self.fetch(&gradient.span)
    }

    pub(crate) fn write_master(&self, id: WeightId, values: &[f32]) -> Result<()> {
        let weight = self.sharded(id)?;
        let compute = &self.streams.compute;
        {
            let unit = self.unit_of(id)?;
            let mut state = self.lock();
            if let Some(gathered) = &state.last_gather {
                self.backend.wait(compute, gathered, "step-after-gather")?;
            }
            for fence in &state.unit(unit)?.fences {
                self.backend.wait(compute, fence, "step-after-use")?;
            }
            if let Some(reduced) = &state.last_reduce {
                self.backend.wait(compute, reduced, "norm-after-reduce")?;
            }
        }
        let own = weight.own()?.span;
        let expected = weight.sharding.elements();
        if values.len() as u64 != expected {
            return Err(Error::Length {
                weight: weight.spec.name.clone(),
                what: "this rank's rows",
                got: values.len() as u64,
                expected,
            });
        }
        match weight.state.as_ref().map(|state| &state.master) {
            Some(MasterState::Copy(copy)) => {
                let high: Vec<u16> = values.iter().map(|&value| scalar::split(value).0).collect();
                self.backend.upload(compute, bytemuck::cast_slice(&high), &own)?;
                self.backend.upload(compute, bytemuck::cast_slice(values), &Span::whole(copy))?;
            }
            Some(MasterState::Remainder(low)) => {
                let pairs: Vec<_> = values.iter().map(|&value| scalar::split(value)).collect();
                let high: Vec<u16> = pairs.iter().map(|pair| pair.0).collect();
                let remainders: Vec<u16> = pairs.iter().map(|pair| pair.1).collect();
                self.backend.upload(compute, bytemuck::cast_slice(&high), &own)?;
                self.backend.upload(
                    compute,
                    bytemuck::cast_slice(&remainders),
                    &Span::whole(low),
                )?;
            }
            _ if weight.spec.dtype == DType::F32 => {
                self.backend.upload(compute, bytemuck::cast_slice(values), &own)?;
            }
            _ => {
                let narrow = if weight.spec.dtype == DType::F16 {
                    scalar::f32_to_f16
                } else {
                    scalar::f32_to_bf16
                };
                let bits: Vec<u16> = values.iter().map(|&value| narrow(value)).collect();
                self.backend.upload(compute, bytemuck::cast_slice(&bits), &own)?;
            }
        }
        Ok(())
    }

    fn fetch<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        &self,
        span: &Span<B>,
    ) -> Result<Vec<T>> {
        let mut bytes = vec![0; usize::try_from(span.len()).unwrap_or(usize::MAX)];
        self.backend.download(&self.streams.compute, span, &mut bytes)?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }
}

/// What the ranks agree on about every slot; for checkpoints and tests.
impl<B: Backend> Fsdp<B> {
    /// The amax table's records and rings. Waits for the last sync.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn table_snapshot(&self) -> Result<gather8_collectives::TableState> {
        Ok(self.table.snapshot(&self.streams.amax)?)
    }

    /// This rank's first and second moments of a weight, widened to f32. Waits for the device.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] for a frozen weight; a failure of the device.
    pub fn moments(&self, id: WeightId) -> Result<(Vec<f32>, Vec<f32>)> {
        let weight = self.sharded(id)?;
        let Some(state) = &weight.state else {
            return Err(Error::OutOfOrder {
                call: "moments",
                problem: format!("weight `{}` is frozen and has none", weight.spec.name),
            });
        };
        let fetch = |buffer| -> Result<Vec<f32>> {
            if state.moments == DType::F32 {
                return self.fetch(&Span::whole(buffer));
            }
            let bits: Vec<u16> = self.fetch(&Span::whole(buffer))?;
            Ok(bits.into_iter().map(scalar::bf16_to_f32).collect())
        };
        Ok((fetch(&state.exp_avg)?, fetch(&state.exp_avg_sq)?))
    }
}
