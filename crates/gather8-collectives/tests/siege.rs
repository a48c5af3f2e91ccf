//! A rendezvous under siege: strangers do everything that they can to rank 0's address while the ranks
//! of a job meet there. Alone in its process, so that its memory can be measured.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use common::op;
use gather8_collectives::launch::Meeting;
use gather8_collectives::{JoinOptions, Launch, TcpWorld, Token};
use gather8_kernels::cpu::Cpu;

const WORLD: u32 = 4;
const TOKEN: &str = "a token of this test";
/// Connections of each kind and of each besieger in one wave: 1,120 in all.
const EACH: usize = 40;
const BESIEGERS: usize = 4;
/// What a stranger hears at most: a challenge.
const CHALLENGE: usize = 8 + 2 + 32;
/// Silent connections that each besieger keeps open; together more than rank 0 listens to.
const SILENT: usize = 100;

/// Counts what lives on the heap.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A line of this process's status in KiB: `VmHWM` is the most memory that it ever held.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
}

/// What strangers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Garbage,
    HalfAMessage,
    HugeLengths,
    WrongToken,
    SecondRankZero,
    RankOutOfRange,
    Silence,
}

const KINDS: [Kind; 7] = [
    Kind::Garbage,
    Kind::HalfAMessage,
    Kind::HugeLengths,
    Kind::WrongToken,
    Kind::SecondRankZero,
    Kind::RankOutOfRange,
    Kind::Silence,
];

/// A whole and true greeting but for who sends it: as this version's ranks send it.
fn greeting(rank: u32, random: u8) -> Vec<u8> {
    let mut bytes = b"GATHER8\n".to_vec();
    bytes.extend(2_u16.to_le_bytes());
    bytes.push(1);
    bytes.extend(rank.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(WORLD.to_le_bytes());
    bytes.extend(blake3::hash(b"test").as_bytes());
    bytes.extend([random; 32]);
    bytes.extend(4000_u16.to_le_bytes());
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    bytes.extend(version.iter().copied().chain(std::iter::repeat(0)).take(16));
    bytes.extend(77_u32.to_le_bytes());
    bytes.extend([b'x'; 32]);
    bytes.extend([random; 8]);
    bytes
}

/// The proof of someone who has this token.
fn proof(token: &[u8], said: &[u8], challenge: &[u8; CHALLENGE]) -> [u8; 32] {
    let key = blake3::derive_key("gather8 2026-11 rendezvous token", token);
    let mut hasher = blake3::Hasher::new_keyed(&key);
    hasher.update(b"gather8 caller");
    hasher.update(&(said.len() as u64).to_le_bytes());
    hasher.update(said);
    hasher.update(&challenge[10..]);
    *hasher.finalize().as_bytes()
}

/// Goes as far as one can with a token; what comes back after the proof.
fn talk(stream: &mut TcpStream, token: &[u8], rank: u32, random: u8) -> std::io::Result<Vec<u8>> {
    let said = greeting(rank, random);
    stream.write_all(&said)?;
    let mut challenge = [0; CHALLENGE];
    stream.read_exact(&mut challenge)?;
    stream.write_all(&proof(token, &said, &challenge))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}

/// One hostile connection; false if rank 0 no longer listens. It may hang up at any time; what it
/// says is what must not be too much.
fn attack(kind: Kind, address: SocketAddr, random: u8, silent: &mut VecDeque<TcpStream>) -> bool {
    let mut stream = match TcpStream::connect_timeout(&address, Duration::from_secs(10)) {
        Ok(stream) => stream,
        // Reset: the listener has gone while this one waited to be accepted.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset
            ) =>
        {
            return false;
        }
        Err(error) => panic!("{error}"),
    };
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let token: &[u8] = b"the wrong token, of course";
    let random_len = usize::from(random) * 4;
    let mut heard = Vec::new();
    match kind {
        Kind::Garbage => {
            let garbage: [&[u8]; 3] =
                [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", &[0xff; 65536], &[0; 1000]];
            let _ = stream.write_all(garbage[usize::from(random) % 3]);
            let _ = stream.read_to_end(&mut heard);
            assert_eq!(heard, [], "garbage was answered");
        }
        Kind::HalfAMessage => {
            let said = greeting(1, random);
            let _ = stream.write_all(&said[..random_len.min(said.len() - 1)]);
        }
        Kind::HugeLengths => {
            // Numbers as large as they can be, and then bytes without end.
            let mut said = greeting(u32::MAX, random);
            said[11..23].fill(0xff);
            let said = said.repeat(100);
            let _ = (0..64).try_for_each(|_| stream.write_all(&said));
            let _ = stream.read_to_end(&mut heard);
            assert!(heard.len() <= CHALLENGE, "{} bytes came back", heard.len());
        }
        Kind::WrongToken | Kind::SecondRankZero | Kind::RankOutOfRange => {
            let rank = match kind {
                Kind::WrongToken => 1,
                Kind::SecondRankZero => 0,
                _ => 99,
            };
            let answer = talk(&mut stream, token, rank, random).unwrap_or_default();
            assert_eq!(answer, [], "{kind:?} was answered");
        }
        Kind::Silence => {
            silent.push_back(stream);
            if silent.len() > SILENT {
                silent.pop_front();
            }
        }
    }
    true
}

#[test]
fn strangers_do_not_get_in_and_do_not_keep_anybody_out() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let join = |rank| {
        let mut launch = Launch::explicit(rank, WORLD, "test").unwrap();
        launch.meeting = Some(Meeting { host: "127.0.0.1".to_owned(), port });
        let mut options = JoinOptions::default();
        options.deadline = Duration::from_secs(60);
        options.token = Some(Token::new(TOKEN).unwrap());
        let tcp = TcpWorld::join(&launch, &options).unwrap();
        let communicator = tcp.communicator(Cpu::new());
        communicator.exchange(op(0, "exchange"), &[rank as u8]).unwrap()
    };
    let besiegers: [Mutex<VecDeque<TcpStream>>; BESIEGERS] =
        std::array::from_fn(|_| Mutex::default());
    let wave = || {
        thread::scope(|scope| {
            for silent in &besiegers {
                scope.spawn(|| {
                    let mut silent = silent.lock().unwrap();
                    for (random, kind) in (0..EACH).flat_map(|i| KINDS.map(|kind| (i, kind))) {
                        let listens = attack(kind, address, random as u8, &mut silent);
                        assert!(listens, "rank 0 no longer listens");
                    }
                });
            }
        });
    };
    thread::scope(|scope| {
        let zero = scope.spawn(|| join(0));
        while TcpStream::connect(address).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
        // The first wave fills what there is to fill: rank 0's crowd, the system's queues.
        wave();
        let (heap, resident) = (LIVE.load(Ordering::Relaxed), status("VmHWM:"));
        PEAK.store(heap, Ordering::Relaxed);
        wave();
        let heap = PEAK.load(Ordering::Relaxed).saturating_sub(heap) / 1024;
        let resident = status("VmHWM:") - resident;
        let made = BESIEGERS * EACH * KINDS.len();
        println!("{made} connections: {heap} KiB more on the heap, {resident} KiB more resident");
        // What the besiegers themselves hold is among it.
        assert!(heap < 128, "{made} connections: {heap} KiB more on the heap");
        assert!(resident < 1024, "{made} connections: {resident} KiB more resident");

        // The besiegers would get in with the right token: it is what keeps them out. And even with
        // it nobody is a second rank 0, or a rank that there is not.
        for (rank, why) in [(0, "says that it is rank 0"), (99, "outside a world of 4")] {
            let mut stream = TcpStream::connect(address).unwrap();
            let answer = talk(&mut stream, TOKEN.as_bytes(), rank, 0).unwrap();
            let reason = String::from_utf8_lossy(&answer[33..]);
            assert!(answer[0] == 1 && reason.contains(why), "{reason}");
        }
        // They go on while the ranks come.
        let besiegers = besiegers.iter().map(|silent| {
            scope.spawn(|| {
                let mut silent = silent.lock().unwrap();
                let kinds = (0..).zip(KINDS.iter().cycle());
                kinds.take_while(|(i, kind)| attack(**kind, address, *i as u8, &mut silent)).count()
            })
        });
        let besiegers = besiegers.collect::<Vec<_>>();
        let others = (1..WORLD).map(|rank| scope.spawn(move || join(rank))).collect::<Vec<_>>();
        for rank in others.into_iter().chain([zero]) {
            assert_eq!(rank.join().unwrap(), [[0], [1], [2], [3]]);
        }
        let last = besiegers.into_iter().map(|one| one.join().unwrap()).sum::<usize>();
        println!("{last} connections while the ranks came");
        assert!(last > 0);
    });
}
