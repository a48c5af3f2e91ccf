//! What the other ranks do: they come to rank 0, then call each other.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::{MARGIN, Met, Party, Venue, failed, ranks, resolve};
use crate::error::{Error, Result};
use crate::net::door::Door;
use crate::net::handshake::{self, Failed, Greeting, PROTOCOL, Process, Purpose};
use crate::net::proof::{Key, nonce};
use crate::net::wire::{self, Head};

/// Between two attempts to reach rank 0.
const PAUSE: Duration = Duration::from_millis(50);
/// How long one attempt to connect may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How long a rank 0 that was found not to listen any longer is given to start a rendezvous anew.
const CLOSED: Duration = Duration::from_secs(3);

/// The other ranks' part.
pub(super) async fn visit(party: &Party, venue: &Venue) -> Result<Met> {
    let process = Process::own()?;
    // Since when it is known that others have met, and how it is put.
    let mut closed: Option<(Instant, String)> = None;
    let mut last;
    let (mut zero, listener, key) = loop {
        match try_visit(party, venue, process).await {
            Ok(done) => break done,
            Err(Attempt::Over(problem)) => return Err(failed(problem)),
            Err(Attempt::Absent(problem)) => last = problem,
            Err(Attempt::Closed(problem)) => {
                closed.get_or_insert_with(|| (Instant::now(), problem.clone()));
                last = problem;
            }
            Err(Attempt::Again(problem)) => {
                closed = None;
                last = problem;
            }
        }
        if let Some((_, problem)) = closed.take_if(|(since, _)| since.elapsed() >= CLOSED) {
            return Err(failed(problem));
        }
        if Instant::now() + PAUSE >= party.deadline {
            return Err(failed(format!(
                "rank {} did not reach rank 0 within {:.1} s: {last}",
                party.rank,
                party.patience.as_secs_f64()
            )));
        }
        sleep(PAUSE).await;
    };

    let news = timeout_at(party.deadline + MARGIN, wire::read(&mut zero)).await;
    let (session, addresses) = match news {
        Ok(Ok((Head::Table { session, addresses }, _))) => (session, addresses),
        Ok(Ok((Head::Refused(reason), _))) => return Err(failed(reason)),
        Ok(Ok(_)) => {
            return Err(failed("rank 0 sent something else than the ranks' addresses".to_owned()));
        }
        Ok(Err(error)) => return Err(failed(format!("rank 0 was lost ({error})"))),
        Err(_) => return Err(failed("rank 0 fell silent".to_owned())),
    };
    if addresses.len() != party.world as usize {
        return Err(failed(format!(
            "rank 0 sent {} addresses for {} ranks",
            addresses.len(),
            party.world
        )));
    }
    let key = key.session(&session);
    let mut links = join_peers(party, &listener, &addresses, &key, process).await?;
    links.insert(0, zero);
    Ok(Met { links, addresses, held: None })
}

/// How an attempt to reach rank 0 failed.
enum Attempt {
    Again(String),
    /// There is no rank 0 yet.
    Absent(String),
    /// Rank 0 lives and does not listen any longer.
    Closed(String),
    Over(String),
}

async fn try_visit(
    party: &Party,
    venue: &Venue,
    process: Process,
) -> Result<(TcpStream, TcpListener, Key), Attempt> {
    // What a refused connection means.
    let mut closed = None;
    let (address, key) = match venue {
        #[cfg(unix)]
        Venue::File { path, job, .. } => {
            use crate::net::token::Found;
            let found = crate::net::token::read(path).map_err(|error| {
                Attempt::Over(match error {
                    Error::Rendezvous { problem } => problem,
                    other => other.to_string(),
                })
            })?;
            let nobody = |what| {
                Attempt::Absent(format!(
                    "{} {what} (does rank 0 run on this host, with the same GATHER8_JOB? Ranks on several hosts need GATHER8_ADDR and a token)",
                    path.display()
                ))
            };
            let invitation = match found {
                Found::Living(invitation) => invitation,
                Found::Nothing => return Err(nobody("is not there")),
                Found::Dead => return Err(nobody("was left behind by a process that is gone")),
            };
            closed = Some(format!(
                "the ranks of a job `{}` have met on this host without this rank {} (its rank 0 is process {}): give each rank a number of its own, and each job a GATHER8_JOB of its own",
                job.escape_debug(),
                party.rank,
                invitation.process
            ));
            (invitation.address, Key::of_token(&invitation.token))
        }
        Venue::Network { host, port, token } => {
            let address = resolve(host, *port).await.map_err(|e| Attempt::Again(e.to_string()))?;
            (address, Key::of_token(token))
        }
    };
    let again = |error: std::io::Error| Attempt::Again(format!("{address}: {error}"));
    let mut stream = timeout(CONNECT, TcpStream::connect(address))
        .await
        .map_err(|_| Attempt::Again(format!("{address} does not answer")))?
        .map_err(|error| match closed {
            Some(closed) if error.kind() == ErrorKind::ConnectionRefused => Attempt::Closed(closed),
            _ => again(error),
        })?;
    let here = stream.local_addr().map_err(again)?.ip();
    let listener = TcpListener::bind((here, 0)).await.map_err(again)?;
    let port = listener.local_addr().map_err(again)?.port();
    let greeting = greeting(party, Purpose::Rendezvous, 0, port, process);
    let nonce = nonce().map_err(|error| Attempt::Over(error.to_string()))?;
    match handshake::call(&mut stream, &greeting, &key, &nonce).await {
        Ok(()) => Ok((stream, listener, key)),
        Err(Failed::Refused(reason)) => Err(Attempt::Over(reason)),
        Err(Failed::Unfit(problem)) => Err(Attempt::Again(format!("{address}: {problem}"))),
    }
}

/// What this rank says of itself.
fn greeting(party: &Party, purpose: Purpose, to: u32, port: u16, process: Process) -> Greeting {
    Greeting {
        version: PROTOCOL,
        purpose,
        from: party.rank,
        to,
        world: party.world,
        job: party.job,
        port,
        build: handshake::build(),
        process,
    }
}

/// Calls every rank between 0 and this one, and waits for the calls of those behind it.
async fn join_peers(
    party: &Party,
    listener: &TcpListener,
    addresses: &[SocketAddr],
    key: &Key,
    process: Process,
) -> Result<BTreeMap<u32, TcpStream>> {
    let mut calls = JoinSet::new();
    for (to, &address) in (0_u32..).zip(addresses).take(party.rank as usize).skip(1) {
        let greeting = greeting(party, Purpose::Peer, to, 0, process);
        let (key, nonce, deadline) = (key.clone(), nonce()?, party.deadline + MARGIN);
        calls.spawn(async move {
            loop {
                if let Ok(Ok(mut stream)) = timeout(CONNECT, TcpStream::connect(address)).await
                    && handshake::call(&mut stream, &greeting, &key, &nonce).await.is_ok()
                {
                    return Some((to, stream));
                }
                if Instant::now() + PAUSE >= deadline {
                    return None;
                }
                sleep(PAUSE).await;
            }
        });
    }
    let mut links = BTreeMap::new();
    let mut door = Door::new(listener, key);
    // Everybody is there; what is left takes no longer than a few messages.
    let deadline = party.deadline + MARGIN;
    while (links.len() as u32) + 2 < party.world {
        tokio::select! {
            Some(called) = calls.join_next(), if !calls.is_empty() => {
                if let Ok(Some((rank, stream))) = called {
                    links.insert(rank, stream);
                }
            }
            caller = door.next() => {
                let from = caller.greeting.from;
                let fits = caller.greeting.purpose == Purpose::Peer
                    && caller.greeting.to == party.rank
                    && caller.greeting.job == party.job
                    && (party.rank + 1..party.world).contains(&from)
                    && !links.contains_key(&from);
                if !fits {
                    caller.refuse("not expected here").await;
                } else if let Some(stream) = caller.welcome().await {
                    links.insert(from, stream);
                }
            }
            () = sleep_until(deadline) => break,
        }
    }
    let others = (1..party.world).filter(|rank| *rank != party.rank);
    let missing = others.filter(|rank| !links.contains_key(rank)).collect::<Vec<_>>();
    if missing.is_empty() {
        return Ok(links);
    }
    Err(failed(format!("rank {} has no connection with {}", party.rank, ranks(&missing))))
}
