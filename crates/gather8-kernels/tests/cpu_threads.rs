//! The threads of streams end.
#![cfg(all(target_os = "linux", not(miri)))]
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gather8_kernels::backend::Backend;
use gather8_kernels::cpu::Cpu;

/// Waits until this process has so many threads of this name: a thread names itself when it starts,
/// and the system lists it for a moment after it has been joined.
fn expect_threads(name: &str, count: usize) {
    let start = Instant::now();
    loop {
        let found = std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|comm| comm.trim_end() == name)
            .count();
        if found == count {
            return;
        }
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(10), "{found} threads `{name}` instead of {count}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn no_thread_is_left_behind() {
    let cpu = Cpu::new();
    let streams: Vec<_> = (0..4).map(|_| cpu.stream("left-behind").unwrap()).collect();
    let ran = Arc::new(AtomicU32::new(0));
    for (stream, next) in streams.iter().zip(streams.iter().cycle().skip(1)) {
        let ran = Arc::clone(&ran);
        cpu.submit(stream, "slow", &[], move |_| {
            std::thread::sleep(Duration::from_millis(5));
            ran.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
        .unwrap();
        cpu.wait(next, &cpu.record(stream).unwrap(), "next").unwrap();
    }
    expect_threads("left-behind", 4);
    drop(cpu);
    let clones = streams.clone();
    drop(clones);
    // Clones are the same stream.
    expect_threads("left-behind", 4);
    drop(streams);
    assert_eq!(ran.load(Ordering::SeqCst), 4, "what was issued is done first");
    expect_threads("left-behind", 0);
}

#[test]
fn a_stream_dropped_by_an_operation_ends() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("drops-itself").unwrap(), cpu.stream("drops-other").unwrap());
    let (sender, gate) = std::sync::mpsc::channel::<()>();
    // The other stream waits for the operation that drops its last handle: a join would deadlock.
    let (own, other) = (a.clone(), b.clone());
    cpu.submit(&a, "drops", &[], move |_| {
        let _ = gate.recv();
        drop((own, other));
        Ok(())
    })
    .unwrap();
    cpu.wait(&b, &cpu.record(&a).unwrap(), "b after a").unwrap();
    drop((a, b));
    sender.send(()).unwrap();
    expect_threads("drops-itself", 0);
    expect_threads("drops-other", 0);
}
