//! Delayed and dynamic scaling over versions.

use anyhow::{Context as _, ensure};
use gather8::config::Config;
use gather8::{Fsdp, Phase, Scaling, UnitSpec, WeightSpec};
use gather8_kernels::job::AmaxAlgorithm;
use gather8_kernels::{Backend, DType, Format, Memory, Span, Tensor, scale::ScaleRule};

use crate::Context;
use crate::model::initial;

const ROWS: u64 = 9;
const COLUMNS: u64 = 11;

fn build<B: Backend>(cx: &Context<B>, config: Config) -> anyhow::Result<Fsdp<B>> {
    Ok(Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
        .unit(UnitSpec::new("unit", [WeightSpec::float8("w", [ROWS, COLUMNS])]))
        .input_slot("input", Format::E4m3)
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?)
}

/// A step with a gradient that makes every element grow away from zero.
fn grow<B: Backend>(fsdp: &Fsdp<B>) -> anyhow::Result<()> {
    let id = fsdp.weight_id("w")?;
    let values = fsdp.weight(id, Phase::Forward)?.to_f32()?;
    let gradient: Vec<_> = values.iter().map(|&x| if x < 0.0 { 1.0 } else { -1.0 }).collect();
    fsdp.gradient(id, &gradient)?;
    Ok(fsdp.step()?)
}

fn whole<B: Backend>(cx: &Context<B>, fsdp: &Fsdp<B>) -> anyhow::Result<Vec<f32>> {
    let shard = fsdp.shard(fsdp.weight_id("w")?)?;
    let bytes: Vec<u8> = shard.iter().flat_map(|x| x.to_le_bytes()).collect();
    let parts = cx.exchange("whole", &bytes)?.concat();
    Ok(parts.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |amax: f32, x| amax.max(x.abs()))
}

fn scale_of(amax: f32) -> f32 {
    ScaleRule::default().scale(Format::E4m3, amax).unwrap()
}

/// Version v is cast with s(v-1); the bytes are equal whether the optimizer writes them along or a
/// cast makes them, and other than dynamic scaling's on a growing weight.
pub fn delayed_lags_by_one_version<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let configured = |scaling, separate| {
        let mut config = cx.config();
        config.scaling = scaling;
        config.gather.count_saturated = separate;
        let mut group = config.optimizer.group("default").unwrap();
        group.lr = 0.05;
        config.optimizer.groups.insert("default".into(), group);
        build(cx, config)
    };
    let emitted = configured(Scaling::delayed(), false)?;
    let separate = configured(Scaling::delayed(), true)?;
    let dynamic = configured(Scaling::Dynamic, false)?;
    let id = emitted.weight_id("w")?;
    let mut before = amax(&whole(cx, &emitted)?);
    let mut largest = before;
    for step in 0..6 {
        for fsdp in [&emitted, &separate, &dynamic] {
            grow(fsdp)?;
            fsdp.sync()?;
        }
        let values = whole(cx, &emitted)?;
        let expected_scale = scale_of(largest);
        let view = emitted.weight(id, Phase::Inference)?;
        let got = view.scale_inv()?.context("a scale")?;
        ensure!(
            got.to_bits() == (1.0 / expected_scale).to_bits(),
            "step {step}: version {} was cast with {got}, not with 1 / s(v-1) = {}",
            step + 2,
            1.0 / expected_scale
        );
        let codes: Vec<_> =
            values.iter().map(|x| Format::E4m3.encode(x * expected_scale)).collect();
        ensure!(view.to_bytes()? == codes, "step {step}: the emitted bytes differ");
        let cast = separate.weight(id, Phase::Inference)?;
        ensure!(cast.to_bytes()? == codes, "step {step}: the cast's bytes differ");
        let now = amax(&values);
        ensure!(now > before, "the weight grows");
        let own = dynamic.weight(id, Phase::Inference)?;
        let own_scale = 1.0 / scale_of(amax(&whole(cx, &dynamic)?));
        ensure!(
            own.scale_inv()?.context("a scale")?.to_bits() == own_scale.to_bits(),
            "dynamic scale"
        );
        ensure!(own.to_bytes()? != codes, "step {step}: dynamic scaling gives the same bytes");
        for fsdp in [&emitted, &separate, &dynamic] {
            fsdp.finish_backward()?;
            fsdp.discard_gradients()?;
        }
        largest = largest.max(now);
        before = now;
    }
    Ok(())
}

/// Records `values` in the input slot and syncs.
fn record<B: Backend>(cx: &Context<B>, fsdp: &Fsdp<B>, values: &[f32]) -> anyhow::Result<()> {
    let buffer = cx.backend.alloc(values.len() as u64 * 4, Memory::Device)?;
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensor = Tensor::new(Span::whole(&buffer), DType::F32)?;
    cx.backend.upload(fsdp.compute_stream(), &bytes, &tensor.span)?;
    Ok(fsdp.record_amax("input", &tensor)?)
}

/// A spike of 10 x in one step holds the scale down for exactly `history` syncs.
pub fn a_spike_lasts_for_history_syncs<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for history in [1, 3, 16] {
        let mut config = cx.config();
        config.scaling = Scaling::Delayed { history, algorithm: AmaxAlgorithm::Max };
        let fsdp = build(cx, config)?;
        for _ in 0..3 {
            record(cx, &fsdp, &[1.0])?;
            fsdp.sync()?;
        }
        ensure!(fsdp.activation_scale("input")?.0 == scale_of(1.0), "the scale of 1");
        record(cx, &fsdp, &[10.0])?;
        fsdp.sync()?;
        for sync in 1..=history {
            let scale = fsdp.activation_scale("input")?.0;
            ensure!(
                scale == scale_of(10.0),
                "history {history}: after {sync} syncs the scale is {scale}"
            );
            record(cx, &fsdp, &[1.0])?;
            fsdp.sync()?;
        }
        let scale = fsdp.activation_scale("input")?.0;
        ensure!(scale == scale_of(1.0), "history {history}: the spike outlives its ring: {scale}");
    }
    Ok(())
}

fn saturated_codes(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0x7f == 0x7e).count()
}

/// Neither the first cast saturates, nor the first after an update made the weight 100 times larger
/// (the amax itself lands on the largest code, and little else).
pub fn the_first_cast_does_not_saturate<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    for scaling in [Scaling::Dynamic, Scaling::delayed()] {
        let mut config = cx.config();
        config.scaling = scaling;
        config.gather.count_saturated = true;
        let fsdp = build(cx, config)?;
        let id = fsdp.weight_id("w")?;
        let view = fsdp.weight(id, Phase::Inference)?;
        let before = view.to_bytes()?;
        ensure!(saturated_codes(&before) < 20, "{} codes at the end", saturated_codes(&before));
        let decoded = view.to_f32()?;
        fsdp.finish_backward()?;
        fsdp.update(id, |values| values.iter_mut().for_each(|x| *x *= 100.0))?;
        fsdp.sync()?;
        fsdp.discard_gradients()?;
        let view = fsdp.weight(id, Phase::Inference)?;
        let after = view.to_f32()?;
        for (before, after) in decoded.iter().zip(&after) {
            let wanted = before * 100.0;
            ensure!((after - wanted).abs() <= wanted.abs() / 7.0 + 0.1, "{before} became {after}");
        }
        ensure!(fsdp.report()?.saturated == 0, "values saturated");
        fsdp.reshard(fsdp.unit_id("unit")?)?;
    }
    Ok(())
}

/// A slot that nothing touched between two syncs does not move.
pub fn untouched_slots_rest<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let mut config = cx.config();
    config.scaling = Scaling::Delayed { history: 2, algorithm: AmaxAlgorithm::Max };
    let fsdp = build(cx, config)?;
    record(cx, &fsdp, &[8.0])?;
    fsdp.sync()?;
    record(cx, &fsdp, &[2.0])?;
    fsdp.sync()?;
    for _ in 0..5 {
        fsdp.sync()?;
        ensure!(fsdp.activation_scale("input")?.0 == scale_of(8.0), "an untouched slot moved");
    }
    record(cx, &fsdp, &[2.0])?;
    fsdp.sync()?;
    ensure!(fsdp.activation_scale("input")?.0 == scale_of(2.0), "the ring goes on where it stood");
    Ok(())
}

/// Two accumulations between syncs keep the larger, across calls and across ranks.
pub fn larger_of_two_accumulations<B: Backend>(cx: &Context<B>) -> anyhow::Result<()> {
    let fsdp = build(cx, cx.config())?;
    for (first, second) in [(3.0, 1.0), (1.0, 3.0)] {
        // Every rank adds its share; the last rank has the largest of all.
        let share = (cx.rank() + 1) as f32;
        record(cx, &fsdp, &[first * share, 0.0])?;
        record(cx, &fsdp, &[-second * share])?;
        fsdp.sync()?;
        let expected = scale_of(3.0 * cx.world() as f32);
        let scale = fsdp.activation_scale("input")?.0;
        ensure!(scale == expected, "the scale is {scale}, not {expected}");
    }
    Ok(())
}
