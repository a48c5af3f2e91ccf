//! How the ranks of a job find each other: all come to rank 0, which lets them in and tells
//! everybody where everybody listens; then each calls those before it.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::error::{Error, Result};
use crate::net::handshake::{self, Caller, Failed, Greeting, Purpose};
use crate::net::proof::{Key, nonce};
use crate::net::wire::{self, Head};

/// Connections that may be proving themselves at once; beyond that the oldest goes.
const CROWD: usize = 128;
/// Between two attempts to reach rank 0.
const PAUSE: Duration = Duration::from_millis(50);
/// How long one attempt to connect may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How long the others' news may take beyond the deadline.
const MARGIN: Duration = Duration::from_secs(5);

/// Where the ranks meet, and by which token.
#[derive(Clone, Debug)]
pub(crate) enum Venue {
    /// Through a file on this host.
    #[cfg(unix)]
    File { path: std::path::PathBuf, port: Option<u16> },
    /// At an address that every rank knows, with a token that every rank knows.
    Network { host: String, port: u16, token: Vec<u8> },
}

/// Who comes.
#[derive(Clone, Debug)]
pub(crate) struct Party {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) job: [u8; 32],
    pub(crate) deadline: Instant,
    /// The deadline as it was given, for errors.
    pub(crate) patience: Duration,
}

/// Connections with every other rank.
pub(crate) struct Met {
    pub(crate) links: BTreeMap<u32, TcpStream>,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// Brings the ranks together.
///
/// # Errors
/// [`Error::Rendezvous`] at the deadline, naming the ranks that did not come; at once if this rank
/// can never be let in.
pub(crate) async fn meet(party: &Party, venue: &Venue) -> Result<Met> {
    if party.rank == 0 { host(party, venue).await } else { visit(party, venue).await }
}

/// A published file, removed when the ranks have met or given up.
#[cfg(unix)]
struct Published(std::path::PathBuf);

#[cfg(unix)]
impl Drop for Published {
    fn drop(&mut self) {
        crate::net::token::remove(&self.0);
    }
}

async fn host(party: &Party, venue: &Venue) -> Result<Met> {
    match venue {
        #[cfg(unix)]
        Venue::File { path, port } => {
            let listener = listen((Ipv4Addr::LOCALHOST, port.unwrap_or(0)).into()).await?;
            let invitation = crate::net::token::Invitation {
                address: local(&listener)?,
                token: nonce()?,
                process: std::process::id(),
            };
            crate::net::token::publish(path, &invitation)?;
            let _published = Published(path.clone());
            receive(party, &listener, &Key::of_token(&invitation.token)).await
        }
        Venue::Network { host, port, token } => {
            // All addresses of the host's family, since a name may mean another one here than
            // elsewhere.
            let address = resolve(host, *port).await?;
            let any = match address.ip() {
                IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
            };
            let bind = if address.ip().is_loopback() { address.ip() } else { any };
            let listener = listen((bind, *port).into()).await?;
            receive(party, &listener, &Key::of_token(token)).await
        }
    }
}

/// Rank 0's part: lets every other rank in, then tells all where all listen.
async fn receive(party: &Party, listener: &TcpListener, key: &Key) -> Result<Met> {
    let mut guests: BTreeMap<u32, (TcpStream, SocketAddr)> = BTreeMap::new();
    let mut sent_away = Vec::new();
    let mut door = Door::new(listener, key);
    while guests.len() as u32 + 1 < party.world {
        let caller = tokio::select! {
            caller = door.next() => caller,
            () = sleep_until(party.deadline) => break,
        };
        let Some(from) = caller.stream.peer_addr().ok() else { continue };
        let greeting = caller.greeting.clone();
        if let Some((old, _)) = guests.get(&greeting.from)
            && is_closed(old)
        {
            guests.remove(&greeting.from);
        }
        let known = guests.contains_key(&greeting.from);
        if let Some(reason) = objection(party, &greeting, known) {
            tracing::warn!(%from, %reason, "a rank was sent away");
            sent_away.push(reason.clone());
            caller.refuse(&reason).await;
            continue;
        }
        if let Some(stream) = caller.welcome().await {
            let address = SocketAddr::new(from.ip(), greeting.port);
            guests.insert(greeting.from, (stream, address));
        }
    }
    drop(door);

    let missing = (1..party.world).filter(|rank| !guests.contains_key(rank)).collect::<Vec<_>>();
    if !missing.is_empty() {
        let mut problem = format!(
            "{} did not come within {:.1} s",
            ranks(&missing),
            party.patience.as_secs_f64()
        );
        sent_away.dedup();
        if !sent_away.is_empty() {
            sent_away.truncate(3);
            problem = format!("{problem} ({})", sent_away.join("; "));
        }
        for (stream, _) in guests.values_mut() {
            let _ = send(stream, &Head::Refused(problem.clone())).await;
        }
        return Err(failed(problem));
    }

    let addresses = std::iter::once(local(listener)?)
        .chain(guests.values().map(|(_, address)| *address))
        .collect::<Vec<_>>();
    let table = Head::Table { session: nonce()?, addresses: addresses.clone() };
    let mut links = BTreeMap::new();
    for (rank, (mut stream, _)) in guests {
        send(&mut stream, &table)
            .await
            .map_err(|error| failed(format!("rank {rank} was lost ({error})")))?;
        links.insert(rank, stream);
    }
    Ok(Met { links, addresses })
}

/// Why a rank that knows the token cannot come in.
fn objection(party: &Party, greeting: &Greeting, known: bool) -> Option<String> {
    let Greeting { purpose, from, to, world, job, build, .. } = greeting;
    if *purpose != Purpose::Rendezvous || *to != party.rank {
        return Some(format!("rank {from} has come to the wrong place"));
    }
    if *world != party.world {
        return Some(format!("rank {from} was told of {world} ranks, rank 0 of {}", party.world));
    }
    if *job != party.job {
        return Some(format!("rank {from} belongs to another job"));
    }
    if *build != handshake::build() {
        return Some(format!(
            "rank {from} runs gather8 {}, rank 0 {}",
            handshake::build_name(build),
            handshake::build_name(&handshake::build())
        ));
    }
    if *from == 0 {
        return Some("a second process says that it is rank 0".to_owned());
    }
    if *from >= *world {
        return Some(format!("rank {from} lies outside a world of {world}"));
    }
    known.then(|| format!("a second process says that it is rank {from}"))
}

/// The other ranks' part.
async fn visit(party: &Party, venue: &Venue) -> Result<Met> {
    let mut last;
    let (mut zero, listener, key) = loop {
        match try_visit(party, venue).await {
            Ok(done) => break done,
            Err(Attempt::Over(problem)) => return Err(failed(problem)),
            Err(Attempt::Again(problem)) => last = problem,
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
    let mut links = join_peers(party, &listener, &addresses, &key).await?;
    links.insert(0, zero);
    Ok(Met { links, addresses })
}

/// How an attempt to reach rank 0 failed.
enum Attempt {
    Again(String),
    Over(String),
}

async fn try_visit(party: &Party, venue: &Venue) -> Result<(TcpStream, TcpListener, Key), Attempt> {
    let (address, key) = match venue {
        #[cfg(unix)]
        Venue::File { path, .. } => {
            let found = crate::net::token::read(path).map_err(|error| {
                Attempt::Over(match error {
                    Error::Rendezvous { problem } => problem,
                    other => other.to_string(),
                })
            })?;
            let invitation = found.ok_or_else(|| Attempt::Again(format!(
                "{} is not there (does rank 0 run on this host? Ranks on several hosts need GATHER8_ADDR and a token)",
                path.display()
            )))?;
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
        .map_err(again)?;
    let here = stream.local_addr().map_err(again)?.ip();
    let listener = TcpListener::bind((here, 0)).await.map_err(again)?;
    let greeting = Greeting {
        purpose: Purpose::Rendezvous,
        from: party.rank,
        to: 0,
        world: party.world,
        job: party.job,
        port: listener.local_addr().map_err(again)?.port(),
        build: handshake::build(),
    };
    let nonce = nonce().map_err(|error| Attempt::Over(error.to_string()))?;
    match handshake::call(&mut stream, &greeting, &key, &nonce).await {
        Ok(()) => Ok((stream, listener, key)),
        Err(Failed::Refused(reason)) => Err(Attempt::Over(reason)),
        Err(Failed::Unfit(problem)) => Err(Attempt::Again(format!("{address}: {problem}"))),
    }
}

/// Calls every rank between 0 and this one, and waits for the calls of those behind it.
async fn join_peers(
    party: &Party,
    listener: &TcpListener,
    addresses: &[SocketAddr],
    key: &Key,
) -> Result<BTreeMap<u32, TcpStream>> {
    let mut calls = JoinSet::new();
    for (to, &address) in (0_u32..).zip(addresses).take(party.rank as usize).skip(1) {
        let greeting = Greeting {
            purpose: Purpose::Peer,
            from: party.rank,
            to,
            world: party.world,
            job: party.job,
            port: 0,
            build: handshake::build(),
        };
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

/// A listener and the callers that are still proving themselves, a bounded crowd.
struct Door<'a> {
    listener: &'a TcpListener,
    key: &'a Key,
    handshakes: JoinSet<()>,
    order: VecDeque<AbortHandle>,
    proved: mpsc::Receiver<Caller<TcpStream>>,
    prove: mpsc::Sender<Caller<TcpStream>>,
}

impl<'a> Door<'a> {
    fn new(listener: &'a TcpListener, key: &'a Key) -> Self {
        let (prove, proved) = mpsc::channel(CROWD);
        Self { listener, key, handshakes: JoinSet::new(), order: VecDeque::new(), proved, prove }
    }

    /// The next caller that knows the token.
    async fn next(&mut self) -> Caller<TcpStream> {
        loop {
            tokio::select! {
                Some(caller) = self.proved.recv() => return caller,
                Some(_) = self.handshakes.join_next(), if !self.handshakes.is_empty() => {
                    self.order.retain(|handle| !handle.is_finished());
                }
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => self.examine(stream),
                    // Out of descriptors, or a caller that is gone already.
                    Err(_) => sleep(Duration::from_millis(5)).await,
                },
            }
        }
    }

    fn examine(&mut self, stream: TcpStream) {
        while self.order.len() >= CROWD {
            if let Some(oldest) = self.order.pop_front() {
                oldest.abort();
            }
        }
        let Ok(nonce) = nonce() else { return };
        let (key, prove) = (self.key.clone(), self.prove.clone());
        let handle = self.handshakes.spawn(async move {
            if let Some(caller) = handshake::accept(stream, &key, &nonce).await {
                let _ = prove.send(caller).await;
            }
        });
        self.order.push_back(handle);
    }
}

/// Whether the other end has closed a connection on which it has nothing to say.
fn is_closed(stream: &TcpStream) -> bool {
    match stream.try_read(&mut [0]) {
        Ok(_) => true,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

async fn send(stream: &mut TcpStream, head: &Head) -> std::io::Result<()> {
    let bytes = wire::encode(head, 0);
    timeout(MARGIN, stream.write_all(&bytes))
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

async fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let mut found = tokio::net::lookup_host((host, port))
        .await
        .map_err(|error| failed(format!("host `{host}` is not known ({error})")))?;
    found.next().ok_or_else(|| failed(format!("host `{host}` has no address")))
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        failed(format!("rank 0 cannot listen on {address} ({error}): choose another GATHER8_PORT"))
    })
}

fn local(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|error| failed(format!("a listener has no address ({error})")))
}

fn ranks(list: &[u32]) -> String {
    let numbers = list.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    format!("{} {numbers}", if list.len() == 1 { "rank" } else { "ranks" })
}

fn failed(problem: String) -> Error {
    Error::Rendezvous { problem }
}
