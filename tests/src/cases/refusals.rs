//! What must not pass, and that every rank says the same of it.

use anyhow::{bail, ensure};
use gather8::config::MasterWeight;
use gather8::{Error, Fsdp, Phase, Scaling, UnitSpec, WeightSpec};
use gather8_collectives::Error as CollectiveError;
use gather8_kernels::{Backend, DType, Format, Memory, Span, Tensor};

use crate::Context;
use crate::model::{Mlp, initial};

/// All ranks got the same text.
fn agree<B: Backend>(cx: &Context<B>, text: &str) -> anyhow::Result<()> {
    let texts = cx.exchange("verdict", text.as_bytes())?;
    ensure!(
        texts.iter().all(|other| other == text.as_bytes()),
        "the ranks say different things: {:?}",
        texts.iter().map(|text| String::from_utf8_lossy(text)).collect::<Vec<_>>()
    );
    Ok(())
}

/// A NaN or an infinity in one rank's shard: every rank gets the error that names the weight;
/// scales and rings stay.
pub fn nan_in_one_shard_is_named_everywhere<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for scaling in [Scaling::Dynamic, Scaling::delayed()] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for culprit in 0..cx.world() {
                let mut config = cx.config();
                config.scaling = scaling;
                let rows = u64::from(cx.world());
                let specs = ["good", "bad", "fine"].map(|name| WeightSpec::float8(name, [rows, 5]));
                let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
                    .unit(UnitSpec::new("unit", specs))
                    .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
                let before = fsdp.table_snapshot()?;
                let (rank, id) = (cx.rank(), fsdp.weight_id("bad")?);
                // A sound weight changes in the same sync: its amax is refused with the bank.
                let good = fsdp.weight_id("good")?;
                let was = fsdp.weight(good, Phase::Inference)?.to_f32()?;
                fsdp.discard_gradients()?;
                fsdp.update(good, |values| values.iter_mut().for_each(|x| *x *= 2.0))?;
                fsdp.update(id, |values| {
                    if rank == culprit {
                        values[2] = bad;
                    }
                })?;
                let Err(error) = fsdp.sync_blocking() else {
                    bail!("{bad} on rank {culprit} went unnoticed");
                };
                let Error::Collective(CollectiveError::NonFiniteWeights { names }) = &error else {
                    bail!("{bad} gave: {error}");
                };
                ensure!(names == &["bad".to_owned()], "it names {names:?}");
                ensure!(error.to_string().contains("`bad`"), "the text does not name it: {error}");
                // The seed flag of the changed weight stays for the next try; nothing else moves.
                let mut after = fsdp.table_snapshot()?;
                for (after, before) in after.records.iter_mut().zip(&before.records) {
                    after.flags = before.flags;
                }
                ensure!(after == before, "scales or rings moved");
                ensure!(fsdp.weight(id, Phase::Inference).is_err(), "later calls must fail too");
                // Repaired and acknowledged, it goes on.
                fsdp.update(id, |values| values.iter_mut().for_each(|x| *x = 0.25))?;
                fsdp.acknowledge()?;
                fsdp.sync_blocking()?;
                let repaired = fsdp.weight(id, Phase::Inference)?.to_f32()?;
                ensure!(repaired.iter().all(|&x| x == 0.25), "{repaired:?}");
                let doubled: Vec<_> = was.iter().map(|x| x * 2.0).collect();
                ensure!(fsdp.weight(good, Phase::Inference)?.to_f32()? == doubled, "stale bytes");
                fsdp.discard_gradients()?;
            }
        }
    }
    Ok(())
}

/// In an input or gradient slot a NaN is counted and kept out, and training goes on.
pub fn activations_are_kept_out<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let mut config = cx.config();
    config.scaling = Scaling::delayed();
    let model = Mlp::uneven();
    let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
        .units(model.units())
        .input_slot("input", Format::E4m3)
        .gradient_slot("gradient", Format::E5m2)
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let record = |slot: &str, value: f32| -> anyhow::Result<()> {
        let buffer = cx.backend.alloc(4, Memory::Device)?;
        let tensor = Tensor::new(Span::whole(&buffer), DType::F32)?;
        cx.backend.upload(fsdp.compute_stream(), &value.to_le_bytes(), &tensor.span)?;
        Ok(fsdp.record_amax(slot, &tensor)?)
    };
    record("input", 2.0)?;
    record("gradient", 2.0)?;
    fsdp.sync_blocking()?;
    let (input, gradient) = (fsdp.activation_scale("input")?, fsdp.activation_scale("gradient")?);
    ensure!(input == (224.0, 0) && gradient == (28672.0, 0), "{input:?} {gradient:?}");
    let last = cx.world() - 1;
    record("input", if cx.rank() == last { f32::NAN } else { 1.0 })?;
    record("gradient", if cx.rank() == 0 { f32::INFINITY } else { 1.0 })?;
    fsdp.sync_blocking()?;
    ensure!(fsdp.activation_scale("input")? == (224.0, 1), "a NaN moved the input's scale");
    ensure!(fsdp.activation_scale("gradient")? == (28672.0, 1), "an infinity moved the gradient's");
    model.train(&fsdp, &[model.example(u64::from(cx.rank()))])?;
    fsdp.step()?;
    fsdp.sync_blocking()?;
    ensure!(fsdp.report()?.steps == 1, "training must go on");
    Ok(())
}

/// A NaN in one rank's gradients: all ranks skip the same step, and every state is bit for bit what
/// it was.
pub fn found_inf_skips_everywhere<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for scaling in [Scaling::Dynamic, Scaling::delayed()] {
        let mut config = cx.config();
        config.scaling = scaling;
        let model = Mlp::uneven();
        let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .units(model.units())
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
        let id = fsdp.weight_id("layer1.weight")?;
        let step = |poison: Option<f32>| -> anyhow::Result<()> {
            model.train(&fsdp, &[model.example(u64::from(cx.rank()))])?;
            if let Some(poison) = poison {
                // A second use of one weight brings the bad value in.
                let view = fsdp.weight(id, Phase::Forward)?;
                let mut values = vec![0.0; view.to_f32()?.len()];
                if cx.rank() == cx.world() - 1 {
                    values[3] = poison;
                }
                fsdp.gradient(id, &values)?;
            }
            fsdp.step()?;
            Ok(fsdp.sync_blocking()?)
        };
        step(None)?;
        let state = || -> anyhow::Result<Vec<u32>> {
            let mut bits = Vec::new();
            for spec in fsdp.weights().map(|spec| spec.name.clone()).collect::<Vec<_>>() {
                let id = fsdp.weight_id(&spec)?;
                bits.extend(fsdp.master(id)?.iter().map(|x| x.to_bits()));
                let (m, v) = fsdp.moments(id)?;
                bits.extend(m.iter().chain(&v).map(|x| x.to_bits()));
                let bytes = fsdp.weight(id, Phase::Inference)?.to_bytes()?;
                bits.extend(bytes.into_iter().map(u32::from));
            }
            fsdp.discard_gradients()?;
            Ok(bits)
        };
        let before = state()?;
        let table = fsdp.table_snapshot()?;
        for (poison, skipped) in [(f32::NAN, 1), (f32::INFINITY, 2)] {
            step(Some(poison))?;
            let report = fsdp.report()?;
            ensure!(
                report.found_inf && report.steps == 1 && report.skipped == skipped,
                "{report:?}"
            );
            ensure!(state()? == before, "a skipped step changed something");
            ensure!(fsdp.table_snapshot()? == table, "a skipped step moved a scale");
        }
        step(None)?;
        let report = fsdp.report()?;
        ensure!(!report.found_inf && report.steps == 2, "{report:?}");
        ensure!(state()? != before, "the step after must count");
    }
    Ok(())
}

/// Two ranks that gather two equal-sized units in swapped order both get an error that names the
/// difference.
pub fn swapped_gathers_are_named<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    if cx.world() == 1 {
        return Ok(());
    }
    let units = ["left", "right"]
        .map(|name| UnitSpec::new(name, [WeightSpec::float8(format!("{name}.weight"), [16, 16])]));
    let fsdp = Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .units(units)
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let order = if cx.rank() == 1 { ["right", "left"] } else { ["left", "right"] };
    let swapped = || -> gather8::Result<()> {
        for name in order {
            fsdp.unshard(fsdp.unit_id(name)?)?.reshard()?;
        }
        fsdp.sync_blocking()
    };
    let Err(error) = swapped() else { bail!("swapped gathers went unnoticed") };
    let text = error.to_string();
    let named = matches!(error, Error::Collective(CollectiveError::Disordered { .. }))
        && text.contains("`left`")
        && text.contains("`right`")
        && text.contains("rank 0")
        && text.contains("rank 1");
    ensure!(named, "the error is: {text}");
    Ok(())
}

fn different_setting<B: Backend>(
    cx: &Context<B>,
    set: impl Fn(&Fsdp<B>, bool) -> gather8::Result<()>,
    expected: [&str; 2],
) -> anyhow::Result<()> {
    if cx.world() == 1 {
        return Ok(());
    }
    let fsdp = Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .unit(UnitSpec::new("unit", [WeightSpec::float8("w", [16, 16])]))
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    for rate in [1e-3, 2e-3] {
        fsdp.set_lr("default", rate)?;
        fsdp.set_loss_scale(1024.0)?;
        fsdp.begin_step(4)?;
        fsdp.set_no_sync(rate > 1e-3);
        fsdp.set_no_sync(false);
        fsdp.sync_blocking()?;
    }
    set(&fsdp, cx.rank() == 1)?;
    let Err(error) = fsdp.sync_blocking() else { bail!("a different setting went unnoticed") };
    let text = error.to_string();
    let named = matches!(error, Error::Collective(CollectiveError::Disordered { .. }))
        && expected.iter().all(|words| text.contains(words));
    ensure!(named, "the error is: {text}");
    Ok(())
}

/// A setting that one rank changes to another value is found by the next sync, which names it.
pub fn different_rates_are_named<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let expected = [
        "rank 0 set learning rate of `default` to 0.25",
        "rank 1 set learning rate of `default` to 0.5",
    ];
    let set = |fsdp: &Fsdp<B>, odd| fsdp.set_lr("default", if odd { 0.5 } else { 0.25 });
    different_setting(cx, set, expected)
}

/// The same for the number of microbatches, which gradients are divided by.
pub fn different_microbatches_are_named<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let expected =
        ["rank 0 set number of `microbatches` to 2", "rank 1 set number of `microbatches` to 3"];
    different_setting(cx, |fsdp, odd| fsdp.begin_step(if odd { 3 } else { 2 }), expected)
}

/// The same for gradients that one rank alone keeps.
pub fn a_different_no_sync_is_named<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let set = |fsdp: &Fsdp<B>, odd| {
        fsdp.set_no_sync(odd);
        Ok(())
    };
    let expected = ["rank 0 all-reduce of `amax table`", "rank 1 set no_sync of `gradients` to 1"];
    different_setting(cx, set, expected)
}

/// A rank whose step fails, which takes no notice and goes on to its sync, waits there while the
/// others wait in the step: nobody is blamed, and every rank learns where they part.
pub fn an_ignored_error_is_named<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    if cx.world() == 1 {
        return Ok(());
    }
    let mut config = cx.config();
    config.deadline.0 = 2.0;
    let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
        .unit(UnitSpec::new("unit", [WeightSpec::float8("w", [16, 16])]))
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let id = fsdp.weight_id("w")?;
    fsdp.weight(id, Phase::Forward)?;
    fsdp.gradient(id, &[0.5; 256])?;
    if cx.rank() == 1 {
        fsdp.discard_gradients()?;
        let refused = fsdp.step();
        ensure!(matches!(refused, Err(Error::OutOfOrder { .. } | Error::MissingGradient { .. })));
    } else {
        fsdp.step()?;
    }
    let Err(error) = fsdp.sync_blocking() else { bail!("a rank without a step went unnoticed") };
    let text = error.to_string();
    let named = matches!(error, Error::Collective(CollectiveError::Disordered { .. }))
        && text.contains("rank 0 all-reduce of `gradient norm`")
        && text.contains("rank 1 all-reduce of `amax table`");
    ensure!(named, "the error is: {text}");
    agree(cx, &text)
}

/// Ranks that were given different models or configurations all say so, in the same words.
pub fn different_models_are_named<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    if cx.world() == 1 {
        return Ok(());
    }
    let odd = cx.rank() == cx.world() - 1;
    let build = |spec: WeightSpec, config: gather8::Config| {
        Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
            .unit(UnitSpec::new("unit", [spec]))
            .build(|spec, rows| anyhow::Ok(initial(spec, rows)))
    };
    let mut other = cx.config();
    other.scaling = Scaling::delayed();
    let variants = [
        (WeightSpec::float8("other", [4, 4]), cx.config(), "`other`"),
        (WeightSpec::float8("w", [4, 5]), cx.config(), "[4, 5]"),
        (WeightSpec::plain("w", [4, 4]), cx.config(), "as stored"),
        (WeightSpec::float8("w", [4, 4]).frozen(), cx.config(), "frozen"),
        (WeightSpec::float8("w", [4, 4]), other, "scaling"),
    ];
    for (spec, config, named) in variants {
        let usual = (WeightSpec::float8("w", [4, 4]), cx.config());
        let (spec, config) = if odd { (spec, config) } else { usual };
        let error = match build(spec, config) {
            Ok(_) => bail!("a different {named} went unnoticed"),
            Err(error) => error,
        };
        ensure!(matches!(error, Error::Disagreement { .. }), "{error}");
        ensure!(error.to_string().contains(named), "{error} does not name {named}");
        agree(cx, &error.to_string())?;
    }
    let slots = if odd { ["y", "x"] } else { ["x", "y"] };
    let [first, second] = slots.map(|name| (name, Format::E4m3));
    let built = Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .input_slot(first.0, first.1)
        .input_slot(second.0, second.1)
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)));
    let error = built.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(error.contains("amax slot `x`") && error.contains("amax slot `y`"), "{error}");
    Ok(())
}

/// With found-inf switched off, a NaN from 0/0 or inf-inf in a gradient ends as the canonical NaN in
/// weight and master, never as a zero, and the next sync names the weight on every rank.
pub fn nan_gradients_end_as_nan<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    // The machine makes them, not the compiler.
    let [infinity, other] = std::hint::black_box([f32::INFINITY; 2]);
    let [zero, naught] = std::hint::black_box([0.0_f32; 2]);
    for master in [MasterWeight::F32, MasterWeight::Remainder] {
        for poison in [zero / naught, infinity - other, f32::from_bits(0xffff_ffff)] {
            let mut config = cx.config();
            config.optimizer.skip_on_found_inf = false;
            let mut group = config.optimizer.group("default").unwrap();
            group.master = master;
            config.optimizer.groups.insert("default".into(), group);
            let rows = u64::from(cx.world()) + 1;
            let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
                .unit(UnitSpec::new("unit", [WeightSpec::float8("w", [rows, 3])]))
                .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
            let id = fsdp.weight_id("w")?;
            fsdp.weight(id, Phase::Forward)?;
            let mut values = vec![0.5; rows as usize * 3];
            values[1] = poison;
            fsdp.gradient(id, &values)?;
            fsdp.step()?;
            let bits: Vec<_> = fsdp.master(id)?.into_iter().map(f32::to_bits).collect();
            let shard: Vec<_> = fsdp.shard(id)?.into_iter().map(f32::to_bits).collect();
            if cx.rank() == 0 {
                ensure!(bits[1] == 0x7fc0_0000 && shard[1] == 0x7fc0_0000, "{bits:x?} {shard:x?}");
            }
            // One NaN in the global norm makes every clipped gradient NaN, or none: not zeros.
            ensure!(bits.iter().all(|bits| bits & 0x7fff_ffff != 0), "{bits:x?}");
            fsdp.validate(id)?;
            let Err(error) = fsdp.sync_blocking() else { bail!("the NaN went unnoticed") };
            ensure!(error.to_string().contains("`w`"), "{error}");
        }
    }
    Ok(())
}
