//! Captured graphs: the same bytes as eager launches, one launch per pass, no wait on the host.

use std::time::{Duration, Instant};

use gather8_kernels::cuda::Cuda;
use gather8_kernels::job::{
    AmaxAlgorithm, Cast, Control, Emit, Master, Norm, Optimize, SumNorms, UpdateScales,
};
use gather8_kernels::layout::{
    BytesRecord, ControlRecord, GroupRecord, NormRecord, SlotRecord, norm_tiles, slot_flags,
    status_bytes,
};
use gather8_kernels::scale::ScaleRule;
use gather8_kernels::{Backend, DType, Format, Job, Memory, Span, Tensor};

use crate::support::Random;
use crate::{Desk, cuda};

/// A training step's passes at world 1 over a few weights, one of them of odd length.
struct Step {
    plans: Vec<gather8_kernels::cuda::Plan>,
    grads: Vec<Tensor<Cuda>>,
    groups: Span<Cuda>,
    bank: Span<Cuda>,
    state: Vec<Span<Cuda>>,
}

fn step(desk: &Desk<Cuda>) -> Step {
    let mut random = Random(31);
    let lengths = [100_003_usize, 1, 65_536, 3];
    let group = GroupRecord {
        beta1: 0.9,
        beta2: 0.95,
        lr: 1e-3,
        weight_decay: 0.1,
        eps: 1e-8,
        b1: 0.9,
        one_minus_b1: 0.1,
        b2: 0.95,
        one_minus_b2: 0.05,
        ..Default::default()
    };
    let groups = desk.put(&[group], 0);
    let control = desk.put(
        &[ControlRecord {
            inverse_loss_scale: 1.0,
            max_norm: 1.0,
            skip_on_found_inf: 1,
            ..Default::default()
        }],
        0,
    );
    let slots = lengths.len() as u64;
    let slot = SlotRecord {
        published: 10.0,
        published_inv: 0.1,
        cast: 10.0,
        cast_inv: 0.1,
        version: 1,
        flags: slot_flags::DELAYED,
        ..Default::default()
    };
    let records = desk.put(&vec![slot; lengths.len()], 0);
    let bank = desk.put(&vec![0_u32; lengths.len() + 4], 0);
    let rings = desk.put(&vec![1_f32; lengths.len() * 16], 0);
    let status = Span::whole(&desk.backend.alloc(status_bytes(slots), Memory::Host).unwrap());
    let tiles: u64 = lengths.iter().map(|&n| norm_tiles(n as u64)).sum();
    let tiles = desk.put(&vec![NormRecord::default(); tiles as usize], 0);
    let total = desk.put(&[NormRecord::default()], 0);
    let mut state =
        vec![groups.clone(), control.clone(), records.clone(), rings.clone(), bank.clone()];
    let (mut norms, mut optimizes, mut casts, mut grads) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut tile = 0;
    for (number, &elements) in lengths.iter().enumerate() {
        let number = number as u64;
        let mut halves = |scale: f32| -> Vec<u16> {
            (0..elements).map(|_| ((random.uniform() * scale).to_bits() >> 16) as u16).collect()
        };
        let (grad, weight) = (halves(0.01), halves(0.1));
        let grad = desk.tensor(&grad, DType::Bf16, 0);
        let weight = desk.tensor(&weight, DType::Bf16, 0);
        let remainder = desk.put(&vec![0_u16; elements], 0);
        let moment = || desk.tensor(&vec![0_f32; elements], DType::F32, 0);
        let (exp_avg, exp_avg_sq) = (moment(), moment());
        let scales = records.sub(number * 32..number * 32 + 32).unwrap();
        let record = desk.put(&[BytesRecord::default()], 0);
        let codes = desk.put(&vec![0_u8; elements], 0);
        let count = norm_tiles(elements as u64) * 16;
        norms.push(Job::Norm(Norm {
            src: grad.clone(),
            tiles: tiles.sub(tile..tile + count).unwrap(),
        }));
        tile += count;
        state.extend(
            [&weight.span, &remainder, &exp_avg.span, &exp_avg_sq.span, &codes, &record]
                .map(Span::clone),
        );
        optimizes.push(Job::Optimize(Optimize {
            grad: grad.clone(),
            exp_avg,
            exp_avg_sq,
            weight: weight.clone(),
            master: Master::Remainder(remainder),
            group: groups.clone(),
            control: control.clone(),
            amax: Some(bank.sub(number * 4..number * 4 + 4).unwrap()),
            emit: (number != 0).then(|| Emit {
                dst: codes.clone(),
                format: Format::E4m3,
                scales: scales.clone(),
                record: record.clone(),
            }),
        }));
        casts.push(Job::Cast(Cast {
            src: weight,
            dst: codes,
            format: Format::E4m3,
            scales,
            record,
            saturated: None,
            amax: None,
        }));
        grads.push(grad);
    }
    let update = UpdateScales {
        slots,
        bank: bank.clone(),
        records,
        rings,
        history: 16,
        algorithm: AmaxAlgorithm::Max,
        rule: ScaleRule::default(),
        status,
    };
    let passes = [
        norms,
        vec![Job::SumNorms(SumNorms { tiles, total: total.clone() })],
        vec![Job::Control(Control { total, control, groups: groups.clone() })],
        optimizes,
        vec![Job::UpdateScales(update)],
        casts,
    ];
    let plans: Vec<_> = passes.iter().map(|jobs| desk.backend.plan(jobs).unwrap()).collect();
    assert!(plans.iter().all(|plan| plan.launches() == 1), "one launch per pass: {plans:?}");
    Step { plans, grads, groups, bank, state }
}

impl Step {
    fn issue(&self, desk: &Desk<Cuda>) -> gather8_kernels::Result<()> {
        // The all-reduce of a world of 1: the order words are made complementary.
        let slots = self.bank.len() - 16;
        let order = self.bank.sub(slots..slots + 16)?;
        for (number, plan) in self.plans.iter().enumerate() {
            if number == 4 {
                desk.backend.upload(
                    &desk.stream,
                    bytemuck::cast_slice(&[1_u32, 2, !1, !2]),
                    &order,
                )?;
            }
            desk.backend.run(&desk.stream, plan)?;
        }
        Ok(())
    }

    /// Fifty steps with a moving learning rate, and found-inf in two of them.
    fn train(&self, desk: &Desk<Cuda>, mut step: impl FnMut()) -> Vec<Vec<u8>> {
        for number in 0..50_u32 {
            let lr = 1e-3 / (1.0 + number as f32);
            desk.backend
                .upload(&desk.stream, &lr.to_le_bytes(), &self.groups.sub(16..20).unwrap())
                .unwrap();
            let inf = number == 7 || number == 30;
            let first = (if inf { f32::NAN } else { 0.003 * number as f32 }).to_bits() >> 16;
            let target = &self.grads[0].span;
            desk.backend
                .upload(&desk.stream, &(first as u16).to_le_bytes(), &target.sub(0..2).unwrap())
                .unwrap();
            step();
        }
        self.state.iter().map(|span| desk.get(span)).collect()
    }
}

#[test]
#[ignore = "needs a GPU"]
fn replays_equal_eager_steps() {
    let desk = Desk::new(cuda());
    let eager = step(&desk);
    let expected = eager.train(&desk, || eager.issue(&desk).unwrap());
    let captured = step(&desk);
    let (graph, ()) = desk.backend.capture(&desk.stream, || captured.issue(&desk)).unwrap();
    println!("{graph:?}");
    assert_eq!(graph.kernels(), captured.plans.len(), "one kernel per pass");
    assert_eq!(graph.nodes(), graph.kernels() + 1, "and the upload of the order words");
    let found = captured.train(&desk, || graph.launch(&desk.stream).unwrap());
    for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
        crate::compare(&format!("state {number}"), expected, found);
    }
    let record = bytemuck::pod_read_unaligned::<ControlRecord>(&found[1]);
    assert_eq!((record.step, record.skipped), (48, 2));
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_keeps_what_it_uses_and_a_failed_capture_leaves_no_trace() {
    let desk = Desk::new(cuda());
    let span = desk.put(&[0_u8; 1000], 0);
    let (graph, ()) = desk
        .backend
        .capture(&desk.stream, || {
            let gone = desk.backend.alloc(1000, Memory::Device)?;
            let gone = Span::whole(&gone);
            desk.backend.upload(&desk.stream, &[5; 1000], &gone)?;
            desk.backend.copy(&desk.stream, &gone, &span)
        })
        .unwrap();
    graph.launch(&desk.stream).unwrap();
    assert_eq!(desk.get(&span), [5; 1000]);
    let error =
        desk.backend.capture(&desk.stream, || desk.backend.synchronize(&desk.stream)).unwrap_err();
    assert!(error.to_string().contains("outside of the capture"), "{error}");
    desk.backend.fill(&desk.stream, &span, 6).unwrap();
    assert_eq!(desk.get(&span), [6; 1000]);
}

/// The host issues a whole step while the device stands still: nothing in it waits.
#[test]
#[ignore = "needs a GPU"]
fn a_step_is_issued_while_the_device_stands_still() {
    use cudarc::driver::sys;
    let desk = Desk::new(cuda());
    let step = step(&desk);
    step.issue(&desk).unwrap();
    desk.backend.synchronize(&desk.stream).unwrap();
    let flag = Span::whole(&desk.backend.alloc(4, Memory::Host).unwrap());
    let gate = desk.backend.stream("gate").unwrap();
    // SAFETY: a live stream and a mapped word; the wait ends when the word is 1.
    let code =
        unsafe { sys::cuStreamWaitValue32_v2(desk.stream.raw().cast(), flag.address(), 1, 0) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    let begun = Instant::now();
    for _ in 0..20 {
        step.issue(&desk).unwrap();
    }
    let issued = begun.elapsed();
    let event = desk.backend.record(&desk.stream).unwrap();
    // SAFETY: a live event.
    let state = unsafe { sys::cuEventQuery(event.raw().cast()) };
    assert_eq!(state, sys::CUresult::CUDA_ERROR_NOT_READY, "the device was to stand still");
    desk.backend.fill(&gate, &flag.sub(0..1).unwrap(), 1).unwrap();
    desk.backend.wait_host(&event).unwrap();
    println!(
        "host time of a step of {} passes: {:.1} us",
        step.plans.len(),
        issued.as_secs_f64() / 20.0 * 1e6
    );
    assert!(issued < Duration::from_secs(1));
}
