//! Operations that fail: the first error stays, nobody hangs.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod cpu_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cpu_support::{Broken, Source, device, tensor};
use gather8_kernels::backend::{Backend, Memory, Span};
use gather8_kernels::cpu::{Access, Cpu};
use gather8_kernels::job::Amax;
use gather8_kernels::{DType, Error, Job};

fn fail(text: &'static str) -> Result<(), Source> {
    Err(Arc::new(Broken(text)))
}

#[test]
fn every_later_call_returns_the_first_failure() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let span = device(&cpu, 4);
    let host = Span::whole(&cpu.alloc(4, Memory::Host).unwrap());
    let job = Job::Amax(Amax { src: tensor(&span, DType::F32), slot: device(&cpu, 4) });
    let plan = cpu.plan(std::slice::from_ref(&job)).unwrap();
    let early = cpu.record(&a).unwrap();
    cpu.submit(&a, "all-gather of `block.3`", &[], |_| fail("rank 2 left")).unwrap();
    let error = cpu.synchronize(&a).unwrap_err();
    match &error {
        Error::Stream { operation, source } => {
            assert_eq!(operation, "all-gather of `block.3`");
            assert!(source.downcast_ref::<Broken>().is_some(), "the source itself is kept");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(error.to_string(), "rank 2 left");
    for (what, result) in [
        ("check", cpu.check()),
        ("alloc", cpu.alloc(4, Memory::Device).map(drop)),
        ("stream", cpu.stream("c").map(drop)),
        ("plan", cpu.plan(&[job]).map(drop)),
        ("run", cpu.run(&b, &plan)),
        ("upload", cpu.upload(&b, &[1; 4], &span)),
        ("download", cpu.download(&b, &span, &mut [0; 4])),
        ("copy", cpu.copy(&b, &span, &host)),
        ("fill", cpu.fill(&b, &span, 1)),
        ("record", cpu.record(&b).map(drop)),
        ("wait", cpu.wait(&b, &early, "w")),
        ("wait_host", cpu.wait_host(&early)),
        ("synchronize", cpu.synchronize(&b)),
        ("submit", cpu.submit(&b, "another", &[], |_| fail("another"))),
    ] {
        assert_eq!(result.map_err(|e| e.to_string()), Err("rank 2 left".to_owned()), "{what}");
    }
    assert_eq!(cpu.peek(&host).unwrap(), [0; 4], "host memory may hold the reason");
}

#[test]
fn what_was_queued_behind_is_skipped_and_nobody_hangs() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let (sender, gate) = std::sync::mpsc::channel::<()>();
    let ran = Arc::new(AtomicBool::new(false));
    cpu.submit(&a, "the bad one", &[], move |_| {
        let _ = gate.recv();
        fail("no")
    })
    .unwrap();
    let event = cpu.record(&a).unwrap();
    assert!(!event.is_done());
    cpu.wait(&b, &event, "b after a").unwrap();
    for stream in [&a, &b] {
        let ran = Arc::clone(&ran);
        cpu.submit(stream, "later", &[], move |_| {
            ran.store(true, Ordering::SeqCst);
            fail("this would be the wrong error")
        })
        .unwrap();
    }
    let (on_a, on_b) = (cpu.record(&a).unwrap(), cpu.record(&b).unwrap());
    cpu.check().unwrap();
    sender.send(()).unwrap();
    assert_eq!(cpu.wait_host(&on_b).unwrap_err().to_string(), "no");
    assert_eq!(cpu.wait_host(&on_a).unwrap_err().to_string(), "no");
    drop((a, b));
    assert!(on_a.is_done() && on_b.is_done(), "events pass all the same");
    assert!(!ran.load(Ordering::SeqCst));
}

#[test]
fn a_download_behind_a_failure_leaves_the_bytes_alone() {
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let span = device(&cpu, 4);
    let (sender, gate) = std::sync::mpsc::channel::<()>();
    cpu.submit(&a, "the bad one", &[], move |_| {
        let _ = gate.recv();
        fail("no")
    })
    .unwrap();
    let mut bytes = [9; 4];
    std::thread::scope(|scope| {
        let download = scope.spawn(|| cpu.download(&a, &span, &mut bytes));
        sender.send(()).unwrap();
        assert_eq!(download.join().unwrap().unwrap_err().to_string(), "no");
    });
    assert_eq!(bytes, [9; 4]);
}

#[test]
fn a_panic_is_an_error_that_names_the_operation() {
    /// A payload that panics when it is dropped.
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("the payload");
        }
    }
    type Panics = Box<dyn Fn() + Send + Sync>;
    let cases: [(Panics, &str); 3] = [
        (Box::new(|| panic!("index 7")), "the sum panicked: index 7"),
        (Box::new(|| panic!("index {}", 1 + 7)), "the sum panicked: index 8"),
        (Box::new(|| std::panic::panic_any(Bomb)), "the sum panicked: without a message"),
    ];
    for (panics, expected) in cases {
        let cpu = Cpu::new();
        let a = cpu.stream("a").unwrap();
        cpu.submit(&a, "the sum", &[], move |_| {
            panics();
            Ok(())
        })
        .unwrap();
        assert_eq!(cpu.synchronize(&a).unwrap_err().to_string(), expected);
        assert_eq!(cpu.check().unwrap_err().to_string(), expected);
    }
}

#[test]
fn an_operation_that_panics_when_dropped_is_caught() {
    struct Bomb(bool);
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(!self.0, "on drop");
        }
    }
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let bomb = Bomb(true);
    cpu.submit(&a, "first", &[], move |_| {
        let _bomb = bomb;
        Ok(())
    })
    .unwrap();
    assert_eq!(cpu.synchronize(&a).unwrap_err().to_string(), "first panicked: on drop");
}

#[test]
fn views_refuse_what_was_not_declared() {
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let accesses = [Access::Read(device(&cpu, 4)), Access::ReadWrite(device(&cpu, 8))];
    cpu.submit(&a, "views", &accesses, |views| {
        assert_eq!(views.len(), 2);
        assert_eq!(views.read(0).unwrap(), [0; 4]);
        assert_eq!(views.write(1).unwrap(), [0; 8]);
        for error in [views.read(1).unwrap_err(), views.read(2).unwrap_err()] {
            assert!(error.to_string().contains("not declared as read"), "{error}");
        }
        let error = views.write(0).unwrap_err();
        assert!(error.to_string().contains("span 0 of the 2"), "{error}");
        views.write(2).map(drop).map_err(|e| -> Source { Arc::new(e) })
    })
    .unwrap();
    let text = cpu.synchronize(&a).unwrap_err().to_string();
    assert_eq!(
        text,
        "views: span 2 of the 2 that the operation declared is not declared as written"
    );
}

#[test]
fn an_operation_cannot_wait_for_streams() {
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let (inside, stream) = (cpu.clone(), a.clone());
    let span = device(&cpu, 4);
    cpu.submit(&a, "waits for itself", &[], move |_| {
        let event = inside.record(&stream).map_err(|e| -> Source { Arc::new(e) })?;
        for result in [
            inside.synchronize(&stream),
            inside.wait_host(&event),
            inside.download(&stream, &span, &mut [0; 4]),
        ] {
            let text = result.unwrap_err().to_string();
            assert!(text.contains("cannot wait for streams"), "{text}");
        }
        Ok(())
    })
    .unwrap();
    cpu.synchronize(&a).unwrap();
}
