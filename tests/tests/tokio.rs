//! Inside a host program's own runtime.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use gather8::{Config, Fsdp};
use gather8_collectives::{JoinOptions, Launch, TcpWorld};
use gather8_conformance::model::{Mlp, initial};
use gather8_kernels::cpu::Cpu;

/// Threads of this process that belong to streams or connections.
fn ours() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let living = tasks.flatten().filter(|task| !exits(&task.path()));
    let names = living.filter_map(|task| name(task).ok());
    let known = ["gather8", "compute", "gather", "reduce", "amax"];
    names.filter(|name| known.iter().any(|known| name.contains(known))).collect()
}

/// The kernel counts a thread's exit as its end for who joins it before it takes its entry away; from
/// then on the thread runs none of its program.
fn exits(task: &Path) -> bool {
    const PF_EXITING: u64 = 0x4;
    let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
    // After the name, which stands in brackets: state, parent, group, session, terminal, its group.
    let flags = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(6));
    flags.and_then(|flags| flags.parse().ok()).is_none_or(|flags: u64| flags & PF_EXITING != 0)
}

#[test]
fn training_inside_a_runtime_leaves_no_thread() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let job = format!("tokio-{}", std::process::id());
        let ranks = (0..2).map(|rank| {
            let launch = Launch::explicit(rank, 2, &*job).unwrap();
            tokio::spawn(async move {
                let tcp = TcpWorld::join(&launch, &JoinOptions::default()).unwrap();
                let cpu = Cpu::new();
                let model = Mlp::uneven();
                let fsdp = Fsdp::builder(Config::default(), cpu.clone(), tcp.communicator(cpu))
                    .units(model.units())
                    .build(|spec, rows| anyhow::Ok(initial(spec, rows)))
                    .unwrap();
                for step in 0..2 {
                    model.train(&fsdp, &[model.example(step * 2 + u64::from(rank))]).unwrap();
                    fsdp.step().unwrap();
                    fsdp.sync().unwrap();
                }
                assert!(!ours().is_empty());
            })
        });
        for rank in ranks.collect::<Vec<_>>() {
            rank.await.unwrap();
        }
    });
    drop(runtime);
    assert_eq!(ours(), Vec::<String>::new());
}
