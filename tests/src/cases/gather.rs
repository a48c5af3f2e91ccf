//! What arrives when a unit is gathered.

use anyhow::{Context as _, ensure};
use gather8::config::GatherType;
use gather8::{Fsdp, Phase, Scaling, UnitSpec, WeightSpec, WeightView};
use gather8_kernels::{Backend, Format, scalar, scale::ScaleRule};

use crate::Context;
use crate::model::{Mlp, initial};

/// Shapes whose rows do not divide, with fewer rows than ranks, with a single row, and flat ones.
fn awkward() -> Vec<WeightSpec> {
    let shapes: [&[u64]; 7] =
        [&[8, 16], &[13, 7], &[3, 33], &[1, 129], &[10, 3, 5], &[257], &[64, 1]];
    let names = (0..).map(|number| format!("awkward{number}"));
    names.zip(shapes).map(|(name, shape)| WeightSpec::float8(name, shape)).collect()
}

fn golden(spec: &WeightSpec, format: Format) -> (Vec<u8>, f32) {
    let whole: Vec<_> = initial(spec, 0..spec.rows())
        .into_iter()
        .map(|x| scalar::bf16_to_f32(scalar::f32_to_bf16(x)))
        .collect();
    let amax = whole.iter().fold(0.0_f32, |amax, x| amax.max(x.abs()));
    let scale = ScaleRule::default().scale(format, amax).unwrap();
    (whole.iter().map(|x| format.encode(x * scale)).collect(), 1.0 / scale)
}

/// Bytes and scales do not depend on the world: they are those of the whole weight, cast at once.
pub fn bytes_are_the_cast_of_the_whole_weight<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for format in [Format::E4m3, Format::E5m2] {
        for scaling in [Scaling::Dynamic, Scaling::delayed()] {
            let mut config = cx.config();
            config.gather.format = format;
            config.scaling = scaling;
            let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
                .unit(UnitSpec::new("awkward", awkward()))
                .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
            for spec in awkward() {
                let view = fsdp.weight(fsdp.weight_id(&spec.name)?, Phase::Inference)?;
                let (bytes, scale_inv) = golden(&spec, format);
                let got = view.scale_inv()?.context("a float8 weight has a scale")?;
                ensure!(
                    got.to_bits() == scale_inv.to_bits(),
                    "{}: scale {got} is not {scale_inv}",
                    spec.name
                );
                ensure!(view.to_bytes()? == bytes, "{}: the gathered bytes differ", spec.name);
            }
        }
    }
    Ok(())
}

/// `gathered_bytes` is world × padded shard bytes per gather: 1 byte per float8 element, 2 per BF16
/// element; two gathers a step, but one for the unit that ends the forward pass.
pub fn traffic_follows_the_formula<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let model = Mlp::uneven();
    let world = u64::from(cx.world());
    for dtype in [GatherType::Float8, GatherType::Bf16] {
        let mut config = cx.config();
        config.gather.dtype = dtype;
        let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(model.units())
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
        let bytes = |unit: &UnitSpec| -> u64 {
            let weights = unit.weights.iter().map(|spec| {
                let padded = world * spec.rows().div_ceil(world) * spec.row_elements();
                padded * if spec.float8 && dtype == GatherType::Float8 { 1 } else { 2 }
            });
            weights.sum()
        };
        let reduced = |unit: &UnitSpec| -> u64 {
            let weights = unit.weights.iter();
            weights.map(|spec| world * spec.rows().div_ceil(world) * spec.row_elements() * 4).sum()
        };
        let units = model.units();
        let per_step: u64 = units.iter().map(bytes).sum::<u64>() * 2 - bytes(&units[2]);
        for step in 1..=3 {
            model.train(&fsdp, &[model.example(u64::from(cx.rank()))])?;
            fsdp.step()?;
            fsdp.sync()?;
            let traffic = fsdp.traffic();
            ensure!(
                traffic.gathered_bytes == step * per_step,
                "{dtype:?}: gathered {} bytes in {step} steps, not {}",
                traffic.gathered_bytes,
                step * per_step
            );
            let expected = step * units.iter().map(reduced).sum::<u64>();
            ensure!(
                traffic.reduced_bytes == expected,
                "reduced {} bytes, not {expected}",
                traffic.reduced_bytes
            );
        }
    }
    Ok(())
}

/// Three bits of mantissa must round most elements, by at most 1/16 of their size (or half a unit
/// of the smallest subnormal): more says the scale is wrong, none says nothing was cast.
pub fn decoded_weights_differ_plausibly<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let spec = WeightSpec::float8("plausible", [64, 64]);
    let fsdp = Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .unit(UnitSpec::new("unit", [spec.clone()]))
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let view = fsdp.weight(fsdp.weight_id("plausible")?, Phase::Inference)?;
    let decoded = view.to_f32()?;
    let scale_inv = view.scale_inv()?.context("a float8 weight has a scale")?;
    let mut different = 0;
    for (got, x) in decoded.iter().zip(initial(&spec, 0..64)) {
        let x = scalar::bf16_to_f32(scalar::f32_to_bf16(x));
        let bound = (x.abs() / 16.0).max(scale_inv / 1024.0) * 1.001;
        ensure!((got - x).abs() <= bound, "{x} decodes to {got}");
        different += usize::from(scalar::f32_to_bf16(*got) != scalar::f32_to_bf16(x));
    }
    let share = different as f64 / decoded.len() as f64;
    // A BF16 value has 7 mantissa bits, E4M3 three: seen in BF16, about 15 of 16 values move.
    ensure!((0.85..=0.99).contains(&share), "{share} of the elements differ");
    Ok(())
}

/// Norms, biases and embeddings travel as BF16, bit for bit; F32 weights as F32.
pub fn plain_weights_arrive_as_stored<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let specs = [
        WeightSpec::plain("norm", [13]),
        WeightSpec::float8("matrix", [5, 11]),
        WeightSpec::plain("full", [7, 3]).stored_as(gather8_kernels::DType::F32),
    ];
    let fsdp = Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .unit(UnitSpec::new("unit", specs.clone()))
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let norm = fsdp.weight(fsdp.weight_id("norm")?, Phase::Inference)?;
    let bits: Vec<u8> = initial(&specs[0], 0..13)
        .into_iter()
        .flat_map(|x| scalar::f32_to_bf16(x).to_le_bytes())
        .collect();
    ensure!(norm.to_bytes()? == bits, "a BF16 weight arrived changed");
    ensure!(norm.scale_inv()?.is_none(), "a BF16 weight has no scale");
    let full = fsdp.weight(fsdp.weight_id("full")?, Phase::Inference)?;
    ensure!(full.to_f32()? == initial(&specs[2], 0..7), "an F32 weight arrived changed");
    Ok(())
}

/// While a unit is gathered its weights cannot change; a change and a sync of others leaves its
/// views as they are, and the others' next gather has the new bytes and their scale.
pub fn a_sync_leaves_what_is_gathered<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for scaling in [Scaling::Dynamic, Scaling::delayed()] {
        let mut config = cx.config();
        config.scaling = scaling;
        let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(Mlp::uneven().units())
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
        let kept = (fsdp.weight_id("layer0.weight")?, fsdp.unit_id("layer0")?);
        let other = (fsdp.weight_id("layer1.weight")?, fsdp.unit_id("layer1")?);
        let grow = |values: &mut [f32]| values.iter_mut().for_each(|value| *value *= 8.0);
        let read = |view: &WeightView<B>| anyhow::Ok((view.scale_inv()?, view.to_bytes()?));

        let guard = fsdp.unshard(kept.1)?;
        let view = guard.weight(kept.0)?;
        let kept_before = read(&view)?;
        let other_guard = fsdp.unshard(other.1)?;
        let other_before = read(&other_guard.weight(other.0)?)?;
        other_guard.reshard()?;
        ensure!(fsdp.update(kept.0, grow).is_err(), "a gathered weight was changed");
        fsdp.update(other.0, grow)?;
        fsdp.sync()?;
        let other_guard = fsdp.unshard(other.1)?;
        let other_after = read(&other_guard.weight(other.0)?)?;
        ensure!(read(&view)? == kept_before, "{scaling:?}: the view has changed");
        ensure!(read(&guard.weight(kept.0)?)? == kept_before, "{scaling:?}: the unit has changed");
        ensure!(other_after.1 == other_before.1, "{scaling:?}: the same codes of larger values");
        let factor = other_after.0.unwrap_or(0.0) / other_before.0.unwrap_or(1.0);
        ensure!((factor - 8.0).abs() < 1e-5, "{scaling:?}: the scale went by {factor}");
    }
    Ok(())
}
