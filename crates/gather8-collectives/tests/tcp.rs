//! Ranks over TCP: the rendezvous, its enemies, collectives and lost peers. Each rank is a thread
//! here with connections of its own; processes are killed elsewhere.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Rank, op, within};
use gather8_collectives::launch::Meeting;
use gather8_collectives::{
    Control, Error, JoinOptions, Launch, LocalWorld, Reduce, TcpWorld, Token,
};
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
fn control_reports_vetoes_and_announces() {
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
        // Nobody announces before all have looked; rank 2 may be through, and announce, before the
        // last word of another has reached everybody.
        if let Err(error) = control.veto(op(2, "save"), None) {
            assert!(r.rank != 2 && error.to_string().contains("the loss is NaN"), "{error}");
        }
        if r.rank == 2 {
            control.announce("the loss is NaN");
        }
        let error = r.comm.barrier(op(2, "barrier")).unwrap_err();
        assert!(control.check().is_err());
        error.to_string()
    });
    let texts = results.into_iter().map(Option::unwrap).collect::<Vec<_>>();
    for text in &texts[..2] {
        assert!(text.starts_with("rank 2 aborted (the loss is NaN) before "), "{text}");
    }
    assert_eq!(texts[2], "aborted: the loss is NaN");
}

#[test]
fn missing_ranks_are_listed_by_all_who_came() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path(), Duration::from_millis(700));
    let start = Instant::now();
    let texts = thread::scope(|scope| {
        let ranks = [0, 2, 3].map(|rank| {
            let options = &options;
            scope.spawn(move || {
                let launch = Launch::explicit(rank, 6, "test").unwrap();
                TcpWorld::join(&launch, options).err().unwrap().to_string()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    for text in texts {
        assert_eq!(text, "rendezvous: ranks 1, 4, 5 did not come within 0.7 s");
    }
    assert!(start.elapsed() < Duration::from_secs(3));
    assert_eq!(std::fs::read_dir(directory.path().join("meet")).unwrap().count(), 0);

    // Without rank 0 there is nobody to ask.
    let launch = Launch::explicit(1, 2, "test").unwrap();
    let text = TcpWorld::join(&launch, &options).err().unwrap().to_string();
    assert!(
        text.starts_with("rendezvous: rank 1 did not reach rank 0 within 0.7 s")
            && text.contains("is not there"),
        "{text}"
    );
}

#[test]
fn another_world_size_is_named_on_both_sides() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path(), Duration::from_millis(900));
    let texts = thread::scope(|scope| {
        let ranks = [(0, 2), (1, 3)].map(|(rank, world)| {
            let options = &options;
            scope.spawn(move || {
                let launch = Launch::explicit(rank, world, "test").unwrap();
                TcpWorld::join(&launch, options).err().unwrap().to_string()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    let reason = "rank 1 was told of 3 ranks, rank 0 of 2";
    assert_eq!(texts[0], format!("rendezvous: rank 1 did not come within 0.9 s ({reason})"));
    assert_eq!(texts[1], format!("rendezvous: {reason}"));
}

/// This process's resident memory in bytes.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// What strangers do to an address until told to stop; how many connections they made.
fn besiege(address: SocketAddr, done: &AtomicBool) -> usize {
    let garbage: &[&[u8]] = &[
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GATHER8\n",
        b"GATHER8\n\x01\x00\x01",
        &[0xff; 4096],
    ];
    // A whole greeting of a second rank 0, of a rank out of range, of a huge one; with no proof, or
    // a wrong one.
    let greeting = |rank: u32| {
        let mut bytes = b"GATHER8\n".to_vec();
        bytes.extend(1_u16.to_le_bytes());
        bytes.push(1);
        bytes.extend(rank.to_le_bytes());
        bytes.resize(109, 0);
        bytes.extend([0x5a; 32]);
        bytes
    };
    let greetings = [greeting(0), greeting(1), greeting(99), greeting(u32::MAX)];
    let mut silent = Vec::new();
    let mut made = 0;
    while !done.load(Ordering::Relaxed) {
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200))
        else {
            continue;
        };
        made += 1;
        let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
        match made % 12 {
            n @ 0..5 => drop(stream.write_all(garbage[n])),
            n @ 5..9 => {
                let _ = stream.write_all(&greetings[n - 5]);
                let mut answer = [0; 256];
                // What comes back is a challenge at most.
                assert!(stream.read(&mut answer).unwrap_or(0) <= 42);
            }
            _ => {
                if silent.len() < 300 {
                    silent.push(stream);
                }
            }
        }
    }
    made
}

#[test]
fn strangers_do_not_get_in_and_do_not_keep_anybody_out() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut options = JoinOptions::default();
    options.deadline = Duration::from_secs(40);
    options.token = Some(Token::new(&b"a token of this test"[..]).unwrap());
    let launch = |rank| {
        let mut launch = Launch::explicit(rank, 4, "test").unwrap();
        launch.meeting = Some(Meeting { host: "127.0.0.1".to_owned(), port });
        launch
    };
    let done = AtomicBool::new(false);
    let before = resident();
    thread::scope(|scope| {
        let strangers = (0..4).map(|_| scope.spawn(|| besiege(address, &done))).collect::<Vec<_>>();
        let ranks = (0..4)
            .map(|rank| {
                let (options, launch) = (&options, launch(rank));
                scope.spawn(move || {
                    // Rank 0 is under siege for a while before the others come.
                    if rank > 0 {
                        thread::sleep(Duration::from_millis(1500 + 300 * u64::from(rank)));
                    }
                    let tcp = TcpWorld::join(&launch, options).unwrap();
                    let r = rank_of(&tcp);
                    r.comm.exchange(op(0, "exchange"), &[rank as u8]).unwrap()
                })
            })
            .collect::<Vec<_>>();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), [[0], [1], [2], [3]]);
        }
        done.store(true, Ordering::Relaxed);
        let made = strangers.into_iter().map(|s| s.join().unwrap()).sum::<usize>();
        assert!(made >= 1000, "only {made} hostile connections");
        // The other tests of this file run at the same time.
        let grown = resident().saturating_sub(before);
        assert!(grown < 64 << 20, "{made} connections, {grown} bytes more memory");
    });
}

#[test]
fn a_wrong_token_never_gets_in() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let join = |rank, token: &str| {
        let mut launch = Launch::explicit(rank, 2, "test").unwrap();
        launch.meeting = Some(Meeting { host: "127.0.0.1".to_owned(), port });
        let mut options = JoinOptions::default();
        options.deadline = Duration::from_millis(800);
        options.token = Some(Token::new(token).unwrap());
        TcpWorld::join(&launch, &options).err().unwrap().to_string()
    };
    let (zero, one) = thread::scope(|scope| {
        let zero = scope.spawn(|| join(0, "the right token!"));
        let one = scope.spawn(|| join(1, "the wrong token!"));
        (zero.join().unwrap(), one.join().unwrap())
    });
    assert_eq!(zero, "rendezvous: rank 1 did not come within 0.8 s");
    assert!(one.contains("another token?"), "{one}");
}

#[test]
fn several_hosts_need_a_token_and_it_is_not_printed() {
    let mut launch = Launch::explicit(1, 2, "test").unwrap();
    launch.meeting = Some(Meeting { host: "10.0.0.1".to_owned(), port: 4000 });
    let text = TcpWorld::join(&launch, &JoinOptions::default()).err().unwrap().to_string();
    assert!(text.contains("GATHER8_TOKEN_FILE"), "{text}");
    let token = Token::new(&b"quite secret, this one"[..]).unwrap();
    assert_eq!(format!("{token:?}"), "Token(..)");
    assert!(Token::new(&b"short"[..]).is_err() && Token::new(vec![1; 1025]).is_err());
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
