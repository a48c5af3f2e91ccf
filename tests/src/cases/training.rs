//! Whole steps against a model that nobody shards.

use anyhow::ensure;
use gather8::config::MasterWeight;
use gather8::{Fsdp, Phase};
use gather8_kernels::Backend;

use crate::Context;
use crate::model::{Example, Mlp, Unsharded, initial};

/// Examples of one step: 12, which worlds of 1, 2, 3 and 4 divide.
fn batch(model: &Mlp, step: u64) -> Vec<Example> {
    (0..12).map(|i| model.example(step * 12 + i)).collect()
}

fn share<B: Backend>(cx: &Context<B>, batch: &[Example]) -> Vec<Example> {
    let each = batch.len() / cx.world() as usize;
    let first = cx.rank() as usize * each;
    batch[first..first + each].to_vec()
}

fn mean_loss<B: Backend>(cx: &Context<B>, loss: f32) -> anyhow::Result<f32> {
    let losses = cx.exchange("loss", &loss.to_le_bytes())?;
    let sum: f32 = losses.iter().map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).sum();
    Ok(sum / losses.len() as f32)
}

fn ten_steps<B: Backend>(cx: &Context<B>, model: &Mlp) -> anyhow::Result<()> {
    if 12 % cx.world() != 0 {
        return Ok(());
    }
    let fsdp = Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .units(model.units())
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let mut reference = Unsharded::new(model);
    for spec in model.units().iter().flat_map(|unit| &unit.weights).filter(|spec| spec.float8) {
        let view = fsdp.weight(fsdp.weight_id(&spec.name)?, Phase::Inference)?;
        ensure!(
            view.to_bytes()? == reference.bytes(&spec.name).0,
            "{}: bytes at step 0",
            spec.name
        );
    }
    fsdp.discard_gradients()?;
    let frozen = fsdp.weight_id("layer0.weight")?;
    let start = fsdp.master(frozen)?;
    for step in 0..10 {
        let batch = batch(model, step);
        let loss = mean_loss(cx, model.train(&fsdp, &share(cx, &batch))?)?;
        fsdp.step()?;
        fsdp.sync()?;
        let expected = model.train(&reference, &batch)?;
        reference.step(1.0);
        ensure!((loss - expected).abs() <= 1e-3, "step {step}: loss {loss}, unsharded {expected}");
    }
    ensure!(
        (fsdp.master(frozen)? == start) == model.frozen_first,
        "a frozen layer must not change, others must"
    );
    if model.frozen_first {
        ensure!(fsdp.version(frozen)? == 1, "a frozen layer has a new version");
        ensure!(fsdp.shard_gradient(frozen).is_err(), "a frozen layer has no gradient");
    }
    Ok(())
}

/// Losses within 1e-3 over ten steps, gathered bytes bit-equal at step 0.
pub fn ten_steps_match_the_unsharded_model<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    ten_steps(cx, &Mlp { dims: vec![24, 33, 17, 5], frozen_first: false })
}

/// The same with a frozen first layer.
pub fn ten_steps_match_with_a_frozen_layer<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    ten_steps(cx, &Mlp { dims: vec![24, 33, 17, 5], frozen_first: true })
}

/// 16-bit remainders and F32 copies are two ways to keep the same master, bit for bit.
pub fn remainders_match_f32_masters<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let build = |master: MasterWeight| {
        let mut config = cx.config();
        for name in ["default", "no_decay"] {
            let mut group = config.optimizer.group(name).unwrap();
            group.master = master;
            config.optimizer.groups.insert(name.into(), group);
        }
        Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(model.units())
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))
    };
    let (copy, remainder) = (build(MasterWeight::F32)?, build(MasterWeight::Remainder)?);
    for step in 0..10 {
        for fsdp in [&copy, &remainder] {
            model.train(fsdp, &[model.example(step * 100 + u64::from(cx.rank()))])?;
            fsdp.step()?;
            fsdp.sync()?;
        }
    }
    for spec in copy.weights() {
        let id = copy.weight_id(&spec.name)?;
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        ensure!(
            bits(copy.master(id)?) == bits(remainder.master(id)?),
            "{}: masters differ",
            spec.name
        );
        ensure!(
            bits(copy.shard(id)?) == bits(remainder.shard(id)?),
            "{}: weights differ",
            spec.name
        );
    }
    Ok(())
}
