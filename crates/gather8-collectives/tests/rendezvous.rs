//! How ranks find each other over TCP, and what each is told when they do not fit together. Each rank
//! is a thread here.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use gather8_collectives::launch::Meeting;
use gather8_collectives::{JoinOptions, Launch, TcpWorld, Token};

/// Nobody waits longer than this for ranks that do not fit together, whatever the deadline.
const QUICK: Duration = Duration::from_secs(5);

fn in_folder(directory: &Path, deadline: Duration) -> JoinOptions {
    let mut options = JoinOptions::default();
    options.deadline = deadline;
    options.directory = Some(directory.join("meet"));
    options
}

/// The two ways to meet: through a file, or at an address with a token.
enum Venue {
    File(tempfile::TempDir),
    Address(u16),
}

impl Venue {
    fn both() -> [Self; 2] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        [Self::File(tempfile::tempdir().unwrap()), Self::Address(port)]
    }

    /// What a rank's attempt ends with; it would wait for a minute.
    fn join(&self, rank: u32, world: u32, job: &str) -> Result<TcpWorld, String> {
        let mut launch = Launch::explicit(rank, world, job).unwrap();
        let mut options = JoinOptions::default();
        match self {
            Self::File(directory) => {
                options = in_folder(directory.path(), Duration::from_secs(60));
            }
            Self::Address(port) => {
                options.token = Some(Token::new("a token of this test").unwrap());
                launch.meeting = Some(Meeting { host: "127.0.0.1".to_owned(), port: *port });
            }
        }
        TcpWorld::join(&launch, &options).map_err(|error| error.to_string())
    }
}

/// Joins with all of these ranks at once: (rank, world, job, milliseconds to wait first).
fn join_all(venue: &Venue, ranks: &[(u32, u32, &str, u64)]) -> Vec<Result<TcpWorld, String>> {
    let start = Instant::now();
    let results = thread::scope(|scope| {
        let ranks = ranks.iter().map(|&(rank, world, job, pause)| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(pause));
                venue.join(rank, world, job)
            })
        });
        let ranks = ranks.collect::<Vec<_>>();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(start.elapsed() < QUICK, "it took {:?}", start.elapsed());
    results
}

fn texts(results: Vec<Result<TcpWorld, String>>) -> Vec<String> {
    results.into_iter().map(|result| result.err().expect("the ranks have met")).collect()
}

#[test]
fn ranks_of_different_worlds_all_say_so_at_once() {
    for venue in Venue::both() {
        let texts = texts(join_all(&venue, &[(0, 2, "job", 0), (1, 3, "job", 100)]));
        let expected = "rendezvous: rank 1 was told of 3 ranks, rank 0 of 2: start all with the same number, and each job with a GATHER8_JOB of its own";
        assert_eq!(texts, [expected; 2]);
    }
}

#[test]
fn whoever_waits_already_or_comes_a_little_later_gets_the_same_sentence() {
    for venue in Venue::both() {
        let ranks = [(0, 4, "job", 0), (1, 4, "job", 50), (2, 3, "job", 400), (3, 4, "job", 1200)];
        let texts = texts(join_all(&venue, &ranks));
        let expected = "rendezvous: rank 2 was told of 3 ranks, rank 0 of 4: start all with the same number, and each job with a GATHER8_JOB of its own";
        assert_eq!(texts, [expected; 4]);
    }
}

#[test]
fn a_rank_that_two_processes_claim_ends_the_rendezvous() {
    let who = format!("process {} on ", std::process::id());
    for venue in Venue::both() {
        let ranks = [(0, 3, "job", 0), (1, 3, "job", 50), (1, 3, "job", 400)];
        let texts = texts(join_all(&venue, &ranks));
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        let text = &texts[0];
        assert!(text.starts_with("rendezvous: rank 1 was claimed by two processes ("), "{text}");
        assert_eq!(text.matches(&who).count(), 2, "{text}");
        assert!(text.contains("GATHER8_JOB"), "{text}");
    }
}

#[test]
fn a_rank_of_another_job_is_sent_away_and_ends_what_lacks_a_rank() {
    let expected = "rendezvous: rank 1 was started for another job than rank 0: give all ranks of a job one GATHER8_JOB, and each job an address of its own";
    let [_, venue] = Venue::both();
    let texts = texts(join_all(&venue, &[(0, 2, "job", 0), (1, 2, "other", 100)]));
    assert_eq!(texts, [expected; 2]);

    // If this job's own rank is there, or comes, the other's does not matter.
    let [_, venue] = Venue::both();
    let ranks = [(0, 3, "job", 0), (1, 3, "job", 50), (1, 3, "other", 200), (2, 3, "other", 250)];
    let ranks = [&ranks[..], &[(2, 3, "job", 900)]].concat();
    let results = join_all(&venue, &ranks);
    let met = results.iter().map(Result::is_ok).collect::<Vec<_>>();
    assert_eq!(met, [true, true, false, false, true]);
    assert_eq!(results[2].as_ref().err().unwrap(), expected);
}

#[test]
fn a_second_rank_0_of_one_name_ends_at_once_and_the_first_job_starts() {
    let [venue, _] = Venue::both();
    let results =
        join_all(&venue, &[(0, 2, "my job", 0), (0, 2, "my job", 300), (1, 2, "my job", 900)]);
    assert!(results[0].is_ok() && results[2].is_ok());
    let text = results[1].as_ref().err().unwrap();
    let process = std::process::id();
    assert!(
        text.starts_with(&format!("rendezvous: process {process} is rank 0 of a job `my job` that is starting on this host (")),
        "{text}"
    );
    assert!(
        text.ends_with("wait until it has started, or set GATHER8_JOB to tell the two apart"),
        "{text}"
    );

    // At an address the second finds the port taken.
    let [_, venue] = Venue::both();
    let results = join_all(&venue, &[(0, 2, "a", 0), (0, 2, "b", 300), (1, 2, "a", 900)]);
    assert!(results[0].is_ok() && results[2].is_ok());
    let text = results[1].as_ref().err().unwrap();
    assert!(text.contains("cannot listen on") && text.contains("GATHER8_PORT"), "{text}");
}

#[test]
fn whoever_comes_when_the_others_have_met_without_it_is_told() {
    let [venue, _] = Venue::both();
    let results = join_all(&venue, &[(0, 2, "job", 0), (1, 2, "job", 0), (1, 2, "job", 700)]);
    assert!(results[0].is_ok() && results[1].is_ok());
    let expected = format!(
        "rendezvous: the ranks of a job `job` have met on this host without this rank 1 (its rank 0 is process {}): give each rank a number of its own, and each job a GATHER8_JOB of its own",
        std::process::id()
    );
    assert_eq!(results[2].as_ref().err(), Some(&expected));
    // Even if that job has ended meanwhile.
    drop(results);
    let results = thread::scope(|scope| {
        let late = scope.spawn(|| join_all(&venue, &[(1, 2, "job", 300)]));
        let met = join_all(&venue, &[(0, 2, "job", 0), (1, 2, "job", 0)]);
        thread::sleep(Duration::from_millis(400));
        assert!(met.iter().all(Result::is_ok));
        drop(met);
        late.join().unwrap()
    });
    assert_eq!(results[0].as_ref().err(), Some(&expected));

    // A world that is dropped leaves the name to the next at once.
    drop(results);
    assert!(join_all(&venue, &[(0, 2, "job", 0), (1, 2, "job", 0)]).iter().all(Result::is_ok));
}

#[test]
fn a_file_that_a_dead_rank_0_has_left_keeps_nobody() {
    use std::os::unix::fs::OpenOptionsExt;
    // Learn the file's name, then leave one there that names a process which lives: number 1.
    let venue = Venue::File(tempfile::tempdir().unwrap());
    let Venue::File(directory) = &venue else { unreachable!() };
    let folder = directory.path().join("meet");
    let name = thread::scope(|scope| {
        let short = in_folder(directory.path(), Duration::from_millis(300));
        let launch = Launch::explicit(0, 2, "job").unwrap();
        let zero = scope.spawn(move || TcpWorld::join(&launch, &short).is_err());
        let find = || {
            let mut files = std::fs::read_dir(&folder).ok()?.flatten().map(|file| file.path());
            files.find(|path| path.extension().is_some_and(|end| end == "rendezvous"))
        };
        let name = std::iter::repeat_with(find).find_map(|name| name).unwrap();
        assert!(zero.join().unwrap());
        name
    });
    let text = format!("gather8 1\n127.0.0.1:1\n{}\n1\nend\n", "ab".repeat(32));
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&name).unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    drop(file);
    let results = join_all(&venue, &[(1, 2, "job", 0), (0, 2, "job", 300)]);
    assert!(
        results.iter().all(Result::is_ok),
        "{:?}",
        results.iter().map(|r| r.as_ref().err()).collect::<Vec<_>>()
    );
    drop(results);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn missing_ranks_are_listed_by_all_who_came() {
    let directory = tempfile::tempdir().unwrap();
    let options = in_folder(directory.path(), Duration::from_millis(700));
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
