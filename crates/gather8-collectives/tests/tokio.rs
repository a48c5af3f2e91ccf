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
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("gather8-net"))
        .count()
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
