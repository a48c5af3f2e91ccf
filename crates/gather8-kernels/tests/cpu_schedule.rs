//! Whatever order the streams get to run in, the bytes are the same.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod cpu_support;

use cpu_support::{Random, device, tensor, values};
use gather8_kernels::backend::Backend;
use gather8_kernels::cpu::{Access, Cpu, Schedule};
use gather8_kernels::job::{Accumulate, Amax, Divide};
use gather8_kernels::{DType, Job};

const ELEMENTS: usize = if cfg!(miri) { 4 } else { 96 };
const STEPS: usize = 3;

/// Three producers add into one accumulator in a fixed order and all record their amaxes; a fourth
/// stream passes the sums on.
fn pipeline(schedule: Schedule) -> Vec<u32> {
    let cpu = Cpu::builder().schedule(schedule).build();
    let producers = ["p0", "p1", "p2"].map(|name| cpu.stream(name).unwrap());
    let sink = cpu.stream("sink").unwrap();
    let inputs = [(); 3].map(|()| device(&cpu, ELEMENTS * 4));
    let (sum, out, slots) =
        (device(&cpu, ELEMENTS * 4), device(&cpu, ELEMENTS * 4 * STEPS), device(&cpu, 4 * STEPS));
    let mut random = Random(42);
    let mut free = cpu.record(&sink).unwrap();
    for step in 0..STEPS {
        let mut turn = free.clone();
        for (stream, input) in producers.iter().zip(&inputs) {
            cpu.upload(stream, bytemuck::cast_slice(&random.floats(ELEMENTS)), input).unwrap();
            let src = tensor(input, DType::F32);
            let slot = slots.sub(step as u64 * 4..step as u64 * 4 + 4).unwrap();
            cpu.run(stream, &cpu.plan(&[Job::Amax(Amax { src: src.clone(), slot })]).unwrap())
                .unwrap();
            // The sums depend on the order, so the producers take turns.
            cpu.wait(stream, &turn, "turn").unwrap();
            let dst = tensor(&sum, DType::F32);
            cpu.run(stream, &cpu.plan(&[Job::Accumulate(Accumulate { src, dst })]).unwrap())
                .unwrap();
            turn = cpu.record(stream).unwrap();
        }
        cpu.wait(&sink, &turn, "sum").unwrap();
        let row = out.sub((step * ELEMENTS * 4) as u64..((step + 1) * ELEMENTS * 4) as u64);
        let (src, dst) = (tensor(&sum, DType::F32), tensor(&row.unwrap(), DType::F32));
        cpu.run(&sink, &cpu.plan(&[Job::Divide(Divide { src, dst, divisor: 3.0 })]).unwrap())
            .unwrap();
        cpu.fill(&sink, &sum, 0).unwrap();
        free = cpu.record(&sink).unwrap();
    }
    for stream in &producers {
        cpu.wait(&sink, &cpu.record(stream).unwrap(), "slots").unwrap();
    }
    let mut all = values::<u32>(&cpu, &sink, &out);
    all.extend(values::<u32>(&cpu, &sink, &slots));
    all
}

#[test]
fn a_hundred_seeds_give_the_same_bytes() {
    let expected = pipeline(Schedule::InOrder);
    assert!(expected.iter().all(|&word| word != 0));
    let seeds = if cfg!(miri) { 3 } else { 100 };
    for seed in 0..seeds {
        assert_eq!(pipeline(Schedule::Random(seed)), expected, "seed {seed}");
    }
}

/// The pauses do change the order among streams that nothing orders; else the test above shows
/// nothing.
#[test]
#[cfg_attr(miri, ignore = "Miri's clock is its own")]
fn seeds_change_the_order() {
    let order_of = |seed| {
        let cpu = Cpu::builder().schedule(Schedule::Random(seed)).build();
        let streams = ["a", "b"].map(|name| cpu.stream(name).unwrap());
        let log = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
        for _ in 0..8 {
            for stream in &streams {
                let (log, name) = (std::sync::Arc::clone(&log), stream.name().to_owned());
                cpu.submit(stream, "log", &[] as &[Access], move |_| {
                    log.lock().unwrap().push_str(&name);
                    Ok(())
                })
                .unwrap();
            }
        }
        for stream in &streams {
            cpu.synchronize(stream).unwrap();
        }
        log.lock().unwrap().clone()
    };
    let orders: std::collections::BTreeSet<_> = (0..20).map(order_of).collect();
    assert!(orders.len() > 5, "{orders:?}");
}
