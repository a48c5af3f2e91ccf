//! Inside a host program's own runtime; alone in its process, so that threads can be counted.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::sync::Arc;

use common::op;
use gather8_collectives::{JoinOptions, Launch, TcpWorld};
use gather8_kernels::cpu::Cpu;

/// This process's threads that serve connections.
fn net_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let task = task.ok()?.path();
            let name = std::fs::read_to_string(task.join("comm")).ok()?;
            (name.starts_with("gather8-net") && !exits(&task)).then_some(())
        })
        .count()
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
fn a_world_is_joined_inside_a_runtime_and_leaves_no_thread() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let directory: Arc<Path> = Arc::from(directory.path().join("meet"));
        let ranks = (0..2).map(|rank| {
            let mut options = JoinOptions::default();
            options.directory = Some(directory.to_path_buf());
            tokio::spawn(async move {
                let launch = Launch::explicit(rank, 2, "test").unwrap();
                let tcp = TcpWorld::join(&launch, &options).unwrap();
                let comm = tcp.communicator(Cpu::new());
                comm.barrier(op(0, "barrier")).unwrap();
                assert!(net_threads() > 0);
            })
        });
        for rank in ranks.collect::<Vec<_>>() {
            rank.await.unwrap();
        }
    });
    assert_eq!(net_threads(), 0);
}
