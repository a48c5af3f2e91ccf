//! Ranks over TCP: collectives, control and lost peers. Each rank is a thread here with connections
//! of its own; processes are killed elsewhere.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod common;

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::{Rank, op, within};
use gather8_collectives::{Control, Error, JoinOptions, Launch, LocalWorld, Reduce, TcpWorld};
use gather8_kernels::Backend;
use gather8_kernels::cpu::Cpu;

fn options(directory: &Path, deadline: Duration) -> JoinOptions {
    let mut options = JoinOptions::default();
    options.deadline = deadline;
    options.directory = Some(directory.join("meet"));
    options
}

fn join(directory: &Path, rank: u32, world: u32) -> Result<TcpWorld, Error> {
    let launch = Launch::explicit(rank, world, "test").unwrap();
    TcpWorld::join(&launch, &options(directory, Duration::from_secs(20)))
}

fn rank_of(tcp: &TcpWorld) -> Rank {
    let cpu = Cpu::new();
    let stream = cpu.stream("main").unwrap();
    Rank { rank: tcp.rank(), comm: tcp.communicator(cpu.clone()), cpu, stream }
}

/// Runs every rank of a world on a thread with connections of its own.
fn on_ranks<T: Send>(world: u32, body: impl Fn(TcpWorld, Rank) -> T + Sync) -> Vec<Option<T>> {
    let directory = tempfile::tempdir().unwrap();
    thread::scope(|scope| {
        let ranks = (0..world)
            .map(|rank| {
                let (directory, body) = (&directory, &body);
                scope.spawn(move || {
                    let tcp = join(directory.path(), rank, world).unwrap();
                    let rank = rank_of(&tcp);
                    body(tcp, rank)
                })
            })
            .collect::<Vec<_>>();
        ranks.into_iter().map(|rank| rank.join().ok()).collect()
    })
}

/// A little of everything; the bytes that each rank ends with.
fn mixture(r: &Rank) -> Vec<u8> {
    let world = u64::from(r.comm.world());
    let mut all = Vec::new();
    for step in 0..5_u64 {
        let source = r.span_of(&vec![(r.rank as u64 * 7 + step) as u8; 40_000]);
        let parts = [(source, r.zeros(40_000 * world)), (r.zeros(0), r.zeros(0))];
        r.comm.all_gather(op(step, "all-gather"), &parts, &r.stream).unwrap();
        all.extend(r.bytes(&parts[0].1).unwrap());

        let values =
            (0..world * 100).map(|i| (i as f32 + r.rank as f32 * 0.37).sin()).collect::<Vec<_>>();
        let source = r.span_of(bytemuck::cast_slice(&values));
        let parts = [(source, r.zeros(400))];
        r.comm
            .reduce_scatter(op(step, "reduce-scatter"), Reduce::SumF32, &parts, &r.stream)
            .unwrap();
        all.extend(r.bytes(&parts[0].1).unwrap());

        let word = r.span_of(&(r.rank + step as u32).to_le_bytes());
        r.comm.all_reduce(op(step, "all-reduce"), Reduce::MaxU32, &word, &r.stream).unwrap();
        r.comm.broadcast(op(step, "broadcast"), (world - 1) as u32, &word, &r.stream).unwrap();
        all.extend(r.bytes(&word).unwrap());
        r.comm.barrier(op(step, "barrier")).unwrap();
    }
    let child = r.comm.split(Some(r.rank % 2), 9 - r.rank).unwrap().unwrap();
    all.extend(child.exchange(op(0, "exchange"), &[r.rank as u8]).unwrap().concat());
    all
}

#[test]
fn the_same_bytes_as_between_threads() {
    for world in [1, 2, 3, 4, 8] {
        let over_tcp = on_ranks(world, |_tcp, r| mixture(&r));
        let local = LocalWorld::new(world);
        let between_threads = thread::scope(|scope| {
            let ranks = (0..world).map(|rank| {
                let rank = Rank::new(&local, rank);
                scope.spawn(move || mixture(&rank))
            });
            let ranks = ranks.collect::<Vec<_>>();
            ranks.into_iter().map(|rank| rank.join().ok()).collect::<Vec<_>>()
        });
        assert!(over_tcp.iter().all(Option::is_some), "world {world}");
        assert!(over_tcp == between_threads, "world {world}");
    }
}

fn until_it_fails(r: &Rank, deadline: Duration) -> Error {
    let source = r.span_of(&[r.rank as u8; 4]);
    let destination = r.zeros(4 * u64::from(r.comm.world()));
    for step in 0.. {
        let parts = [(source.clone(), destination.clone())];
        let op = within(step, "all-gather", deadline);
        if let Err(error) = r.comm.all_gather(op, &parts, &r.stream) {
            return error;
        }
        if let Err(error) = r.cpu.synchronize(&r.stream) {
            return Error::from_backend(error);
        }
    }
    unreachable!()
}

#[test]
fn a_panic_and_an_early_return_are_named() {
    let results = on_ranks(4, |tcp, r| {
        if r.rank == 2 {
            r.comm.barrier(op(0, "barrier")).unwrap();
            panic!("on purpose");
        }
        r.comm.barrier(op(0, "barrier")).unwrap();
        drop(tcp);
        until_it_fails(&r, Duration::from_secs(60)).to_string()
    });
    for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let text = result.unwrap();
        assert!(text.starts_with("rank 2 panicked before all-gather"), "rank {rank}: {text}");
    }

    let results = on_ranks(3, |_tcp, r| {
        if r.rank == 1 {
            return None;
        }
        Some(until_it_fails(&r, Duration::from_secs(60)).to_string())
    });
    for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let text = result.unwrap().unwrap();
        assert_eq!(text, "rank 1 left before all-gather #0 of `block.0`", "rank {rank}");
    }
}

#[test]
fn a_late_rank_is_named_by_those_who_wait_for_those_who_wait() {
    let results = on_ranks(4, |_tcp, r| {
        let pair = r.comm.split(Some(r.rank / 2), 0).unwrap().unwrap();
        let error = match r.rank {
            // Waits for rank 1, which waits for rank 2.
            0 => pair.barrier(within(0, "barrier", Duration::from_millis(400))),
            2 => {
                thread::sleep(Duration::from_millis(1500));
                r.comm.barrier(op(0, "barrier"))
            }
            _ => r.comm.barrier(within(0, "barrier", Duration::from_secs(30))),
        };
        error.unwrap_err()
    });
    for result in results {
        let error = result.unwrap();
        assert!(matches!(&error, Error::Deadline { ranks, .. } if ranks == &[2]), "{error}");
    }
}

#[test]
fn ranks_whose_time_is_up_together_do_not_blame_each_other() {
    // Rank 0 is late. Rank 1 waits for rank 2 in a pair; rank 2, as all others, for ranks 0 and 1.
    // Every time is up at once, and only rank 0 waits for nobody.
    let results = on_ranks(4, |_tcp, r| {
        let next = r.comm.split(Some(u32::from(r.rank == 1 || r.rank == 2)), 0).unwrap().unwrap();
        let deadline = Duration::from_millis(500);
        let error = match r.rank {
            0 => {
                thread::sleep(Duration::from_millis(1800));
                r.comm.barrier(op(0, "barrier"))
            }
            1 => next.barrier(within(0, "barrier", deadline)),
            _ => r.comm.barrier(within(0, "barrier", deadline)),
        };
        error.unwrap_err()
    });
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap();
        assert!(
            matches!(&error, Error::Deadline { ranks, .. } if ranks == &[0]),
            "rank {rank}: {error}"
        );
    }
}

#[test]
fn nobody_is_blamed_where_each_waits_for_the_others() {
    // Rank 1 goes to the pair's barrier, the others to everybody's.
    let results = on_ranks(3, |_tcp, r| {
        let pair = r.comm.split(Some(u32::from(r.rank < 2)), 0).unwrap().unwrap();
        let comm = if r.rank == 1 { &pair } else { &r.comm };
        comm.barrier(within(0, "barrier", Duration::from_millis(500))).unwrap_err()
    });
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap();
        assert!(matches!(&error, Error::Disordered { .. }), "rank {rank}: {error}");
        assert_eq!(error.blamed_rank(), None);
        assert!(error.to_string().contains("each waits for the others"), "rank {rank}: {error}");
    }
}

#[test]
fn control_reports_vetoes_and_announces() {
    // A rank that is through a round may announce before another has heard the last word of it: so
    // nobody announces before all are through.
    let through = Barrier::new(3);
    let results = on_ranks(3, |tcp, r| {
        let control = tcp.control();
        control.report(&format!("step {}", r.rank));
        control.veto(op(0, "save"), None).unwrap();
        assert_eq!(
            control.reports(),
            (0..3).map(|rank| Some(format!("step {rank}"))).collect::<Vec<_>>()
        );
        let objection = (r.rank > 0).then(|| format!("no disk on {}", r.rank));
        let error = control.veto(op(1, "save"), objection.as_deref()).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 objects: no disk on 1");
        control.check().unwrap();
        control.veto(op(2, "save"), None).unwrap();
        through.wait();
        if r.rank == 2 {
            control.announce("the loss is NaN");
        }
        let error = r.comm.barrier(op(2, "barrier")).unwrap_err();
        assert!(control.check().is_err());
        error.to_string()
    });
    let texts = results.into_iter().map(Option::unwrap).collect::<Vec<_>>();
    for text in &texts[..2] {
        assert_eq!(text, "rank 2 aborted (the loss is NaN) before barrier #2 of `block.0`");
    }
    assert_eq!(texts[2], "aborted: the loss is NaN");
}

#[test]
fn control_works_between_threads_too() {
    let local = LocalWorld::new(2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let control: Arc<dyn Control> = local.control(rank).unwrap();
            scope.spawn(move || {
                let objection = (rank == 0).then_some("not today");
                let error = control.veto(op(0, "start"), objection).unwrap_err();
                assert_eq!(error.blamed_rank(), Some(0));
            });
        }
    });
    assert!(local.control(2).is_err());
}
