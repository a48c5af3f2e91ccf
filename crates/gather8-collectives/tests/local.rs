//! Ranks as threads: every collective's result, and that no failure hangs.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{Rank, on_ranks, op, within};
use gather8_collectives::{Communicator, Counting, Error, LocalWorld, Op, Reduce, Solo, Traffic};
use gather8_kernels::cpu::{Cpu, Schedule};
use gather8_kernels::{Backend, Memory, Span};

/// Small differences in time between ranks, the same in every run.
fn stagger(rank: u32, step: u64) {
    let mut x = (u64::from(rank) << 32 | step).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    thread::sleep(Duration::from_micros(x % 700));
}

fn content(rank: u32, part: u64, len: u64) -> Vec<u8> {
    (0..len).map(|i| (u64::from(rank) * 31 + part * 7 + i) as u8).collect()
}

#[test]
fn a_rank_is_one_threads() {
    for world in [1, 2] {
        let ranks = LocalWorld::new(world);
        let first = ranks.rank(0, Cpu::new()).unwrap();
        let Err(error) = ranks.rank(0, Cpu::new()) else { panic!("rank 0 was given out twice") };
        assert!(error.to_string().contains("rank 0 has been taken"), "{error}");
        let _control = ranks.control(0).unwrap();
        assert!(ranks.control(0).is_err());
        drop(first);
        assert!(ranks.rank(0, Cpu::new()).is_err(), "its peers have seen it leave");
    }
}

#[test]
fn gathers_land_in_rank_order() {
    for world in [1, 2, 3, 5, 8] {
        let results = on_ranks(world, |r| {
            let lengths = [16_u64, 0, 5, 1000];
            for step in 0..20 {
                let parts = lengths
                    .iter()
                    .enumerate()
                    .map(|(part, &len)| {
                        let source = r.span_of(&content(r.rank, part as u64 + step, len));
                        (source, r.zeros(len * u64::from(world)))
                    })
                    .collect::<Vec<_>>();
                stagger(r.rank, step);
                r.comm.all_gather(op(step, "all-gather"), &parts, &r.stream).unwrap();
                for (part, &len) in lengths.iter().enumerate() {
                    let expected = (0..world)
                        .flat_map(|rank| content(rank, part as u64 + step, len))
                        .collect::<Vec<_>>();
                    assert_eq!(r.bytes(&parts[part].1).unwrap(), expected);
                }
            }
        });
        assert!(results.iter().all(Option::is_some), "world {world}");
    }
}

#[test]
fn a_source_inside_its_destination_works() {
    let results = on_ranks(4, |r| {
        let destination = r.zeros(4 * 6);
        let at = u64::from(r.rank) * 6;
        let source = destination.sub(at..at + 6).unwrap();
        r.cpu.upload(&r.stream, &content(r.rank, 0, 6), &source).unwrap();
        let parts = [(source, destination.clone())];
        r.comm.all_gather(op(0, "all-gather"), &parts, &r.stream).unwrap();
        let expected = (0..4).flat_map(|rank| content(rank, 0, 6)).collect::<Vec<_>>();
        assert_eq!(r.bytes(&destination).unwrap(), expected);

        let source = r.span_of(bytemuck::cast_slice(&[1.0_f32, 2.0, 3.0, 4.0]));
        let own = source.sub(u64::from(r.rank) * 4..u64::from(r.rank) * 4 + 4).unwrap();
        let parts = [(source, own.clone())];
        r.comm.reduce_scatter(op(1, "reduce-scatter"), Reduce::SumF32, &parts, &r.stream).unwrap();
        assert_eq!(r.bytes(&own).unwrap(), (4.0 * (r.rank + 1) as f32).to_le_bytes());

        // Elsewhere in it is refused before anything is issued.
        let misplaced = destination.sub((at + 6) % 24..(at + 6) % 24 + 6).unwrap();
        let parts = [(misplaced, destination)];
        let refused = r.comm.all_gather(op(2, "all-gather"), &parts, &r.stream);
        assert!(matches!(refused, Err(Error::Length { part: 0, .. })));
        r.comm.barrier(op(3, "barrier")).unwrap();
    });
    assert!(results.iter().all(Option::is_some));
}

#[test]
fn sums_are_in_rank_order() {
    let results = on_ranks(3, |r| {
        let value = [1e8_f32, 1.0, -1e8][r.rank as usize];
        let span = r.span_of(&value.to_le_bytes());
        r.comm.all_reduce(op(0, "all-reduce"), Reduce::SumF32, &span, &r.stream).unwrap();
        let sum = r.bytes(&span).unwrap();

        let halves = r.span_of(&[0x4380_u16, 0x3f80, 0x3f80][r.rank as usize].to_le_bytes());
        r.comm.all_reduce(op(1, "all-reduce"), Reduce::SumBf16, &halves, &r.stream).unwrap();

        let many = [r.rank as f64; 3 * 50];
        let many = r.span_of(bytemuck::cast_slice(&many));
        let mine = r.zeros(50 * 8);
        let parts = [(many, mine.clone())];
        r.comm.reduce_scatter(op(2, "reduce-scatter"), Reduce::SumF64, &parts, &r.stream).unwrap();
        assert_eq!(r.bytes(&mine).unwrap(), bytemuck::cast_slice::<f64, u8>(&[3.0; 50]));
        (sum, r.bytes(&halves).unwrap())
    });
    for result in results {
        let (sum, halves) = result.unwrap();
        assert_eq!(sum, 0.0_f32.to_le_bytes(), "1e8 + 1 - 1e8 in f32, in this order");
        assert_eq!(halves, 0x4381_u16.to_le_bytes(), "256 + 1 + 1, rounded once");
    }
}

#[test]
fn broadcast_exchange_and_barrier() {
    let results = on_ranks(4, |r| {
        let span = r.span_of(&content(r.rank, 3, 9));
        r.comm.broadcast(op(0, "broadcast"), 2, &span, &r.stream).unwrap();
        assert_eq!(r.bytes(&span).unwrap(), content(2, 3, 9));
        stagger(r.rank, 1);
        let message = vec![r.rank as u8; r.rank as usize];
        let all = r.comm.exchange(op(1, "exchange"), &message).unwrap();
        assert_eq!(all, [vec![], vec![1], vec![2; 2], vec![3; 3]]);
        r.comm.barrier(op(2, "barrier")).unwrap();
        let refused = r.comm.broadcast(op(3, "broadcast"), 4, &span, &r.stream);
        assert!(matches!(refused, Err(Error::Usage { .. })));
    });
    assert!(results.iter().all(Option::is_some));
}

#[test]
fn splits_by_colour_and_key() {
    let results = on_ranks(6, |r| {
        let color = (r.rank != 5).then_some(r.rank % 2);
        let child = r.comm.split(color, 100 - r.rank).unwrap();
        let Some(child) = child else {
            assert_eq!(r.rank, 5);
            return;
        };
        let members: &[u32] = if r.rank % 2 == 0 { &[4, 2, 0] } else { &[3, 1] };
        assert_eq!(members[child.rank() as usize], r.rank);
        assert_eq!(child.world() as usize, members.len());
        let all = child.exchange(op(0, "exchange"), &[r.rank as u8]).unwrap();
        let expected = members.iter().map(|&rank| vec![rank as u8]).collect::<Vec<_>>();
        assert_eq!(all, expected);
        // Split again, all in one.
        let again = child.split(Some(0), r.rank).unwrap().unwrap();
        assert_eq!(again.world(), child.world());
        again.barrier(op(0, "barrier")).unwrap();
    });
    assert!(results.iter().all(Option::is_some));
}

#[test]
fn three_communicators_on_three_streams() {
    const STEPS: u64 = 60;
    let local = LocalWorld::new(4);
    thread::scope(|scope| {
        for rank in 0..4 {
            let local = &local;
            scope.spawn(move || {
                let schedule = Schedule::Random(u64::from(rank));
                let cpu = Cpu::builder().schedule(schedule).build();
                let comm = local.rank(rank, cpu.clone()).unwrap();
                let lanes = (0..3)
                    .map(|lane| {
                        let comm = comm.split(Some(0), rank).unwrap().unwrap();
                        let stream = cpu.stream(&format!("stream {lane}")).unwrap();
                        let alloc = |len| Span::whole(&cpu.alloc(len, Memory::Device).unwrap());
                        (comm, stream, alloc(4), alloc(16))
                    })
                    .collect::<Vec<_>>();
                for step in 0..STEPS {
                    for (lane, (comm, stream, source, destination)) in lanes.iter().enumerate() {
                        let word = u32::from(lane as u8) + 10 * rank + 1000 * step as u32;
                        cpu.upload(stream, &word.to_le_bytes(), source).unwrap();
                        let parts = [(source.clone(), destination.clone())];
                        comm.all_gather(op(step, "all-gather"), &parts, stream).unwrap();
                    }
                }
                for (lane, (_, stream, _, destination)) in lanes.iter().enumerate() {
                    let mut words = [0_u32; 4];
                    cpu.download(stream, destination, bytemuck::cast_slice_mut(&mut words))
                        .unwrap();
                    let last = 1000 * (STEPS as u32 - 1) + lane as u32;
                    assert_eq!(words, [0, 10, 20, 30].map(|word| word + last));
                }
            });
        }
    });
}

#[test]
fn one_communicator_on_two_streams_is_matched_by_issue_order() {
    // The streams are held back in another order on each rank.
    let results = on_ranks(2, |r| {
        let streams = [r.cpu.stream("a").unwrap(), r.cpu.stream("b").unwrap()];
        let ends = streams
            .iter()
            .enumerate()
            .map(|(i, stream)| {
                let late = (i as u32 == r.rank).then(|| Duration::from_millis(80));
                r.cpu
                    .submit(stream, "delay", &[], move |_| {
                        late.into_iter().for_each(thread::sleep);
                        Ok(())
                    })
                    .unwrap();
                let span = Span::whole(&r.cpu.alloc(4, Memory::Device).unwrap());
                let word = (i as u32 + 1) << (8 * r.rank);
                r.cpu.upload(stream, &word.to_le_bytes(), &span).unwrap();
                r.comm
                    .all_reduce(op(i as u64, "all-reduce"), Reduce::MaxU32, &span, stream)
                    .unwrap();
                span
            })
            .collect::<Vec<_>>();
        for (i, (span, stream)) in ends.iter().zip(&streams).enumerate() {
            let mut word = [0; 4];
            r.cpu.download(stream, span, &mut word).unwrap();
            assert_eq!(u32::from_le_bytes(word), (i as u32 + 1) << 8);
        }
    });
    assert!(results.iter().all(Option::is_some));
}

/// Issues gathers until one fails; the error that the rank is left with.
fn until_it_fails(r: &Rank, deadline: Duration) -> Error {
    let source = r.span_of(&[r.rank as u8; 4]);
    let destination = r.zeros(4 * u64::from(r.comm.world()));
    for step in 0.. {
        let parts = [(source.clone(), destination.clone())];
        if let Err(error) =
            r.comm.all_gather(within(step, "all-gather", deadline), &parts, &r.stream)
        {
            return error;
        }
        if let Err(error) = r.cpu.synchronize(&r.stream) {
            return Error::from_backend(error);
        }
    }
    unreachable!()
}

const LONG: Duration = Duration::from_secs(60);

/// All ranks but the culprit end soon, blame it, and stay failed.
fn blamed(world: u32, culprit: u32, body: impl Fn(Rank) -> Option<Error> + Sync) -> Vec<String> {
    let start = Instant::now();
    let results = on_ranks(world, body);
    assert!(start.elapsed() < Duration::from_secs(20), "a rank waited for its deadline");
    let mut texts = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        if rank as u32 == culprit {
            continue;
        }
        let error = result.expect("a survivor does not panic").expect("a survivor fails");
        assert_eq!(error.blamed_rank(), Some(culprit), "rank {rank}: {error}");
        texts.push(error.to_string());
    }
    texts
}

#[test]
fn a_panicking_rank_is_named() {
    let texts = blamed(8, 3, |r| {
        if r.rank == 3 {
            thread::sleep(Duration::from_millis(30));
            panic!("on purpose");
        }
        let error = until_it_fails(&r, LONG);
        assert!(r.comm.check().is_err());
        Some(error)
    });
    assert!(texts.iter().all(|text| text.starts_with("rank 3 panicked before all-gather #")));
}

#[test]
fn a_rank_that_returns_early_is_named() {
    let texts = blamed(4, 0, |r| {
        if r.rank == 0 {
            // It takes part in one operation, which succeeds on all ranks.
            let parts = [(r.span_of(&[0; 4]), r.zeros(16))];
            r.comm.all_gather(op(0, "all-gather"), &parts, &r.stream).unwrap();
            return None;
        }
        Some(until_it_fails(&r, LONG))
    });
    for text in texts {
        assert_eq!(text, "rank 0 left before all-gather #1 of `block.0`");
    }
}

#[test]
fn an_aborting_rank_is_named() {
    let texts = blamed(4, 2, |r| {
        if r.rank == 2 {
            let handle = r.comm.abort_handle();
            let aborter = thread::spawn(move || {
                thread::sleep(Duration::from_millis(20));
                handle.abort("out of coffee");
            });
            aborter.join().unwrap();
            let error = r.comm.barrier(op(9, "barrier")).unwrap_err();
            assert_eq!(error.to_string(), "aborted: out of coffee");
        }
        Some(until_it_fails(&r, LONG))
    });
    assert!(texts.iter().all(|text| text.contains("rank 2 aborted (out of coffee)")), "{texts:?}");
}

#[test]
fn a_sleeping_rank_is_named_at_the_deadline() {
    let deadline = Duration::from_millis(300);
    let start = Instant::now();
    let results = on_ranks(4, |r| {
        if r.rank == 1 {
            thread::sleep(Duration::from_millis(900));
        }
        let error = until_it_fails(&r, deadline);
        (error, start.elapsed())
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (error, elapsed) = result.unwrap();
        assert!(
            matches!(&error, Error::Deadline { ranks, .. } if ranks == &[1]),
            "rank {rank}: {error}"
        );
        assert!(elapsed >= deadline);
        assert!(rank == 1 || elapsed < Duration::from_millis(880), "{elapsed:?}");
        assert_eq!(
            error.to_string(),
            "rank 1 did not arrive at all-gather #0 of `block.0` within 0.3 s"
        );
    }
}

#[test]
fn the_deadline_counts_from_the_moment_the_stream_gets_there() {
    // Every rank's stream is held back for longer than the deadline: nobody is late.
    let results = on_ranks(3, |r| {
        r.cpu
            .submit(&r.stream, "delay", &[], |_| {
                thread::sleep(Duration::from_millis(400));
                Ok(())
            })
            .unwrap();
        let parts = [(r.span_of(&[1]), r.zeros(3))];
        let brief = within(0, "all-gather", Duration::from_millis(250));
        r.comm.all_gather(brief, &parts, &r.stream).unwrap();
        r.bytes(&parts[0].1).unwrap();
    });
    assert!(results.iter().all(Option::is_some));
}

#[test]
fn who_waits_for_the_culprit_is_not_blamed() {
    // Rank 2 sleeps; rank 1 waits for it in one communicator, rank 0 for rank 1 in another, with
    // the shorter deadline. Only rank 2 is named.
    let results = on_ranks(3, |r| {
        let pair = r.comm.split((r.rank < 2).then_some(0), 0).unwrap();
        let other = r.comm.split((r.rank > 0).then_some(0), 0).unwrap();
        let error = match r.rank {
            0 => pair.unwrap().barrier(within(0, "barrier", Duration::from_millis(300))),
            1 => other.unwrap().barrier(within(0, "barrier", Duration::from_millis(600))),
            _ => {
                thread::sleep(Duration::from_millis(1500));
                other.unwrap().barrier(op(0, "barrier"))
            }
        };
        error.unwrap_err()
    });
    for result in results {
        let error = result.unwrap();
        assert!(matches!(&error, Error::Deadline { ranks, .. } if ranks == &[2]), "{error}");
    }
}

#[test]
fn a_rank_whose_stream_has_failed_is_named() {
    let texts = blamed(3, 1, |r| {
        if r.rank == 1 {
            r.cpu
                .submit(&r.stream, "broken", &[], |_| {
                    thread::sleep(Duration::from_millis(50));
                    Err(std::sync::Arc::new(std::io::Error::other("broken")))
                })
                .unwrap();
            let parts = [(r.zeros(4), r.zeros(12))];
            r.comm.all_gather(op(0, "all-gather"), &parts, &r.stream).unwrap();
            assert!(r.cpu.synchronize(&r.stream).is_err());
            thread::sleep(Duration::from_millis(100));
            return None;
        }
        Some(until_it_fails(&r, LONG))
    });
    assert!(texts.iter().all(|text| text.contains("an earlier operation failed")), "{texts:?}");
}

#[test]
fn different_operations_say_what_each_rank_passed() {
    let results = on_ranks(3, |r| {
        let len = if r.rank == 1 { 8 } else { 4 };
        let parts = [(r.zeros(2), r.zeros(6)), (r.zeros(len), r.zeros(3 * len))];
        r.comm.all_gather(op(5, "all-gather"), &parts, &r.stream).unwrap();
        Error::from_backend(r.cpu.synchronize(&r.stream).unwrap_err())
    });
    for result in results {
        assert_eq!(
            result.unwrap().to_string(),
            "the ranks have issued different operations: at all-gather #5, \
             rank 0 passed all-gather of `block.0` (2 parts, part 1 of 4 bytes), \
             rank 1 passed all-gather of `block.0` (2 parts, part 1 of 8 bytes), \
             rank 2 passed all-gather of `block.0` (2 parts, part 1 of 4 bytes)"
        );
    }

    let results = on_ranks(2, |r| {
        let span = r.zeros(4);
        let reduce = if r.rank == 0 { Reduce::MaxU32 } else { Reduce::SumF32 };
        r.comm.all_reduce(op(7, "all-reduce"), reduce, &span, &r.stream).unwrap();
        Error::from_backend(r.cpu.synchronize(&r.stream).unwrap_err()).to_string()
    });
    for result in results {
        let text = result.unwrap();
        assert!(
            text.contains("rank 0 passed all-reduce MaxU32")
                && text.contains("rank 1 passed all-reduce SumF32"),
            "{text}"
        );
    }
}

#[test]
fn lengths_are_checked_before_anything_is_issued() {
    let results = on_ranks(2, |r| {
        let bad = [(r.zeros(4), r.zeros(8)), (r.zeros(4), r.zeros(9))];
        let error = r.comm.all_gather(op(0, "all-gather"), &bad, &r.stream).unwrap_err();
        assert_eq!(
            error.to_string(),
            "all-gather of `block.0`, part 1: the destination holds 9 bytes, not 2 times the source's 4"
        );
        let bad = [(r.zeros(6), r.zeros(3))];
        let error =
            r.comm.reduce_scatter(op(0, "reduce-scatter"), Reduce::SumBf16, &bad, &r.stream);
        assert!(matches!(error, Err(Error::Length { part: 0, .. })));
        let error = r.comm.all_reduce(op(0, "all-reduce"), Reduce::SumF64, &r.zeros(12), &r.stream);
        assert!(matches!(error, Err(Error::Length { .. })));
        // Nothing was issued: the ranks still go together.
        r.comm.barrier(op(1, "barrier")).unwrap();
        r.comm.check().unwrap();
    });
    assert!(results.iter().all(Option::is_some));
}

#[test]
fn leaving_in_good_order_fails_nobody() {
    // Each rank issues its last operation and drops everything at once.
    for _ in 0..20 {
        let results = on_ranks(4, |r| {
            let child = r.comm.split(Some(1), 0).unwrap().unwrap();
            let parts = [(r.span_of(&[r.rank as u8]), r.zeros(4))];
            child.all_gather(op(0, "all-gather"), &parts, &r.stream).unwrap();
            drop(child);
            drop(r.comm);
            r.cpu.synchronize(&r.stream).map_err(Error::from_backend).unwrap();
        });
        assert!(results.iter().all(Option::is_some));
    }
}

#[test]
fn a_world_of_one_copies_and_nothing_more() {
    let cpu = Cpu::new();
    let comm = Solo::new(cpu.clone());
    let stream = cpu.stream("main").unwrap();
    let alloc = |len| Span::<Cpu>::whole(&cpu.alloc(len, Memory::Device).unwrap());
    let (source, destination) = (alloc(4), alloc(4));
    cpu.upload(&stream, &[1, 2, 3, 4], &source).unwrap();
    let parts = [(source.clone(), destination.clone()), (alloc(0), alloc(0))];
    comm.all_gather(op(0, "all-gather"), &parts, &stream).unwrap();
    comm.all_gather(op(1, "all-gather"), &[(source.clone(), source.clone())], &stream).unwrap();
    let mut bytes = [0; 4];
    cpu.download(&stream, &destination, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    let nan = f32::from_bits(0xffff_ffff);
    cpu.upload(&stream, &nan.to_le_bytes(), &source).unwrap();
    comm.all_reduce(op(2, "all-reduce"), Reduce::MaxU32, &source, &stream).unwrap();
    assert_eq!(comm.exchange(op(3, "exchange"), b"x").unwrap(), [b"x"]);
    assert!(comm.split(None, 0).unwrap().is_none());
    let child = comm.split(Some(3), 0).unwrap().unwrap();
    comm.abort_handle().abort("enough");
    assert_eq!(child.check().unwrap_err().to_string(), "aborted: enough");
}

#[test]
fn traffic_is_counted_from_what_is_passed() {
    let results = on_ranks(2, |r| {
        let counting = Counting::new(r.comm.clone());
        let parts = [(r.zeros(3), r.zeros(6)), (r.zeros(5), r.zeros(10))];
        counting.all_gather(op(0, "all-gather"), &parts, &r.stream).unwrap();
        let child = counting.split(Some(0), 0).unwrap().unwrap();
        let parts = [(r.zeros(16), r.zeros(8))];
        let sum = Op { name: "reduce-scatter", ..op(1, "") };
        child.reduce_scatter(sum, Reduce::SumF32, &parts, &r.stream).unwrap();
        counting.all_reduce(op(2, "all-reduce"), Reduce::MaxU32, &r.zeros(4), &r.stream).unwrap();
        let bad = [(r.zeros(3), r.zeros(7))];
        counting.all_gather(op(3, "all-gather"), &bad, &r.stream).unwrap_err();
        r.cpu.synchronize(&r.stream).unwrap();
        counting.traffic()
    });
    for result in results {
        let expected = Traffic { gathered_bytes: 16, reduced_bytes: 20, operations: 3 };
        assert_eq!(result.unwrap(), expected);
    }
}
