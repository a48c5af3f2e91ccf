//! The order checker: what no event orders is refused, on the first run, whatever the schedule.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod cpu_support;

use cpu_support::{device, holding, names, run, tensor, values};
use gather8_kernels::backend::{Backend, Memory, Span};
use gather8_kernels::cpu::{Access, Cpu, Stream};
use gather8_kernels::job::{Amax, Divide};
use gather8_kernels::{DType, Error, Job};

type Touch = fn(&Cpu, &Stream, &Span<Cpu>) -> gather8_kernels::Result<()>;

fn read(cpu: &Cpu, on: &Stream, span: &Span<Cpu>) -> gather8_kernels::Result<()> {
    cpu.submit(on, "the read", &[Access::Read(span.clone())], |_| Ok(()))
}

fn write(cpu: &Cpu, on: &Stream, span: &Span<Cpu>) -> gather8_kernels::Result<()> {
    cpu.submit(on, "the write", &[Access::Write(span.clone())], |_| Ok(()))
}

fn accumulate(cpu: &Cpu, on: &Stream, span: &Span<Cpu>) -> gather8_kernels::Result<()> {
    let src = tensor(&device(cpu, 4), DType::F32);
    let job = Job::Amax(Amax { src, slot: span.sub(0..4).unwrap() });
    cpu.run(on, &cpu.plan(&[job]).unwrap())
}

const TOUCHES: [(&str, Touch); 3] =
    [("the read", read), ("the write", write), ("amax of 1 tensor", accumulate)];

/// Every pair of accesses, the name of each, and whether their order matters.
fn pairs() -> impl Iterator<Item = ((&'static str, Touch), (&'static str, Touch), bool)> {
    TOUCHES.into_iter().flat_map(|first| {
        TOUCHES.into_iter().map(move |second| {
            let commutes = first.0 == second.0 && first.0 != "the write";
            (first, second, !commutes)
        })
    })
}

#[test]
fn every_unordered_pair_on_two_streams_is_refused_and_named() {
    for ((first, f), (second, s), conflict) in pairs() {
        let cpu = Cpu::new();
        let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
        let span = device(&cpu, 64);
        f(&cpu, &a, &span).unwrap();
        let result = s(&cpu, &b, &span);
        if conflict {
            assert_eq!(names(result), [first, "a", second, "b"]);
        } else {
            result.unwrap();
        }
        // Refused, not issued, and no failure of the backend.
        cpu.check().unwrap();
        cpu.synchronize(&a).unwrap();
        cpu.synchronize(&b).unwrap();
        s(&cpu, &b, &span).unwrap();
    }
}

#[test]
fn an_event_orders() {
    for ((_, f), (_, s), _) in pairs() {
        let cpu = Cpu::new();
        let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
        let span = device(&cpu, 64);
        f(&cpu, &a, &span).unwrap();
        let event = cpu.record(&a).unwrap();
        cpu.wait(&b, &event, "b after a").unwrap();
        s(&cpu, &b, &span).unwrap();
    }
}

#[test]
fn an_event_from_before_does_not_order() {
    for ((first, f), (second, s), conflict) in pairs() {
        let cpu = Cpu::new();
        let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
        let span = device(&cpu, 64);
        let event = cpu.record(&a).unwrap();
        f(&cpu, &a, &span).unwrap();
        cpu.wait(&b, &event, "too early").unwrap();
        // Neither does a wait of the wrong direction, nor time.
        let event = cpu.record(&b).unwrap();
        cpu.wait(&a, &event, "a after b").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        if conflict {
            assert_eq!(names(s(&cpu, &b, &span)), [first, "a", second, "b"]);
        }
    }
}

#[test]
fn a_third_stream_orders() {
    for ((_, f), (_, s), _) in pairs() {
        let cpu = Cpu::new();
        let [a, b, c] = ["a", "b", "c"].map(|name| cpu.stream(name).unwrap());
        let span = device(&cpu, 64);
        f(&cpu, &a, &span).unwrap();
        cpu.wait(&b, &cpu.record(&a).unwrap(), "b after a").unwrap();
        // Nothing runs on b between: its event must stand for what it waited for.
        cpu.wait(&c, &cpu.record(&b).unwrap(), "c after b").unwrap();
        s(&cpu, &c, &span).unwrap();
    }
}

#[test]
fn the_host_orders() {
    let hosts: [fn(&Cpu, &Stream); 4] = [
        |cpu, a| cpu.synchronize(a).unwrap(),
        |cpu, a| cpu.wait_host(&cpu.record(a).unwrap()).unwrap(),
        |cpu, a| cpu.download(a, &device(cpu, 4), &mut [0; 4]).unwrap(),
        // Of a third stream that waits for the first.
        |cpu, a| {
            let c = cpu.stream("c").unwrap();
            cpu.wait(&c, &cpu.record(a).unwrap(), "c after a").unwrap();
            cpu.download(&c, &device(cpu, 4), &mut [0; 4]).unwrap();
        },
    ];
    for host in hosts {
        for ((_, f), (_, s), _) in pairs() {
            let cpu = Cpu::new();
            let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
            let span = device(&cpu, 64);
            f(&cpu, &a, &span).unwrap();
            host(&cpu, &a);
            s(&cpu, &b, &span).unwrap();
        }
    }
}

#[test]
fn a_host_wait_for_the_wrong_stream_does_not_order() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let span = device(&cpu, 64);
    write(&cpu, &a, &span).unwrap();
    cpu.synchronize(&b).unwrap();
    assert_eq!(names(read(&cpu, &b, &span)), ["the write", "a", "the read", "b"]);
}

#[test]
fn an_unbroken_chain_of_reads_still_holds_back_a_write() {
    let cpu = Cpu::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| cpu.stream(name).unwrap());
    let span = device(&cpu, 64);
    read(&cpu, &a, &span).unwrap();
    read(&cpu, &b, &span).unwrap();
    cpu.wait(&c, &cpu.record(&b).unwrap(), "c after b").unwrap();
    assert_eq!(names(write(&cpu, &c, &span)), ["the read", "a", "the write", "c"]);
    cpu.wait(&c, &cpu.record(&a).unwrap(), "c after a").unwrap();
    write(&cpu, &c, &span).unwrap();
}

#[test]
fn neighbouring_bytes_are_no_conflict_and_the_shared_ones_are_named() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let span = device(&cpu, 64);
    write(&cpu, &a, &span.sub(16..32).unwrap()).unwrap();
    write(&cpu, &b, &span.sub(0..16).unwrap()).unwrap();
    write(&cpu, &b, &span.sub(32..64).unwrap()).unwrap();
    match write(&cpu, &b, &span.sub(24..64).unwrap()) {
        Err(Error::Unordered { start: 24, end: 32, .. }) => {}
        other => panic!("{other:?}"),
    }
    // Host memory is written in whole words, so it is checked in whole words.
    let host = Span::whole(&cpu.alloc(8, Memory::Host).unwrap());
    write(&cpu, &a, &host.sub(0..3).unwrap()).unwrap();
    write(&cpu, &b, &host.sub(4..8).unwrap()).unwrap();
    names(write(&cpu, &b, &host.sub(3..4).unwrap()));
}

#[test]
fn copies_fills_and_transfers_are_checked_too() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let (from, to) = (device(&cpu, 8), device(&cpu, 8));
    cpu.copy(&a, &from, &to).unwrap();
    assert_eq!(names(cpu.fill(&b, &from, 1)), ["copy of 8 bytes", "a", "fill of 8 bytes", "b"]);
    assert_eq!(
        names(cpu.upload(&b, &[1; 8], &to)),
        ["copy of 8 bytes", "a", "upload of 8 bytes", "b"]
    );
    assert_eq!(
        names(cpu.download(&b, &to, &mut [1; 8])),
        ["copy of 8 bytes", "a", "download of 8 bytes", "b"]
    );
    cpu.download(&b, &from, &mut [1; 8]).unwrap();
}

/// Four streams pass a buffer on; every wait is needed.
fn pipeline(cpu: &Cpu) -> gather8_kernels::Result<Vec<f32>> {
    let [compute, gather, reduce, host] =
        ["compute", "gather", "reduce", "host"].map(|name| cpu.stream(name).unwrap());
    let (x, y) = (device(cpu, 16), device(cpu, 16));
    for step in 0..3_u32 {
        let values = [step as f32; 4];
        cpu.upload(&host, bytemuck::cast_slice(&values), &x)?;
        cpu.wait(&gather, &cpu.record(&host)?, "gather after upload")?;
        cpu.copy(&gather, &x, &y)?;
        let gathered = cpu.record(&gather)?;
        cpu.wait(&compute, &gathered, "compute after gather")?;
        let (src, dst) = (tensor(&y, DType::F32), tensor(&y, DType::F32));
        cpu.run(&compute, &cpu.plan(&[Job::Divide(Divide { src, dst, divisor: 2.0 })])?)?;
        cpu.wait(&reduce, &cpu.record(&compute)?, "reduce after compute")?;
        cpu.copy(&reduce, &y, &x)?;
        cpu.wait(&host, &cpu.record(&reduce)?, "host after reduce")?;
        let mut bytes = [0; 16];
        cpu.download(&host, &x, &mut bytes)?;
        if step == 2 {
            return Ok(bytemuck::pod_read_unaligned::<[f32; 4]>(&bytes).to_vec());
        }
    }
    Ok(vec![])
}

#[test]
fn dropping_any_one_wait_is_found_and_both_operations_are_named() {
    let cpu = Cpu::new();
    assert_eq!(pipeline(&cpu).unwrap(), [1.0; 4]);
    let waits = cpu.waits_seen();
    assert_eq!(
        waits,
        [
            "gather after upload",
            "compute after gather",
            "reduce after compute",
            "host after reduce"
        ]
    );
    let expected = [
        ["upload of 16 bytes", "host", "copy of 16 bytes", "gather"],
        ["copy of 16 bytes", "gather", "divide of 1 tensor", "compute"],
        ["divide of 1 tensor", "compute", "copy of 16 bytes", "reduce"],
        ["copy of 16 bytes", "reduce", "download of 16 bytes", "host"],
    ];
    for (id, expected) in waits.into_iter().zip(expected) {
        assert_eq!(cpu.wait_count(id), 3);
        for nth in [None, Some(0), Some(1), Some(2)] {
            let cpu = Cpu::builder().drop_wait(id, nth).build();
            assert_eq!(names(pipeline(&cpu).map(drop)), expected, "{id} {nth:?}");
        }
        // There is no fourth.
        let cpu = Cpu::builder().drop_wait(id, 3).build();
        assert_eq!(pipeline(&cpu).unwrap(), [1.0; 4]);
    }
    assert_eq!(cpu.wait_count("another"), 0);
}

#[test]
fn one_operation_must_not_touch_bytes_twice() {
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let span = device(&cpu, 64);
    let part = |range| span.sub(range).unwrap();
    let refused: [[Access; 2]; 4] = [
        [Access::Read(part(0..8)), Access::Write(part(7..16))],
        [Access::Write(part(0..8)), Access::Write(part(0..8))],
        [Access::ReadWrite(part(0..64)), Access::Read(part(10..11))],
        [Access::Write(part(9..10)), Access::ReadWrite(part(0..64))],
    ];
    for accesses in refused {
        match cpu.submit(&a, "twice", &accesses, |_| Ok(())) {
            Err(Error::Job { problem, .. }) => assert!(problem.contains("both touch"), "{problem}"),
            other => panic!("{other:?}"),
        }
    }
    let fine = [Access::Read(part(0..8)), Access::Read(part(4..9)), Access::Write(part(9..64))];
    cpu.submit(&a, "fine", &fine, |_| Ok(())).unwrap();
    match cpu.copy(&a, &part(0..8), &part(4..12)) {
        Err(Error::Job { pass: "copy", .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn handles_of_another_backend_are_refused() {
    let (cpu, other) = (Cpu::new(), Cpu::new());
    let (mine, theirs) = (cpu.stream("mine").unwrap(), other.stream("theirs").unwrap());
    let span = device(&other, 4);
    for result in [
        cpu.fill(&mine, &span, 0),
        cpu.fill(&theirs, &device(&cpu, 4), 0),
        cpu.wait(&mine, &other.record(&theirs).unwrap(), "w"),
        cpu.wait_host(&other.record(&theirs).unwrap()),
        cpu.record(&theirs).map(drop),
        cpu.run(&mine, &other.plan(&[]).unwrap()),
    ] {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("another backend"), "{text}");
    }
}

#[test]
fn a_refused_operation_leaves_no_trace() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let span = holding(&cpu, &a, &[7.0_f32; 4]);
    read(&cpu, &a, &span).unwrap();
    names(cpu.fill(&b, &span, 0));
    // Had the fill been noted, this read would not be ordered after it.
    assert_eq!(values::<f32>(&cpu, &a, &span), [7.0; 4]);
    let slot = device(&cpu, 4);
    run(&cpu, &a, &[Job::Amax(Amax { src: tensor(&span, DType::F32), slot: slot.clone() })]);
    assert_eq!(values::<u32>(&cpu, &a, &slot), [0x8000_0000 | 7.0_f32.to_bits()]);
}
