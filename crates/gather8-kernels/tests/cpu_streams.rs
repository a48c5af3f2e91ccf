//! Streams and memory: memory is what it should be, queues hold what they were given,
//! accumulations add up.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail"
)]

mod cpu_support;

use std::sync::Arc;

use cpu_support::{device, holding, tensor, values};
use gather8_kernels::backend::{Backend, Memory, Span};
use gather8_kernels::cpu::{Access, Cpu, View};
use gather8_kernels::job::{Amax, Cast};
use gather8_kernels::layout::{BytesRecord, SlotRecord};
use gather8_kernels::{DType, Error, Format, Job};

#[test]
fn buffers_are_zeroed_aligned_and_may_be_empty() {
    const LARGE: u64 = if cfg!(miri) { 1003 } else { 100_003 };
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    for memory in [Memory::Device, Memory::Host] {
        for bytes in [0, 1, 255, 256, 257, LARGE] {
            let span = Span::whole(&cpu.alloc(bytes, memory).unwrap());
            assert_eq!(span.len(), bytes);
            let accesses = [Access::Read(span.clone())];
            cpu.submit(&a, "look", &accesses, move |views| {
                let bytes = views.read(0).unwrap();
                assert_eq!(bytes.as_ptr().addr() % 256, 0);
                assert!(bytes.iter().all(|&byte| byte == 0));
                Ok(())
            })
            .unwrap();
            cpu.fill(&a, &span, 7).unwrap();
            assert_eq!(values::<u8>(&cpu, &a, &span), vec![7; bytes as usize]);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri itself stops when memory runs out")]
fn memory_that_cannot_be_had_is_an_error() {
    let cpu = Cpu::builder().name("cpu of rank 3").build();
    for bytes in [u64::MAX, u64::MAX / 2, u64::MAX / 2 - 300, 1 << 60] {
        match cpu.alloc(bytes, Memory::Device) {
            Err(Error::OutOfMemory { device, bytes: asked, .. }) => {
                assert_eq!((device.as_str(), asked), ("cpu of rank 3", bytes));
            }
            other => panic!("{other:?}"),
        }
    }
    cpu.alloc(16, Memory::Device).unwrap();
}

#[test]
fn empty_spans_and_empty_passes_do_nothing() {
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let span = holding(&cpu, &a, &[1_u8; 8]);
    let empty = span.sub(4..4).unwrap();
    cpu.fill(&a, &span, 2).unwrap();
    // No byte is shared, so there is no order to keep.
    cpu.fill(&b, &empty, 3).unwrap();
    cpu.upload(&b, &[], &empty).unwrap();
    cpu.copy(&b, &empty, &empty).unwrap();
    cpu.download(&b, &empty, &mut []).unwrap();
    cpu.run(&b, &cpu.plan(&[]).unwrap()).unwrap();
    assert_eq!(values::<u8>(&cpu, &a, &span), [2; 8]);
}

#[test]
fn lengths_must_agree() {
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let span = device(&cpu, 8);
    for result in [
        cpu.upload(&a, &[0; 7], &span),
        cpu.download(&a, &span, &mut [0; 9]),
        cpu.copy(&a, &span, &device(&cpu, 4)),
        cpu.peek(&span).map(drop),
    ] {
        assert!(matches!(result, Err(Error::Job { .. })), "{result:?}");
    }
}

#[test]
fn accumulations_of_many_streams_add_up() {
    const STREAMS: usize = 4;
    const ROUNDS: usize = if cfg!(miri) { 4 } else { 200 };
    let cpu = Cpu::new();
    let host = cpu.stream("host").unwrap();
    let slot = device(&cpu, 8);
    let (word, counter) = (slot.sub(0..4).unwrap(), slot.sub(4..8).unwrap());
    let streams: Vec<_> = (0..STREAMS).map(|i| cpu.stream(&format!("s{i}")).unwrap()).collect();
    for (i, stream) in streams.iter().enumerate() {
        for round in 0..ROUNDS {
            let value = (round * STREAMS + i) as f32;
            let src = tensor(&holding(&cpu, &host, &[value, -1e30]), DType::F32);
            let dst = device(&cpu, 2);
            let scales = SlotRecord { cast: 1.0, cast_inv: 1.0, version: 1, ..Default::default() };
            let job = Cast {
                src,
                dst,
                format: Format::E4m3,
                scales: holding(&cpu, &host, &[scales]),
                record: holding(&cpu, &host, &[BytesRecord::default()]),
                saturated: Some(counter.clone()),
                amax: None,
            };
            cpu.run(stream, &cpu.plan(&[Job::Cast(job)]).unwrap()).unwrap();
            let src = tensor(&holding(&cpu, &host, &[value, -value]), DType::F32);
            let job = Job::Amax(Amax { src, slot: word.clone() });
            cpu.run(stream, &cpu.plan(&[job]).unwrap()).unwrap();
        }
    }
    for stream in &streams {
        cpu.wait(&host, &cpu.record(stream).unwrap(), "all").unwrap();
    }
    let largest = (ROUNDS * STREAMS - 1) as f32;
    // -1e30 saturates in every cast; so does every value above 464.
    let above = (0..ROUNDS * STREAMS).filter(|&value| value > 464).count();
    assert_eq!(
        values::<u32>(&cpu, &host, &slot),
        [0x8000_0000 | largest.to_bits(), (ROUNDS * STREAMS + above) as u32]
    );
}

#[test]
fn host_memory_is_read_while_it_is_written() {
    const ROUNDS: u32 = if cfg!(miri) { 30 } else { 2000 };
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let buffer = cpu.alloc(64, Memory::Host).unwrap();
    let span = Span::whole(&buffer);
    for round in 1..=ROUNDS {
        cpu.submit(&a, "write", &[Access::ReadWrite(span.clone())], move |views| {
            let words: &mut [u32] = bytemuck::cast_slice_mut(views.write(0).unwrap());
            assert!(words.iter().all(|&word| word == round - 1), "what was written is read back");
            words.fill(round);
            Ok(())
        })
        .unwrap();
    }
    let mut last = 0;
    while last < ROUNDS {
        let words: [u32; 16] = bytemuck::pod_read_unaligned(&cpu.peek(&span).unwrap());
        let (first, rest) = words.split_first().unwrap();
        // The first word goes in last: who sees it sees the others at least as new.
        assert!(rest.iter().all(|word| word >= first), "{words:?}");
        assert!(*first >= last);
        last = *first;
    }
}

#[test]
fn host_memory_is_written_byte_by_byte_too() {
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let span = Span::whole(&cpu.alloc(13, Memory::Host).unwrap());
    let mut expected = vec![0_u8; 13];
    for (start, end) in [(0, 13), (1, 3), (3, 9), (11, 13), (5, 5), (12, 13), (2, 11)] {
        let bytes: Vec<u8> = (start..end).map(|i| (17 * i + end) as u8).collect();
        let part = span.sub(start..end).unwrap();
        cpu.upload(&a, &bytes, &part).unwrap();
        cpu.synchronize(&a).unwrap();
        expected[start as usize..end as usize].copy_from_slice(&bytes);
        assert_eq!(cpu.peek(&span).unwrap(), expected);
        assert_eq!(cpu.peek(&part).unwrap(), bytes);
        assert_eq!(values::<u8>(&cpu, &a, &span), expected);
    }
}

#[test]
fn views_can_be_used_all_at_once() {
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let (x, y) = (holding(&cpu, &a, &[1_u8, 2, 3, 4]), device(&cpu, 4));
    let host = Span::whole(&cpu.alloc(4, Memory::Host).unwrap());
    let accesses = [Access::Read(x.clone()), Access::Write(y.clone()), Access::Write(host.clone())];
    cpu.submit(&a, "copy", &accesses, |views| {
        // Reads do not borrow the views.
        let source = views.read(0).unwrap();
        views.write(1).unwrap().copy_from_slice(source);
        let [View::Read(source), View::Write(_), View::Write(host)] = views.all() else {
            panic!("kinds")
        };
        host.bytes_mut().copy_from_slice(source);
        assert_eq!(host.bytes(), [1, 2, 3, 4]);
        Ok(())
    })
    .unwrap();
    assert_eq!(values::<u8>(&cpu, &a, &y), [1, 2, 3, 4]);
    assert_eq!(cpu.peek(&host).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn an_upload_may_reuse_its_bytes_at_once() {
    const BYTES: usize = if cfg!(miri) { 64 } else { 1 << 16 };
    let cpu = Cpu::new();
    let a = cpu.stream("a").unwrap();
    let span = device(&cpu, BYTES);
    let (sender, gate) = std::sync::mpsc::channel::<()>();
    cpu.submit(&a, "hold", &[], move |_| {
        let _ = gate.recv();
        Ok(())
    })
    .unwrap();
    let mut bytes = vec![5_u8; BYTES];
    cpu.upload(&a, &bytes, &span).unwrap();
    bytes.fill(6);
    sender.send(()).unwrap();
    assert_eq!(values::<u8>(&cpu, &a, &span), vec![5; BYTES]);
}

#[test]
fn issuing_does_not_wait_and_the_queue_holds_everything() {
    const ROUNDS: u32 = if cfg!(miri) { 10 } else { 500 };
    let cpu = Cpu::new();
    let (a, b) = (cpu.stream("a").unwrap(), cpu.stream("b").unwrap());
    let (x, y) = (device(&cpu, 4), device(&cpu, 4));
    let (sender, gate) = std::sync::mpsc::channel::<()>();
    cpu.submit(&a, "hold", &[], move |_| {
        let _ = gate.recv();
        Ok(())
    })
    .unwrap();
    for round in 0..ROUNDS {
        cpu.upload(&a, &round.to_ne_bytes(), &x).unwrap();
        cpu.wait(&b, &cpu.record(&a).unwrap(), "b after a").unwrap();
        cpu.copy(&b, &x, &y).unwrap();
        cpu.wait(&a, &cpu.record(&b).unwrap(), "a after b").unwrap();
    }
    assert!(!cpu.record(&b).unwrap().is_done());
    sender.send(()).unwrap();
    assert_eq!(values::<u32>(&cpu, &b, &y), [ROUNDS - 1]);
}

#[test]
fn a_buffer_outlives_its_handles_while_it_is_used() {
    let cpu = Cpu::new();
    let (a, sum) = (cpu.stream("a").unwrap(), device(&cpu, 4));
    let (sender, gate) = std::sync::mpsc::channel::<()>();
    cpu.submit(&a, "hold", &[], move |_| {
        let _ = gate.recv();
        Ok(())
    })
    .unwrap();
    let source = device(&cpu, 4);
    let weak = Arc::downgrade(source.buffer());
    cpu.upload(&a, &7_u32.to_ne_bytes(), &source).unwrap();
    cpu.copy(&a, &source, &sum).unwrap();
    drop(source);
    assert!(weak.upgrade().is_some());
    sender.send(()).unwrap();
    assert_eq!(values::<u32>(&cpu, &a, &sum), [7]);
    assert!(weak.upgrade().is_none(), "freed with its last user");
}

#[test]
fn many_host_threads_share_a_backend() {
    const ROUNDS: u32 = if cfg!(miri) { 5 } else { 200 };
    let cpu = Cpu::new();
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let cpu = cpu.clone();
            scope.spawn(move || {
                let [a, b] = ["a", "b"].map(|name| cpu.stream(name).unwrap());
                let (x, y) = (device(&cpu, 4), device(&cpu, 4));
                for round in 0..ROUNDS {
                    let value = thread * 1000 + round;
                    cpu.upload(&a, &value.to_ne_bytes(), &x).unwrap();
                    cpu.wait(&b, &cpu.record(&a).unwrap(), "b after a").unwrap();
                    cpu.copy(&b, &x, &y).unwrap();
                    assert_eq!(values::<u32>(&cpu, &b, &y), [value]);
                }
            });
        }
    });
    assert_eq!(cpu.waits_seen(), ["b after a"]);
    assert_eq!(cpu.wait_count("b after a"), 4 * u64::from(ROUNDS));
}
