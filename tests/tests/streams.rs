//! What the CPU's order checker says of a step: every wait is needed or listed as implied, and no
//! order of the streams changes a byte.

use gather8::hooks::Encoding;
use gather8::{Error, Fsdp, Phase, Scaling, UnitSpec, WeightSpec};
use gather8_collectives::Error as CollectiveError;
use gather8_conformance::Context;
use gather8_conformance::model::{Mlp, initial};
use gather8_conformance::threads::ranks_on;
use gather8_kernels::cpu::{Cpu, Schedule, Stream};
use gather8_kernels::job::Decode;
use gather8_kernels::{Backend, DType, Format, Job, Memory, Span, Tensor};

/// Reads a weight on the compute stream and leaves its values in `scratch`: the host waits for
/// nothing, so that nothing but the runtime's own waits orders the streams.
fn read(
    fsdp: &Fsdp<Cpu>,
    name: &str,
    phase: Phase,
    on: &Stream,
    scratch: &Span<Cpu>,
) -> anyhow::Result<Tensor<Cpu>> {
    let backend = fsdp.backend();
    let view = fsdp.weight(fsdp.weight_id(name)?, phase)?;
    if on.name() != fsdp.compute_stream().name() {
        view.register(on)?;
    }
    let unsharded = view.unsharded()?;
    match &unsharded.encoding {
        Encoding::Float8 { format, record } => {
            let values = scratch.sub(0..unsharded.bytes.len() * 4)?;
            let dst = Tensor::new(values, DType::F32)?;
            let (src, record) = (unsharded.bytes.clone(), record.clone());
            let job = Decode { src, format: *format, record, dst: dst.clone() };
            backend.run(on, &backend.plan(&[Job::Decode(job)])?)?;
            Ok(dst)
        }
        _ => {
            let values = scratch.sub(0..unsharded.bytes.len())?;
            backend.copy(on, &unsharded.bytes, &values)?;
            Ok(Tensor::new(values, DType::Bf16)?)
        }
    }
}

/// Steps that use everything that has a wait: prefetch, both passes, microbatches, an update, a unit
/// gathered ahead and not used, an activation's amax.
fn steps(cx: &Context<Cpu>, scaling: Scaling) -> anyhow::Result<Vec<u8>> {
    let mut config = cx.config();
    config.scaling = scaling;
    let model = Mlp::uneven();
    let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
        .units(model.units())
        .unit(UnitSpec::new("norm", [WeightSpec::plain("norm", [9])]))
        .input_slot("input", Format::E4m3)
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let compute = fsdp.compute_stream();
    let side = cx.backend.stream("side")?;
    let scratch = Span::whole(&cx.backend.alloc(4096, Memory::Device)?);
    let beside = Span::whole(&cx.backend.alloc(4096, Memory::Device)?);
    let first = (fsdp.weight_id("layer0.weight")?, fsdp.unit_id("layer0")?);
    for step in 0..4 {
        fsdp.begin_step(2)?;
        fsdp.declare_unused(fsdp.unit_id("norm")?)?;
        for _ in 0..2 {
            for layer in 0..3 {
                for part in ["weight", "bias"] {
                    let name = format!("layer{layer}.{part}");
                    let read = read(&fsdp, &name, Phase::Forward, compute, &scratch)?;
                    fsdp.record_amax("input", &read)?;
                }
            }
            for layer in (0..3).rev() {
                for part in ["weight", "bias"] {
                    let name = format!("layer{layer}.{part}");
                    let gradient = read(&fsdp, &name, Phase::Backward, compute, &scratch)?;
                    fsdp.gradient_from(fsdp.weight_id(&name)?, &gradient)?;
                }
            }
            fsdp.finish_backward()?;
        }
        // Read by a stream of the trainer's own.
        read(&fsdp, "layer2.weight", Phase::Inference, &side, &beside)?;
        read(&fsdp, "layer2.bias", Phase::Inference, &side, &beside)?;
        // Gathered ahead, cast or not, and not used.
        if step == 2 {
            fsdp.mark_modified(first.0)?;
            fsdp.sync()?;
        }
        fsdp.prefetch(first.1)?;
        if step == 2 {
            fsdp.reshard(first.1)?;
            fsdp.sync()?;
            fsdp.mark_modified(first.0)?;
            fsdp.sync()?;
            fsdp.prefetch(first.1)?;
        }
        // Between the last gather and the optimizer.
        if step == 3 {
            fsdp.sync()?;
        }
        fsdp.step()?;
        fsdp.sync()?;
        if step == 1 {
            read(&fsdp, "layer1.weight", Phase::Inference, &side, &beside)?;
            fsdp.reshard(fsdp.unit_id("layer1")?)?;
            fsdp.mark_modified(fsdp.weight_id("layer1.weight")?)?;
            fsdp.sync()?;
        }
        // Nothing is gathered between these.
        for _ in 0..3 {
            fsdp.record_amax("input", &Tensor::new(scratch.sub(0..64)?, DType::F32)?)?;
            fsdp.sync()?;
        }
    }
    if cx.world() == 1 {
        replays(&fsdp, &scratch, (&side, &beside))?;
    }
    let mut bytes = Vec::new();
    for spec in fsdp.weights() {
        let id = fsdp.weight_id(&spec.name)?;
        bytes.extend(fsdp.weight(id, Phase::Inference)?.to_bytes()?);
        bytes.extend(fsdp.master(id)?.iter().flat_map(|x| x.to_le_bytes()));
    }
    fsdp.check()?;
    Ok(bytes)
}

/// Captured steps, with work of the trainer's own before, inside and after.
fn replays(
    fsdp: &Fsdp<Cpu>,
    scratch: &Span<Cpu>,
    (side, beside): (&Stream, &Span<Cpu>),
) -> anyhow::Result<()> {
    let compute = fsdp.compute_stream();
    let names: Vec<_> = fsdp.weights().map(|spec| spec.name.clone()).collect();
    let step = || -> anyhow::Result<()> {
        for name in &names {
            let read = read(fsdp, name, Phase::Forward, compute, scratch)?;
            fsdp.record_amax("input", &read)?;
        }
        for name in names.iter().rev() {
            let gradient = read(fsdp, name, Phase::Backward, compute, scratch)?;
            fsdp.gradient_from(fsdp.weight_id(name)?, &gradient)?;
        }
        fsdp.finish_backward()?;
        read(fsdp, "layer2.weight", Phase::Inference, side, beside)?;
        read(fsdp, "layer2.bias", Phase::Inference, side, beside)?;
        fsdp.step()?;
        Ok(fsdp.sync()?)
    };
    step()?;
    let captured = fsdp.capture(step)?;
    fsdp.replay(&captured)?;
    // Between replays: a sync, an eager step, and a reader on a stream of the trainer's own.
    fsdp.sync()?;
    fsdp.replay(&captured)?;
    step()?;
    read(fsdp, "norm", Phase::Inference, side, beside)?;
    fsdp.reshard(fsdp.unit_id("norm")?)?;
    fsdp.replay(&captured)?;
    step()
}

fn unordered(error: &anyhow::Error) -> bool {
    let inner = match error.downcast_ref::<Error>() {
        Some(Error::Collective(CollectiveError::Backend(inner))) => Some(inner),
        _ => error.downcast_ref(),
    };
    matches!(inner, Some(gather8_kernels::Error::Unordered { .. }))
}

/// Waits around the exchange of the norm, which a world of one leaves out.
const NOTHING_EXCHANGED: [&str; 2] = ["exchange-after-norm", "decide-after-exchange"];

const SCALINGS: [Scaling; 2] = [Scaling::Dynamic, Scaling::delayed()];

#[test]
fn dropping_any_wait_is_an_error_that_names_both_operations() {
    let mut undetected = Vec::new();
    for world in [1, 2] {
        let waits = std::sync::Mutex::new(std::collections::BTreeSet::new());
        for scaling in SCALINGS {
            let results = ranks_on(
                world,
                |_| Cpu::new(),
                |cx| {
                    let result = steps(cx, scaling);
                    waits.lock().unwrap().extend(cx.backend.waits_seen());
                    result
                },
            );
            results.into_iter().for_each(|result| drop(result.unwrap()));
        }
        for wait in waits.into_inner().unwrap() {
            if world == 1 && NOTHING_EXCHANGED.contains(&wait) {
                continue;
            }
            let mut found = false;
            for scaling in SCALINGS {
                let device = |_| Cpu::builder().drop_wait(wait, None).build();
                for result in ranks_on(world, device, |cx| steps(cx, scaling)) {
                    let Err(error) = result else { continue };
                    found |= unordered(&error);
                    let text = error.to_string();
                    if unordered(&error) {
                        assert!(text.contains("is not ordered after"), "{text}");
                    }
                }
            }
            if !found {
                undetected.push(format!("{wait} (world {world})"));
            }
        }
    }
    assert!(undetected.is_empty(), "waits that others imply: {undetected:?}");
}

#[test]
fn a_hundred_random_orders_give_the_same_bytes() {
    let run = |device: fn(u64) -> Cpu, seed| {
        ranks_on(2, |_| device(seed), |cx| steps(cx, SCALINGS[(seed % 2) as usize]).unwrap())
    };
    let expected = [run(|_| Cpu::new(), 0), run(|_| Cpu::new(), 1)];
    for seed in 0..100 {
        let device = |seed| Cpu::builder().schedule(Schedule::Random(seed)).build();
        assert!(run(device, seed) == expected[(seed % 2) as usize], "seed {seed}");
    }
}
