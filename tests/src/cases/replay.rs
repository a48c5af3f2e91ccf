//! Captured steps: what a replay does, and when it is refused.

use anyhow::ensure;
use gather8::config::{MasterWeight, MomentType};
use gather8::{Error, Fsdp, Phase, Scaling, StepReport};
use gather8_kernels::{Backend, DType, Memory, Span, Tensor};

use crate::Context;
use crate::model::{Mlp, initial, noise};

/// A model whose gradients lie in memory of their own, so that a replay finds new ones there.
struct Trainer<B: Backend> {
    fsdp: Fsdp<B>,
    gradients: Vec<Tensor<B>>,
}

impl<B: Backend> Trainer<B> {
    fn new(cx: &Context<B>, scaling: Scaling, master: MasterWeight) -> anyhow::Result<Self> {
        let mut config = cx.config();
        config.scaling = scaling;
        for name in ["default", "no_decay"] {
            let mut group = config.optimizer.group(name).unwrap();
            group.master = master;
            if master == MasterWeight::Remainder {
                (group.moments, group.betas) = (MomentType::Bf16, (0.9, 0.95));
            }
            config.optimizer.groups.insert(name.into(), group);
        }
        // The last layer stays gathered from its first use to the step, as a root does.
        let mut units = Mlp::uneven().units();
        let last = units.pop().map(gather8::UnitSpec::held);
        units.extend(last);
        let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(units)
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
        let memory = |spec: &gather8::WeightSpec| {
            let buffer = cx.backend.alloc(spec.elements() * 4, Memory::Device)?;
            Tensor::new(Span::whole(&buffer), DType::F32)
        };
        let gradients = fsdp.weights().map(memory).collect::<Result<_, _>>()?;
        Ok(Self { fsdp, gradients })
    }

    /// What changes from step to step: gradients and the learning rate. Two steps hold a NaN or an
    /// infinity.
    fn feed(&self, step: u64) -> anyhow::Result<()> {
        let (backend, compute) = (self.fsdp.backend(), self.fsdp.compute_stream());
        for (spec, gradient) in self.fsdp.weights().zip(&self.gradients) {
            let mut values: Vec<_> = (0..spec.elements())
                .map(|index| noise(&spec.name, step * 1_000_003 + index) * 0.3)
                .collect();
            if spec.name == "layer1.weight" {
                match step {
                    4 => values[3] = f32::NAN,
                    9 => values[0] = f32::INFINITY,
                    _ => (),
                }
            }
            backend.upload(compute, bytemuck::cast_slice(&values), &gradient.span)?;
        }
        Ok(self.fsdp.scale_lr(1.0 / (1.0 + step as f32))?)
    }

    /// One step, issued.
    fn issue(&self) -> anyhow::Result<()> {
        let fsdp = &self.fsdp;
        let names: Vec<_> = fsdp.weights().map(|spec| spec.name.clone()).collect();
        for name in &names {
            fsdp.weight(fsdp.weight_id(name)?, Phase::Forward)?;
        }
        for (name, gradient) in names.iter().zip(&self.gradients).rev() {
            fsdp.weight(fsdp.weight_id(name)?, Phase::Backward)?;
            fsdp.gradient_from(fsdp.weight_id(name)?, gradient)?;
        }
        fsdp.step()?;
        Ok(fsdp.sync()?)
    }

    /// Everything that training changes, bit by bit.
    fn state(&self) -> anyhow::Result<(Vec<u8>, StepReport)> {
        let fsdp = &self.fsdp;
        let report = fsdp.report()?;
        let mut bytes = Vec::new();
        for spec in fsdp.weights() {
            let id = fsdp.weight_id(&spec.name)?;
            bytes.extend(fsdp.version(id)?.to_le_bytes());
            let (first, second) = fsdp.moments(id)?;
            for values in [fsdp.shard(id)?, fsdp.master(id)?, first, second] {
                bytes.extend(values.into_iter().flat_map(|x| x.to_bits().to_le_bytes()));
            }
        }
        let table = fsdp.table_snapshot()?;
        bytes.extend_from_slice(bytemuck::cast_slice(&table.records));
        bytes.extend_from_slice(bytemuck::cast_slice(&table.rings));
        let traffic = fsdp.traffic();
        bytes.extend(traffic.gathered_bytes.to_le_bytes());
        Ok((bytes, report))
    }
}

/// Fifty steps, all but two replayed, are fifty eager steps bit for bit: weights, masters, moments,
/// rings, scales, versions; with another learning rate in each and two that are skipped.
pub fn replays_equal_eager_steps<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for (scaling, master) in [
        (Scaling::Dynamic, MasterWeight::Remainder),
        (Scaling::delayed(), MasterWeight::Remainder),
        (Scaling::Dynamic, MasterWeight::F32),
    ] {
        let eager = Trainer::new(cx, scaling, master)?;
        let replayed = Trainer::new(cx, scaling, master)?;
        let mut captured = None;
        for step in 0..50 {
            eager.feed(step)?;
            eager.issue()?;
            replayed.feed(step)?;
            match &captured {
                // The first step and one in the middle are eager there, too.
                _ if step == 0 || step == 30 => replayed.issue()?,
                None if cx.world() > 1 => {
                    let refused = replayed.fsdp.capture(|| replayed.issue());
                    let error = refused.err().map(|error| error.to_string()).unwrap_or_default();
                    ensure!(error.contains("capture in a world of 1"), "{error}");
                    replayed.issue()?;
                }
                None => captured = Some(replayed.fsdp.capture(|| replayed.issue())?),
                Some(captured) => replayed.fsdp.replay(captured)?,
            }
            if step % 7 == 0 || step > 44 {
                let (expected, got) = (eager.state()?, replayed.state()?);
                ensure!(expected.1 == got.1, "step {step}: {:?}, eager {:?}", got.1, expected.1);
                ensure!(expected.0 == got.0, "{scaling:?}: step {step} differs from an eager one");
            }
        }
        ensure!(eager.state()?.1.skipped == 2, "two steps were to be skipped");
    }
    Ok(())
}

/// What would make a replay another step than the captured one is refused.
pub fn wrong_captures_are_refused<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    if cx.world() > 1 {
        return Ok(());
    }
    let trainer = Trainer::new(cx, Scaling::Dynamic, MasterWeight::Remainder)?;
    let fsdp = &trainer.fsdp;
    let says = |result: Result<(), anyhow::Error>, words: &str| {
        let error = result.err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(error.contains(words), "expected {words:?}, got {error:?}");
        Ok(())
    };
    let id = fsdp.weight_id("layer1.weight")?;
    let unit = fsdp.unit_id("layer1")?;
    trainer.feed(0)?;
    trainer.issue()?;
    let captured = fsdp.capture(|| trainer.issue())?;

    let guard = fsdp.unshard(unit)?;
    says(fsdp.replay(&captured).map_err(Into::into), "unit `layer1` is gathered")?;
    guard.reshard()?;
    says(fsdp.replay(&captured).map_err(Into::into), "has been gathered or changed since")?;
    trainer.issue()?;
    fsdp.replay(&captured)?;
    fsdp.mark_modified(id)?;
    says(fsdp.replay(&captured).map_err(Into::into), "weight `layer1.weight` was changed")?;
    fsdp.sync()?;
    fsdp.replay(&captured)?;
    fsdp.weight(id, Phase::Forward)?;
    says(fsdp.replay(&captured).map_err(Into::into), "a step is in progress")?;
    fsdp.discard_gradients()?;
    trainer.issue()?;

    // The device is asked inside: refused, and the runtime says so rather than hang.
    let waits = || -> anyhow::Result<()> {
        trainer.issue()?;
        fsdp.report()?;
        Ok(())
    };
    says(fsdp.capture(waits).map(drop), "outside of the capture")?;
    says(fsdp.check().map_err(Into::into), "an earlier capture has failed")?;
    says(fsdp.weight(id, Phase::Inference).map(drop).map_err(Into::into), "make a new one")?;

    // Nothing that is captured stays under way.
    let trainer = Trainer::new(cx, Scaling::Dynamic, MasterWeight::Remainder)?;
    let fsdp = &trainer.fsdp;
    trainer.feed(0)?;
    fsdp.unshard(unit)?.reshard()?;
    let once = fsdp.capture(|| trainer.issue());
    says(once.map(drop), "weight `layer1.weight` has been cast")?;
    let trainer = Trainer::new(cx, Scaling::Dynamic, MasterWeight::Remainder)?;
    let fsdp = &trainer.fsdp;
    let open = fsdp.capture(|| fsdp.prefetch(fsdp.unit_id("layer1")?));
    ensure!(matches!(open, Err(Error::Capture { .. })), "a unit stays gathered");
    Ok(())
}
