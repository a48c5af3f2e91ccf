//! The runtime under the model: a sharded model on this rank, as weight store and as driver.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use gather8::collectives::Communicator;
use gather8::config::{DEFAULT_GROUP, Deadline, GatherType, NO_DECAY_GROUP};
use gather8::kernels::Format as Float8Format;
use gather8::kernels::cpu::Cpu;
use gather8::kernels::job::AmaxAlgorithm;
use gather8::{Config, Fsdp, Traffic, UnitSpec, WeightId};
use gather8_examples::driver::{Driver, StepStats};
use gather8_examples::gpt::WeightSpec;
use gather8_examples::weights::{Phase, Weights};

use crate::options::{Format, Run, Settings};

/// Seconds that a rank waits for the others in one collective.
const DEADLINE: f64 = 60.0;

/// The runtime's configuration for one run: what the metrics' header shows.
pub(crate) fn config(settings: &Settings, run: Run) -> Config {
    let mut config = Config::default();
    config.gather.dtype = match run {
        Run::Bf16 => GatherType::Bf16,
        Run::Float8Dynamic | Run::Float8Delayed => GatherType::Float8,
    };
    config.gather.format = match settings.format {
        Format::E4m3 => Float8Format::E4m3,
        Format::E5m2 => Float8Format::E5m2,
    };
    config.gather.count_saturated = true;
    if run == Run::Float8Delayed {
        config.scaling = gather8::Scaling::Delayed {
            history: settings.history as u32,
            algorithm: AmaxAlgorithm::Max,
        };
    }
    config.deadline = Deadline(DEADLINE);
    config.optimizer.max_grad_norm = settings.max_grad_norm as f32;
    for (name, decay) in [(DEFAULT_GROUP, settings.weight_decay), (NO_DECAY_GROUP, 0.0)] {
        if let Some(mut group) = config.optimizer.group(name) {
            group.betas = (0.9, 0.99);
            group.lr = settings.lr as f32;
            group.weight_decay = decay as f32;
            config.optimizer.groups.insert(name.into(), group);
        }
    }
    config
}

/// One rank's sharded model.
pub(crate) struct Runtime {
    fsdp: Arc<Fsdp<Cpu>>,
    /// The traffic up to the last step.
    traffic: Traffic,
}

impl Runtime {
    /// Shards the model over the communicator's ranks.
    ///
    /// # Errors
    /// Whatever the runtime refuses.
    pub(crate) fn build(
        settings: &Settings,
        run: Run,
        specs: &[WeightSpec],
        cpu: Cpu,
        communicator: Arc<dyn Communicator<Cpu>>,
    ) -> Result<Self> {
        let find = |name: &str| {
            specs.iter().find(|spec| spec.name == name).ok_or_else(|| anyhow!("no weight {name}"))
        };
        let fsdp = Fsdp::builder(config(settings, run), cpu, communicator)
            .units(units(specs))
            .build(|spec, rows| -> Result<Vec<f32>> {
                let row = spec.row_elements() as usize;
                let elements = rows.start as usize * row..rows.end as usize * row;
                Ok(find(&spec.name)?.values(settings.seed, elements))
            })?;
        let traffic = fsdp.traffic();
        Ok(Self { fsdp: Arc::new(fsdp), traffic })
    }

    /// The model's weight store.
    pub(crate) fn weights(&self) -> Arc<dyn Weights> {
        Arc::new(Store(Arc::clone(&self.fsdp)))
    }
}

/// The model's units: the root, held; then a unit per block. Weights keep their order, so that a
/// weight's place in `specs` is its id.
fn units(specs: &[WeightSpec]) -> Vec<UnitSpec> {
    let last = specs.iter().map(|spec| spec.unit).max().unwrap_or(0);
    let unit = |number: usize| {
        let of_unit = specs.iter().filter(|spec| spec.unit == number);
        let weights: Vec<_> = of_unit
            .map(|spec| {
                let shape: Vec<_> = spec.shape.iter().map(|&dimension| dimension as u64).collect();
                let group = if spec.decay { DEFAULT_GROUP } else { NO_DECAY_GROUP };
                let weight = if spec.float8 {
                    gather8::WeightSpec::float8(&spec.name, shape)
                } else {
                    gather8::WeightSpec::plain(&spec.name, shape)
                };
                weight.in_group(group)
            })
            .collect();
        if number == 0 {
            UnitSpec::new("root", weights).held()
        } else {
            UnitSpec::new(format!("blocks.{}", number - 1), weights)
        }
    };
    (0..=last).map(unit).collect()
}

struct Store(Arc<Fsdp<Cpu>>);

impl Weights for Store {
    fn weight(&self, id: usize, phase: Phase) -> Result<Arc<[f32]>> {
        let phase = match phase {
            Phase::Forward => gather8::Phase::Forward,
            Phase::Backward => gather8::Phase::Backward,
        };
        Ok(self.0.weight(WeightId(id), phase)?.to_f32()?.into())
    }

    fn gradient(&self, id: usize, gradient: &[f32]) -> Result<()> {
        Ok(self.0.gradient(WeightId(id), gradient)?)
    }
}

impl Driver for Runtime {
    fn begin_microbatch(&mut self, index: usize, count: usize) -> Result<()> {
        if index == 0 {
            self.fsdp.begin_step(u32::try_from(count)?)?;
        }
        Ok(())
    }

    fn finish_backward(&mut self) -> Result<()> {
        Ok(self.fsdp.finish_backward()?)
    }

    fn agree(&mut self, value: f64, stop: bool) -> Result<(f64, bool)> {
        let mut message = value.to_le_bytes().to_vec();
        message.push(u8::from(stop));
        let (mut sum, mut stopping) = (0.0, false);
        let all = self.fsdp.exchange("loss", &message)?;
        for (rank, said) in all.iter().enumerate() {
            let Some((value, [stop])) = said.split_first_chunk::<8>() else {
                return Err(anyhow!("rank {rank} sent {} bytes as its loss, not 9", said.len()));
            };
            sum += f64::from_le_bytes(*value);
            stopping |= *stop != 0;
        }
        Ok((sum / all.len() as f64, stopping))
    }

    fn step(&mut self, learning_rate: f64) -> Result<StepStats> {
        for group in [DEFAULT_GROUP, NO_DECAY_GROUP] {
            self.fsdp.set_lr(group, learning_rate as f32)?;
        }
        self.fsdp.step()?;
        self.fsdp.sync()?;
        let report = self.fsdp.report()?;
        let traffic = self.fsdp.traffic();
        let before = std::mem::replace(&mut self.traffic, traffic);
        Ok(StepStats {
            grad_norm: report.grad_norm,
            gathered_bytes: traffic.gathered_bytes - before.gathered_bytes,
            reduced_bytes: traffic.reduced_bytes - before.reduced_bytes,
            amax_max: f64::from(report.amax_max),
            saturated: report.saturated,
        })
    }
}
