//! Calls in the wrong order, and the ways through a step.

use anyhow::{bail, ensure};
use gather8::{Error, Fsdp, Phase, UnitSpec, WeightSpec};
use gather8_kernels::Backend;

use crate::Context;
use crate::model::{Mlp, initial};

pub(super) fn build<B: Backend>(cx: &Context<B>, units: Vec<UnitSpec>) -> anyhow::Result<Fsdp<B>> {
    Ok(Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .units(units)
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?)
}

macro_rules! refused {
    ($result:expr, $pattern:pat) => {
        match $result {
            Ok(_) => bail!("{} was let through", stringify!($result)),
            Err(error) if matches!(error, $pattern) => error.to_string(),
            Err(error) => bail!("{} gave: {error}", stringify!($result)),
        }
    };
}
pub(super) use refused;

/// Every wrong call gets its own error, and the runtime goes on.
pub fn wrong_calls_are_refused<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let fsdp = build(cx, model.units())?;
    let (weight, bias) = (fsdp.weight_id("layer0.weight")?, fsdp.weight_id("layer0.bias")?);
    let text = refused!(fsdp.weight_id("nobody"), Error::Unknown { .. });
    ensure!(text.starts_with("there is no weight `nobody`: the model has `layer0."), "{text}");
    refused!(fsdp.step(), Error::OutOfOrder { .. });
    refused!(fsdp.gradient(weight, &[1.0]), Error::Length { .. });
    refused!(fsdp.gradient(bias, &[0.0; 10]), Error::OutOfOrder { .. });

    // A view does not outlive its unit.
    let view = fsdp.weight(weight, Phase::Inference)?;
    let values = view.to_f32()?;
    fsdp.reshard(fsdp.unit_id("layer0")?)?;
    let text = refused!(view.to_f32(), Error::UsedAfterReshard { .. });
    ensure!(text.contains("layer0.weight"), "{text}");

    // Two slots, three guards.
    let units: Vec<_> =
        (0..3).map(|n| fsdp.unit_id(&format!("layer{n}"))).collect::<Result<_, _>>()?;
    let first = fsdp.unshard(units[0])?;
    let second = fsdp.unshard(units[1])?;
    let text = refused!(fsdp.unshard(units[2]), Error::ArenaExhausted { .. });
    ensure!(text.contains("`layer0`") && text.contains("`layer1`"), "holders are named: {text}");
    refused!(fsdp.update(weight, |_| ()), Error::OutOfOrder { .. });
    drop((first, second));

    // Changed but not synced.
    fsdp.update(weight, |_| ())?;
    refused!(fsdp.weight(weight, Phase::Inference), Error::StaleBytes { .. });
    fsdp.sync()?;
    ensure!(
        fsdp.weight(weight, Phase::Inference)?.to_f32()? == values,
        "an empty update changes nothing"
    );
    fsdp.discard_gradients()?;

    fsdp.update(bias, |_| ())?;
    let text = refused!(fsdp.weight(bias, Phase::Inference), Error::Unsynced { .. });
    ensure!(text.contains("`layer0.bias`"), "{text}");
    fsdp.sync()?;

    // A gradient is missing: of a whole unit, and of one weight.
    fsdp.weight(weight, Phase::Forward)?;
    refused!(fsdp.step(), Error::MissingGradient { .. });
    fsdp.discard_gradients()?;

    // Two steps without a sync.
    model.train(&fsdp, &[model.example(0)])?;
    fsdp.step()?;
    refused!(fsdp.step(), Error::StepWithoutSync);
    refused!(fsdp.weight(weight, Phase::Forward), Error::StaleBytes { .. });
    fsdp.sync()?;
    for scale in [0.0, -1.0, 1e-45, f32::INFINITY] {
        refused!(fsdp.set_loss_scale(scale), Error::Config(_));
    }
    let text = refused!(fsdp.set_lr("nobody", 1.0), Error::Unknown { .. });
    ensure!(text.ends_with("the model has `default`, `no_decay`"), "{text}");
    refused!(fsdp.set_lr("default", f32::NAN), Error::Config(_));
    model.train(&fsdp, &[model.example(1)])?;
    fsdp.step()?;
    fsdp.sync_blocking()?;
    ensure!(fsdp.report()?.steps == 2, "two steps were done");
    Ok(())
}

/// A unit that all ranks declare unused keeps its weights and their versions; without the
/// declaration its missing gradient is an error that names it.
pub fn unused_units_rest<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let mut units = model.units();
    units.push(UnitSpec::new("spare", [WeightSpec::float8("spare.weight", [9, 9])]));
    let fsdp = build(cx, units)?;
    let spare = fsdp.weight_id("spare.weight")?;
    let before = fsdp.master(spare)?;
    model.train(&fsdp, &[model.example(0)])?;
    let text = refused!(fsdp.step(), Error::MissingGradient { .. });
    ensure!(text.contains("`spare.weight`") && text.contains("`spare`"), "{text}");
    fsdp.declare_unused(fsdp.unit_id("spare")?)?;
    fsdp.step()?;
    fsdp.sync_blocking()?;
    ensure!(fsdp.master(spare)? == before, "an unused weight changed");
    ensure!(fsdp.version(spare)? == 1, "an unused weight has a new version");
    ensure!(fsdp.version(fsdp.weight_id("layer0.weight")?)? == 2, "a used one has not");
    ensure!(
        fsdp.weight(spare, Phase::Inference)?.to_f32()?.len() == 81,
        "it can still be gathered"
    );

    // Gradients are not lost: neither those that came before the declaration, nor later ones.
    let used = fsdp.unit_id("layer0")?;
    model.train(&fsdp, &[model.example(0)])?;
    let text = refused!(fsdp.declare_unused(used), Error::OutOfOrder { .. });
    ensure!(text.contains("`layer0`"), "{text}");
    fsdp.discard_gradients()?;
    fsdp.declare_unused(used)?;
    let first = fsdp.weight_id("layer0.weight")?;
    refused!(fsdp.weight(first, Phase::Forward), Error::OutOfOrder { .. });
    fsdp.weight(first, Phase::Inference)?;
    fsdp.discard_gradients()?;

    // The advice of the error holds in any order of units, and nothing is counted twice.
    for rest in ["layer0", "layer2"] {
        for spec in model.units().iter().flat_map(|unit| &unit.weights) {
            let id = fsdp.weight_id(&spec.name)?;
            fsdp.weight(id, Phase::Forward)?;
            if !spec.name.starts_with(rest) {
                fsdp.gradient(id, &vec![1.0; spec.elements() as usize])?;
            }
        }
        fsdp.declare_unused(fsdp.unit_id("spare")?)?;
        refused!(fsdp.step(), Error::MissingGradient { .. });
        refused!(fsdp.finish_backward(), Error::MissingGradient { .. });
        fsdp.declare_unused(fsdp.unit_id(rest)?)?;
        fsdp.step()?;
        fsdp.sync_blocking()?;
    }

    // A forward pass may turn out to be unused; and so may everything.
    fsdp.weight(first, Phase::Forward)?;
    refused!(fsdp.step(), Error::MissingGradient { .. });
    for unit in model.units() {
        fsdp.declare_unused(fsdp.unit_id(&unit.name)?)?;
    }
    fsdp.declare_unused(fsdp.unit_id("spare")?)?;
    let before = fsdp.master(first)?;
    fsdp.step()?;
    fsdp.sync_blocking()?;
    ensure!(fsdp.master(first)? == before, "an unused weight changed");
    Ok(())
}

/// What a unit's gradients were in an earlier step counts neither in the norm nor as found-inf of a
/// step that it takes no part in; and its plain weights are as they were before the sync.
pub fn unused_units_leave_no_trace<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for poison in [100.0, f32::NAN] {
        let units = ["used", "rests"].map(|name| {
            let bias = WeightSpec::plain(format!("{name}.bias"), [5]);
            UnitSpec::new(name, [WeightSpec::float8(format!("{name}.weight"), [5, 4]), bias])
        });
        let fsdp = build(cx, units.to_vec())?;
        let feed = |name: &str, value: f32| -> anyhow::Result<()> {
            for (part, elements) in [("weight", 20), ("bias", 5)] {
                let id = fsdp.weight_id(&format!("{name}.{part}"))?;
                fsdp.weight(id, Phase::Forward)?;
                fsdp.gradient(id, &vec![value; elements])?;
            }
            Ok(())
        };
        feed("used", 0.5)?;
        feed("rests", poison)?;
        fsdp.step()?;
        fsdp.sync_blocking()?;
        for _ in 0..2 {
            feed("used", 0.5)?;
            fsdp.declare_unused(fsdp.unit_id("rests")?)?;
            fsdp.step()?;
            fsdp.weight(fsdp.weight_id("rests.bias")?, Phase::Inference)?;
            refused!(
                fsdp.weight(fsdp.weight_id("used.bias")?, Phase::Inference),
                Error::StaleBytes { .. } | Error::Unsynced { .. }
            );
            fsdp.sync_blocking()?;
            let report = fsdp.report()?;
            ensure!(!report.found_inf, "an unused unit's NaN skips the step");
            ensure!((report.grad_norm - 2.5).abs() < 1e-6, "the norm is {}", report.grad_norm);
        }
    }
    Ok(())
}

/// Integer-valued gradients, so that sums are exact in any order.
fn integer_step<B: Backend>(fsdp: &Fsdp<B>, seed: u64) -> anyhow::Result<()> {
    for (number, spec) in fsdp.weights().enumerate() {
        let id = fsdp.weight_id(&spec.name)?;
        fsdp.weight(id, Phase::Forward)?;
        let values: Vec<_> = (0..spec.elements())
            .map(|i| ((i * 7 + seed * 13 + number as u64 * 5) % 17) as f32 - 8.0)
            .collect();
        fsdp.gradient(id, &values)?;
    }
    Ok(())
}

/// Microbatches are averaged: four of them give what their mean gives at once.
pub fn microbatches_add<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let (split, whole) = (build(cx, model.units())?, build(cx, model.units())?);
    refused!(split.begin_step(0), Error::OutOfOrder { .. });
    split.begin_step(4)?;
    for microbatch in 0..4 {
        integer_step(&split, microbatch)?;
        split.finish_backward()?;
        if microbatch == 1 {
            refused!(split.step(), Error::OutOfOrder { .. });
        }
    }
    for spec in model.units().iter().flat_map(|unit| &unit.weights) {
        let number = whole.weights().position(|other| other.name == spec.name).unwrap() as u64;
        let sum = |i: u64| -> f32 {
            (0..4).map(|seed| ((i * 7 + seed * 13 + number * 5) % 17) as f32 - 8.0).sum()
        };
        let id = whole.weight_id(&spec.name)?;
        whole.weight(id, Phase::Forward)?;
        let values: Vec<_> = (0..spec.elements()).map(|i| sum(i) / 4.0).collect();
        whole.gradient(id, &values)?;
    }
    for fsdp in [&split, &whole] {
        fsdp.step()?;
        fsdp.sync_blocking()?;
    }
    let id = split.weight_id("layer0.weight")?;
    let pairs = split.shard_gradient(id)?.into_iter().zip(whole.shard_gradient(id)?);
    // Division by world × 4 rounds where the world is no power of two.
    for (a, b) in pairs {
        ensure!((a - b).abs() <= 1e-5, "{a} is not {b}");
    }
    Ok(())
}

/// `no_sync` on all microbatches but the last gives the same weights with a quarter of the
/// reductions.
pub fn no_sync_gives_the_same<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let (plain, lazy) = (build(cx, model.units())?, build(cx, model.units())?);
    for _ in 0..2 {
        for (fsdp, no_sync) in [(&plain, false), (&lazy, true)] {
            fsdp.begin_step(4)?;
            for microbatch in 0..4 {
                fsdp.set_no_sync(no_sync && microbatch < 3);
                integer_step(fsdp, microbatch)?;
                fsdp.finish_backward()?;
            }
            fsdp.step()?;
            fsdp.sync_blocking()?;
        }
    }
    ensure!(
        plain.traffic().reduced_bytes == 4 * lazy.traffic().reduced_bytes,
        "{:?} {:?}",
        plain.traffic(),
        lazy.traffic()
    );
    let id = plain.weight_id("layer1.weight")?;
    for (a, b) in plain.shard_gradient(id)?.into_iter().zip(lazy.shard_gradient(id)?) {
        ensure!((a - b).abs() <= 1e-5, "{a} is not {b}");
    }
    lazy.begin_step(1)?;
    lazy.set_no_sync(true);
    integer_step(&lazy, 0)?;
    refused!(lazy.step(), Error::OutOfOrder { .. });
    Ok(())
}

/// One weight used twice: two gradients are expected and added before the one reduction, its unit
/// is held, and every backward call is counted.
pub fn tied_weights_add<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let root = UnitSpec::new("root", [WeightSpec::plain("embedding", [11, 4])]).held();
    let units = vec![root, UnitSpec::new("block", [WeightSpec::float8("block.weight", [5, 4])])];
    let fsdp = build(cx, units)?;
    let (tied, block) = (fsdp.weight_id("embedding")?, fsdp.weight_id("block.weight")?);
    let root = fsdp.unit_id("root")?;
    for step in 1..=2 {
        fsdp.weight(tied, Phase::Forward)?;
        fsdp.weight(block, Phase::Forward)?;
        fsdp.weight(tied, Phase::Forward)?;
        ensure!(fsdp.is_resident(root)?, "a held unit stays");
        fsdp.gradient(tied, &[1.0; 44])?;
        ensure!(fsdp.traffic().reduced_bytes == (step - 1) * reduced(cx), "reduced too early");
        fsdp.gradient(block, &[1.0; 20])?;
        fsdp.gradient(tied, &[2.0; 44])?;
        refused!(fsdp.gradient(tied, &[1.0; 44]), Error::OutOfOrder { .. });
        ensure!(fsdp.is_resident(root)?, "a held unit stays until the step");
        fsdp.step()?;
        ensure!(!fsdp.is_resident(root)?, "and no longer");
        fsdp.sync_blocking()?;
        ensure!(fsdp.traffic().reduced_bytes == step * reduced(cx), "reduced twice");
        ensure!(fsdp.shard_gradient(tied)?.iter().all(|&g| g == 3.0), "the uses do not add to 3");
    }
    Ok(())
}

fn reduced<B: Backend>(cx: &Context<B>) -> u64 {
    let world = u64::from(cx.world());
    world * 4 * (11u64.div_ceil(world) * 4 + 5u64.div_ceil(world) * 4)
}

/// What the ranks tell each other arrives whole and in rank order, between the steps' collectives.
pub fn messages_are_exchanged<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let fsdp = build(cx, Mlp::uneven().units())?;
    for round in 0..3_u8 {
        integer_step(&fsdp, 1)?;
        let told = fsdp.exchange("loss", &vec![round; cx.rank() as usize])?;
        let expected: Vec<_> = (0..cx.world() as usize).map(|length| vec![round; length]).collect();
        ensure!(told == expected, "round {round}: {told:?}");
        fsdp.step()?;
        fsdp.sync()?;
    }
    Ok(fsdp.sync_blocking()?)
}

/// What brings no gradients is no microbatch, wherever it stands.
pub fn evaluations_count_as_nothing<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let (plain, evaluated) = (build(cx, model.units())?, build(cx, model.units())?);
    for (fsdp, evaluates) in [(&plain, false), (&evaluated, true)] {
        let evaluate = || -> anyhow::Result<()> {
            for spec in model.units().iter().flat_map(|unit| &unit.weights) {
                fsdp.weight(fsdp.weight_id(&spec.name)?, Phase::Inference)?;
            }
            Ok(fsdp.finish_backward()?)
        };
        if evaluates {
            evaluate()?;
        }
        fsdp.begin_step(2)?;
        for microbatch in 0..2 {
            integer_step(fsdp, microbatch)?;
            fsdp.finish_backward()?;
            if evaluates {
                evaluate()?;
            }
        }
        fsdp.step()?;
        fsdp.sync_blocking()?;
    }
    let id = plain.weight_id("layer0.weight")?;
    ensure!(plain.shard_gradient(id)? == evaluated.shard_gradient(id)?, "gradients differ");
    ensure!(plain.master(id)? == evaluated.master(id)?, "weights differ");
    Ok(())
}
