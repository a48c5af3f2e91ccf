//! A step as a trainer drives it: through the runtime, eager and replayed.
//!
//! The bytes that a step must move, per parameter, with F32 gradients, remainders and F32 moments:
//! the norm reads 4; AdamW reads and writes 28; under dynamic scaling the cast reads 2 and writes 1,
//! under delayed scaling AdamW writes that 1. In a world of 1 the gather moves nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use gather8::config::MasterWeight;
use gather8::{Config, Fsdp, Phase, Scaling, UnitId, UnitSpec, WeightId, WeightSpec};
use gather8_collectives::Communicator;
use gather8_kernels::{Backend, DType, Memory, Span, Tensor};

use super::data::Content;
use super::device::Clock;
use super::model::BLOCK;
use super::report::Figure;

/// Runs that do not count.
const WARM_UP: u32 = 2;
/// Blocks of the model, each a unit.
const BLOCKS: usize = 4;

/// A model in training.
struct Trainer<B: Backend> {
    fsdp: Fsdp<B>,
    weights: Vec<WeightId>,
    /// Gradients of the largest weight; smaller ones take a part.
    gradient: Span<B>,
    parameters: u64,
}

impl<B: Backend> Trainer<B> {
    fn new(
        backend: &B,
        communicator: &Arc<dyn Communicator<B>>,
        scaling: Scaling,
        divisor: u64,
    ) -> Result<Self> {
        let mut config = Config::default();
        config.scaling = scaling;
        if let Some(mut group) = config.optimizer.group("default") {
            group.master = MasterWeight::Remainder;
            config.optimizer.groups.insert("default".into(), group);
        }
        let block = BLOCK.map(|[rows, columns]| [rows, (columns / divisor).max(1)]);
        let unit = |number: usize| {
            let spec = |(position, &shape): (usize, &[u64; 2])| {
                WeightSpec::float8(format!("{number}.{position}"), shape)
            };
            let weights: Vec<_> = block.iter().enumerate().map(spec).collect();
            UnitSpec::new(format!("block.{number}"), weights)
        };
        let most = block.iter().map(|[rows, columns]| rows * columns).max().unwrap_or(0);
        let pattern = Content::Gradient.f32(most as usize);
        let gradient = Span::whole(&backend.alloc(most * 4, Memory::Device)?);
        let fsdp = Fsdp::builder(config, backend.clone(), Arc::clone(communicator))
            .units((0..BLOCKS).map(unit))
            .build(|spec, rows| -> Result<Vec<f32>> {
                let elements = (rows.end - rows.start) * spec.row_elements();
                Ok(pattern.iter().copied().cycle().take(elements as usize).collect())
            })?;
        backend.upload(fsdp.compute_stream(), bytemuck::cast_slice(&pattern), &gradient)?;
        let weights = (0..fsdp.weights().count()).map(WeightId).collect();
        let parameters = fsdp.weights().map(WeightSpec::elements).sum();
        Ok(Self { fsdp, weights, gradient, parameters })
    }

    /// Forward and backward: nothing is computed, gradients are copied.
    fn passes(&self) -> Result<()> {
        for &id in &self.weights {
            self.fsdp.weight(id, Phase::Forward)?;
        }
        for &id in self.weights.iter().rev() {
            self.fsdp.weight(id, Phase::Backward)?;
            let elements = self.fsdp.sharded(id)?.spec().elements();
            let values = Tensor::new(self.gradient.sub(0..elements * 4)?, DType::F32)?;
            self.fsdp.gradient_from(id, &values)?;
        }
        Ok(self.fsdp.finish_backward()?)
    }

    /// From the reduced gradients to the next version's weights, gathered.
    fn weight_path(&self) -> Result<()> {
        self.fsdp.step()?;
        self.fsdp.sync()?;
        for unit in (0..BLOCKS).map(UnitId) {
            self.fsdp.unshard(unit)?.reshard()?;
        }
        Ok(())
    }

    fn step(&self) -> Result<()> {
        self.passes()?;
        self.fsdp.step()?;
        Ok(self.fsdp.sync()?)
    }

    /// Waits until the device has nothing to do.
    fn settle(&self) -> Result<()> {
        self.fsdp.report()?;
        // The reduce stream has no call that waits for it.
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }
}

fn micros(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// The weight path of a step through the runtime in a world of 1, next to a copy; and what a whole
/// step costs the host, eager and replayed.
///
/// # Errors
/// A failure of the device.
pub fn whole_steps<B: Backend>(
    backend: &B,
    communicator: &Arc<dyn Communicator<B>>,
    clock: &dyn Clock<B>,
    divisor: u64,
    repeats: u32,
) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, scaling, bytes) in
        [("dynamic", Scaling::Dynamic, 35), ("delayed", Scaling::delayed(), 33)]
    {
        let trainer = Trainer::new(backend, communicator, scaling, divisor)?;
        let stream = trainer.fsdp.compute_stream();
        let [from, to] = [0; 2].map(|_| backend.alloc(trainer.parameters * 2, Memory::Device));
        let (from, to) = (Span::whole(&from?), Span::whole(&to?));
        let (mut path, mut ratios, mut host) = (Vec::new(), Vec::new(), Vec::new());
        for repeat in 0..WARM_UP + repeats {
            trainer.passes()?;
            trainer.settle()?;
            let copy =
                clock.time(backend, stream, &mut || Ok(backend.copy(stream, &from, &to)?))?;
            let mut issued = 0.0;
            let took = clock.time(backend, stream, &mut || {
                issued = micros(|| trainer.weight_path())?;
                Ok(())
            })?;
            trainer.settle()?;
            if repeat >= WARM_UP {
                let ideal = copy.as_secs_f64() / (4.0 * trainer.parameters as f64)
                    * (f64::from(bytes) * trainer.parameters as f64);
                path.push(took.as_secs_f64() * 1e3);
                ratios.push(took.as_secs_f64() / ideal);
                host.push(issued);
            }
        }
        drop((from, to));
        let what = |what: &str| format!("{what}, {name}");
        figures.push(Figure::of(what("step, sync, cast and gather through Fsdp"), "ms", &path));
        let account = format!("that, over {bytes} bytes per parameter at the copy's rate");
        figures.push(Figure::of(what(&account), "x", &ratios));
        figures.push(Figure::of(what("host time of issuing that"), "us", &host));

        // The last gathers left bytes that a captured step would not find.
        trainer.step()?;
        let captured = trainer.fsdp.capture(|| trainer.step())?;
        let (mut eager, mut replayed) = (Vec::new(), Vec::new());
        let (mut eager_host, mut replayed_host) = (Vec::new(), Vec::new());
        for _ in 0..repeats {
            trainer.settle()?;
            let took = clock.time(backend, stream, &mut || {
                eager_host.push(micros(|| trainer.step())?);
                // What the compute stream is given next comes after the sync.
                Ok(trainer.fsdp.unshard(UnitId(0))?.reshard()?)
            })?;
            eager.push(took.as_secs_f64() * 1e3);
            trainer.step()?;
            trainer.settle()?;
            let took = clock.time(backend, stream, &mut || {
                replayed_host.push(micros(|| Ok(trainer.fsdp.replay(&captured)?))?);
                Ok(())
            })?;
            replayed.push(took.as_secs_f64() * 1e3);
        }
        trainer.settle()?;
        figures.push(Figure::of(what("whole step, eager"), "ms", &eager));
        figures.push(Figure::of(what("whole step, replayed"), "ms", &replayed));
        figures.push(Figure::of(what("host time of a whole step, eager"), "us", &eager_host));
        figures.push(Figure::of(what("host time of a whole step, replayed"), "us", &replayed_host));
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use gather8_collectives::Solo;
    use gather8_kernels::cpu::Cpu;

    use super::super::device::HostClock;
    use super::*;

    #[test]
    fn steps_are_timed_and_replayed() {
        let cpu = Cpu::new();
        let solo: Arc<dyn Communicator<Cpu>> = Arc::new(Solo::new(cpu.clone()));
        let figures = whole_steps(&cpu, &solo, &HostClock, 1 << 12, 2).unwrap();
        assert_eq!(figures.len(), 14);
        assert!(figures.iter().all(|figure| figure.value > 0.0), "{figures:?}");
    }
}
