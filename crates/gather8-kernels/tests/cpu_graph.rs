//! Captured graphs on the CPU: what a launch does, and the border of a capture.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use gather8_kernels::cpu::{Access, Cpu, Stream};
use gather8_kernels::{Backend, Error, Memory, Result, Span};

fn memory(cpu: &Cpu) -> Span<Cpu> {
    Span::whole(&cpu.alloc(8, Memory::Device).unwrap())
}

fn read(cpu: &Cpu, on: &Stream, span: &Span<Cpu>) -> [u8; 8] {
    let mut bytes = [0; 8];
    cpu.download(on, span, &mut bytes).unwrap();
    bytes
}

fn refused<T>(result: Result<T>, words: &str) {
    let error = result.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains(words), "expected {words:?}, got {error:?}");
}

#[test]
fn a_launch_repeats_everything_and_the_capture_runs_nothing() {
    let cpu = Cpu::new();
    let (main, side) = (cpu.stream("main").unwrap(), cpu.stream("side").unwrap());
    let (a, b, c) = (memory(&cpu), memory(&cpu), memory(&cpu));
    let host = std::cell::Cell::new([3; 8]);
    let issue = || {
        cpu.upload(&main, &host.get(), &a)?;
        let uploaded = cpu.record(&main)?;
        cpu.wait(&side, &uploaded, "side-after-upload")?;
        cpu.copy(&side, &a, &b)?;
        let copied = cpu.record(&side)?;
        cpu.wait(&main, &copied, "main-after-copy")?;
        cpu.copy(&main, &b, &c)?;
        cpu.fill(&main, &a, 9)
    };
    let (graph, ()) = cpu.capture(&main, issue).unwrap();
    host.set([4; 8]);
    assert_eq!((read(&cpu, &main, &a), read(&cpu, &main, &c)), ([0; 8], [0; 8]));
    for _ in 0..3 {
        cpu.fill(&main, &c, 1).unwrap();
        cpu.launch(&main, &graph).unwrap();
        assert_eq!((read(&cpu, &main, &a), read(&cpu, &main, &c)), ([9; 8], [3; 8]));
    }
    assert_eq!(cpu.wait_count("side-after-upload"), 3);
}

/// A launch is ordered by the stream that it is launched on and by nothing else: that an original
/// stream held work of before says nothing.
#[test]
fn a_launch_is_not_ordered_after_the_streams_that_were_captured() {
    let cpu = Cpu::new();
    let (main, side) = (cpu.stream("main").unwrap(), cpu.stream("side").unwrap());
    let (a, b) = (memory(&cpu), memory(&cpu));
    let issue = || {
        let begun = cpu.record(&main)?;
        cpu.wait(&side, &begun, "fork")?;
        cpu.copy(&side, &a, &b)?;
        let copied = cpu.record(&side)?;
        cpu.wait(&main, &copied, "join")
    };
    let (graph, ()) = cpu.capture(&main, issue).unwrap();
    cpu.fill(&side, &b, 1).unwrap();
    assert!(matches!(cpu.launch(&main, &graph), Err(Error::Unordered { .. })));
}

#[test]
fn events_do_not_cross_the_border_and_streams_are_joined() {
    let cpu = Cpu::new();
    let (main, side) = (cpu.stream("main").unwrap(), cpu.stream("side").unwrap());
    let (a, b) = (memory(&cpu), memory(&cpu));
    let before = cpu.record(&side).unwrap();
    refused(
        cpu.capture(&main, || cpu.wait(&main, &before, "crossing")),
        "it was recorded before the capture",
    );
    let (_, inside) = cpu.capture(&main, || cpu.record(&main)).unwrap();
    refused(cpu.wait(&side, &inside, "crossing"), "a capture that has ended");
    refused(cpu.wait_host(&inside), "a capture that has ended");
    let leave = || {
        let begun = cpu.record(&main)?;
        cpu.wait(&side, &begun, "fork")?;
        cpu.copy(&side, &a, &b)
    };
    refused(cpu.capture(&main, leave), "what stream `side` was given is not joined");
    // A stream that takes no part runs as ever.
    let (graph, ()) = cpu.capture(&main, || cpu.fill(&side, &b, 7)).unwrap();
    assert_eq!(read(&cpu, &side, &b), [7; 8]);
    cpu.launch(&main, &graph).unwrap();
}

#[test]
fn what_a_graph_could_not_repeat_is_refused() {
    let cpu = Cpu::new();
    let main = cpu.stream("main").unwrap();
    let a = memory(&cpu);
    refused(cpu.capture(&main, || cpu.synchronize(&main)), "outside of the capture");
    let download = || cpu.download(&main, &a, &mut [0; 8]);
    refused(cpu.capture(&main, download), "outside of the capture");
    let twice = || cpu.capture(&main, || Ok(())).map(drop);
    refused(cpu.capture(&main, twice), "another capture on this device has not ended");
    let submit = || cpu.submit(&main, "work", &[Access::Read(a.clone())], |_| Ok(()));
    refused(cpu.capture(&main, submit), "could not repeat it");
    // None of these left a capture behind.
    assert_eq!(read(&cpu, &main, &a), [0; 8]);
}
