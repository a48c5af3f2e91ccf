//! The ten steps that a GPU runs with delays: on the CPU, where the order checker looks at each.

use gather8::Scaling;
use gather8_conformance::ten_steps::ten_steps;
use gather8_conformance::threads::ranks_on;
use gather8_kernels::cpu::{Cpu, Schedule};

#[test]
fn ten_steps_are_ordered_and_end_alike_whatever_the_schedule() {
    for world in [1, 2] {
        for scaling in [Scaling::Dynamic, Scaling::delayed()] {
            let run = |device: fn(u64) -> Cpu, seed| {
                ranks_on(world, |_| device(seed), |cx| ten_steps(cx, scaling, || ()).unwrap())
            };
            let plain = run(|_| Cpu::new(), 0);
            for seed in 0..3 {
                let random = |seed| Cpu::builder().schedule(Schedule::Random(seed)).build();
                assert!(run(random, seed) == plain, "world {world}, {scaling:?}, seed {seed}");
            }
        }
    }
}
