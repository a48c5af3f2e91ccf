//! What must not depend on threads, and what must not be left of them.

use gather8::{Fsdp, Scaling};
use gather8_conformance::Context;
use gather8_conformance::model::{Mlp, initial};
use gather8_conformance::threads::ranks_on;
use gather8_kernels::cpu::Cpu;
use gather8_kernels::{Backend, Memory, Span};

/// Weights large enough that passes are split over threads.
fn train(cx: &Context<Cpu>) -> anyhow::Result<Vec<u32>> {
    let mut config = cx.config();
    config.scaling = Scaling::delayed();
    let model = Mlp { dims: vec![257, 1031, 5], frozen_first: false };
    let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
        .units(model.units())
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    for step in 0..3 {
        model.train(&fsdp, &[model.example(step * 8 + u64::from(cx.rank()))])?;
        fsdp.step()?;
        fsdp.sync_blocking()?;
    }
    let mut bits = Vec::new();
    for spec in fsdp.weights() {
        let id = fsdp.weight_id(&spec.name)?;
        let (m, v) = fsdp.moments(id)?;
        let values = fsdp.master(id)?.into_iter().chain(m).chain(v);
        bits.extend(values.map(f32::to_bits));
    }
    Ok(bits)
}

#[test]
fn the_same_state_whatever_the_number_of_threads() {
    let run = |threads| {
        let device = move |_| Cpu::builder().threads(threads).build();
        ranks_on(2, device, |cx| train(cx).unwrap())
    };
    let expected = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == expected, "{threads} threads give other weights");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn no_thread_is_left_behind() {
    let names = || -> Vec<String> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
        tasks.flatten().filter_map(|task| name(task).ok()).collect()
    };
    let ours = || {
        let streams = ["compute", "gather", "reduce", "amax"];
        names().iter().filter(|name| streams.iter().any(|stream| name.contains(stream))).count()
    };
    // In a process of its own: the other test's streams have the same names.
    if std::env::var_os("GATHER8_ALONE").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "no_thread_is_left_behind"])
            .env("GATHER8_ALONE", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    ranks_on(
        3,
        |_| Cpu::new(),
        |cx| {
            train(cx).unwrap();
            let stream = cx.backend.stream("compute").unwrap();
            let span = Span::whole(&cx.backend.alloc(64, Memory::Device).unwrap());
            cx.backend.fill(&stream, &span, 1).unwrap();
            cx.backend.synchronize(&stream).unwrap();
            assert!(ours() > 0, "this test no longer finds the streams: {:?}", names());
        },
    );
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while ours() > 0 && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(ours(), 0, "threads are left: {:?}", names());
}
