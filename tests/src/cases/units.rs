//! Units by hand, and in orders of a trainer's own.

use anyhow::{bail, ensure};
use gather8::{Error, Fsdp, Phase, UnitSpec, WeightSpec};
use gather8_kernels::Backend;

use super::lifecycle::{build, refused};
use crate::Context;
use crate::model::{Holder, Mlp, initial};

/// Guards, prefetches and hooks by hand give the bytes that `weight` gives.
pub fn explicit_units<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let fsdp = build(cx, model.units())?;
    let expected = Holder::weight(&fsdp, "layer1.weight", Phase::Inference)?;
    fsdp.reshard(fsdp.unit_id("layer1")?)?;
    let (zero, one) = (fsdp.unit_id("layer0")?, fsdp.unit_id("layer1")?);
    fsdp.prefetch(one)?;
    let guard = fsdp.unshard(zero)?;
    refused!(guard.weight(fsdp.weight_id("layer1.weight")?), Error::Weight { .. });
    let other = fsdp.unshard(one)?;
    ensure!(other.weight(fsdp.weight_id("layer1.weight")?)?.to_f32()? == expected, "bytes differ");
    guard.reshard()?;
    ensure!(!fsdp.is_resident(zero)? && fsdp.is_resident(one)?, "each guard holds its own unit");
    drop(other);
    ensure!(!fsdp.is_resident(one)?, "dropping a guard reshards");

    // What keeps a unit is its last guard, whatever else is asked for meanwhile.
    let (first, second) = (fsdp.unshard(one)?, fsdp.unshard(one)?);
    let view = first.weight(fsdp.weight_id("layer1.weight")?)?;
    fsdp.weight(fsdp.weight_id("layer0.weight")?, Phase::Inference)?;
    drop(first);
    ensure!(view.to_f32()? == expected, "the second guard holds it");
    drop(second);
    ensure!(!fsdp.is_resident(one)?, "the last guard is gone");
    // A guard whose stay has ended is no guard of a later one.
    let ended = fsdp.unshard(one)?;
    fsdp.reshard(one)?;
    refused!(ended.weight(fsdp.weight_id("layer1.weight")?), Error::UsedAfterReshard { .. });
    let later = fsdp.unshard(one)?;
    refused!(ended.weight(fsdp.weight_id("layer1.weight")?), Error::UsedAfterReshard { .. });
    drop(ended);
    ensure!(fsdp.is_resident(one)?, "an old guard ended a later stay");
    later.reshard()?;
    ensure!(!fsdp.is_resident(one)?, "the later guard is of effect");
    fsdp.unshard(one)?.keep();
    ensure!(fsdp.is_resident(one)?, "it was to be kept");
    fsdp.reshard(zero)?;
    fsdp.weight(fsdp.weight_id("layer0.weight")?, Phase::Inference)?;
    ensure!(!fsdp.is_resident(one)?, "but not against another");
    Ok(())
}

/// Units that come back in one pass, and gradients that come in an order of their own, need memory
/// for as many as are in use at once, and no more.
pub fn units_are_used_in_any_order<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let build = |arena_slots: u32, gradient_slots: u32| {
        let mut config = cx.config();
        config.gather.arena_slots = arena_slots;
        config.gather.gradient_slots = gradient_slots;
        let names = ["a", "b", "c", "d"];
        let units = names.map(|n| UnitSpec::new(n, [WeightSpec::float8(format!("{n}.w"), [5, 4])]));
        Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(units)
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))
    };
    // A step whose forward pass uses the units in this order, and whose backward pass in reverse.
    let step = |fsdp: &Fsdp<B>, forward: &[&str]| -> gather8::Result<()> {
        let id = |name: &str| fsdp.weight_id(&format!("{name}.w"));
        for name in forward {
            fsdp.weight(id(name)?, Phase::Forward)?;
        }
        for name in forward.iter().rev() {
            fsdp.weight(id(name)?, Phase::Backward)?;
            fsdp.gradient(id(name)?, &[1.0; 20])?;
        }
        for number in 0..4 {
            let name = ["a", "b", "c", "d"][number];
            if !forward.contains(&name) {
                fsdp.declare_unused(fsdp.unit_id(name)?)?;
            }
        }
        fsdp.step()?;
        fsdp.sync_blocking()
    };
    for (slots, forward) in [
        (2, &["a", "b", "c", "d"][..]),
        (2, &["a", "b", "c", "a"]),
        (3, &["a", "b", "c", "b", "a"]),
        (4, &["a", "b", "c", "d", "a", "b", "c", "d"]),
    ] {
        let fsdp = build(slots, slots)?;
        for _ in 0..3 {
            step(&fsdp, forward)?;
        }
        for name in forward {
            let gradient = fsdp.shard_gradient(fsdp.weight_id(&format!("{name}.w"))?)?;
            let uses = forward.iter().filter(|other| *other == name).count() as f32;
            ensure!(gradient.iter().all(|&g| g == uses), "{forward:?}: {name} got {gradient:?}");
        }
    }

    // What is gathered ahead stays if what has been used can go instead.
    {
        let mut config = cx.config();
        config.gather.arena_slots = 3;
        let units = ["a", "b", "c", "d"].map(|n| {
            let weight = WeightSpec::float8(format!("{n}.w"), [5, 4]);
            UnitSpec::new(n, [if n == "d" { weight.frozen() } else { weight }])
        });
        let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(units)
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
        let forward = ["a", "b", "c", "d", "a"];
        for step in 1..=4 {
            for name in forward {
                fsdp.weight(fsdp.weight_id(&format!("{name}.w"))?, Phase::Forward)?;
            }
            for name in forward.iter().rev() {
                let id = fsdp.weight_id(&format!("{name}.w"))?;
                fsdp.weight(id, Phase::Backward)?;
                if *name != "d" {
                    fsdp.gradient(id, &[1.0; 20])?;
                }
            }
            fsdp.step()?;
            fsdp.sync_blocking()?;
            let gathers = fsdp.traffic().gathers;
            ensure!(gathers <= 8 * step, "{gathers} gathers in {step} steps");
        }
    }

    // Two weights a unit, all gradients at the end, those of one unit far apart.
    for (slots, enough) in [(2, false), (3, true)] {
        let mut config = cx.config();
        config.gather.gradient_slots = slots;
        let units = ["a", "b", "c"].map(|n| {
            let weights = ["v", "w"].map(|w| WeightSpec::float8(format!("{n}.{w}"), [5, 4]));
            UnitSpec::new(n, weights)
        });
        let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(units)
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
        let ids: Vec<_> = fsdp.weights().map(|spec| spec.name.clone()).collect();
        for name in &ids {
            fsdp.weight(fsdp.weight_id(name)?, Phase::Forward)?;
        }
        let mut outcome = Ok(());
        for number in [0, 2, 4, 1, 3, 5] {
            let given = fsdp.gradient(fsdp.weight_id(&ids[number])?, &[1.0; 20]);
            outcome = outcome.and(given);
            if outcome.is_err() {
                break;
            }
        }
        if enough {
            outcome?;
            fsdp.step()?;
            fsdp.sync_blocking()?;
        } else {
            let text = refused!(outcome, Error::GradientSlotsExhausted { .. });
            ensure!(text.contains("`c`") && text.contains("`a`, `b`"), "{text}");
        }
    }
    Ok(())
}
