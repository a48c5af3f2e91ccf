//! What rank 0 does: it lets the others in, then tells all where all listen.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep_until, timeout};

use super::judge::{Verdict, judge};
use super::{MARGIN, Met, Party, Venue, failed, ranks, resolve};
use crate::error::Result;
use crate::net::door::Door;
use crate::net::handshake::{Caller, Process};
use crate::net::proof::{Key, nonce};
use crate::net::wire::{self, Head};

/// When it is clear that the ranks cannot come together: how long rank 0 stays to say so to those
/// that are still on their way.
const LINGER: Duration = Duration::from_secs(2);
/// How long a rank may take to come after one of another job has claimed its number.
const GRACE: Duration = Duration::from_secs(2);

pub(super) async fn host(party: &Party, venue: &Venue) -> Result<Met> {
    match venue {
        #[cfg(unix)]
        Venue::File { path, port, job } => {
            let listener = listen((Ipv4Addr::LOCALHOST, port.unwrap_or(0)).into()).await?;
            let invitation = crate::net::token::Invitation {
                address: local(&listener)?,
                token: nonce()?,
                process: std::process::id(),
            };
            let published = crate::net::token::publish(path, job, &invitation)?;
            let met = receive(party, &listener, &Key::of_token(&invitation.token)).await?;
            Ok(Met { held: Some(Box::new(published)), ..met })
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

/// A rank that is in.
struct Guest {
    stream: TcpStream,
    /// Where it listens.
    address: SocketAddr,
    process: Process,
}

/// Ranks that are in, and what happened to those that are not.
struct Reception<'a> {
    party: &'a Party,
    guests: BTreeMap<u32, Guest>,
    sent_away: Vec<String>,
    /// Ranks whose number one of another job has claimed: until when they may still come, and what
    /// it was told.
    strays: BTreeMap<u32, (Instant, String)>,
}

async fn receive(party: &Party, listener: &TcpListener, key: &Key) -> Result<Met> {
    let mut reception = Reception {
        party,
        guests: BTreeMap::new(),
        sent_away: Vec::new(),
        strays: BTreeMap::new(),
    };
    let mut door = Door::new(listener, key);
    while reception.guests.len() as u32 + 1 < party.world {
        let lost = reception.strays.values().min_by_key(|(until, _)| *until).cloned();
        let (until, why) = lost.map_or((party.deadline, None), |(until, why)| (until, Some(why)));
        let over = tokio::select! {
            caller = door.next() => reception.take(caller).await,
            () = sleep_until(until.min(party.deadline)) => match why {
                Some(why) if until <= party.deadline => Err(why),
                _ => break,
            },
        };
        if let Err(why) = over {
            tracing::warn!(%why, "the ranks cannot come together");
            reception.dismiss(&why).await;
            tell_the_late(&mut door, &why).await;
            return Err(failed(why));
        }
    }
    drop(door);
    if let Some(why) = reception.missing() {
        reception.dismiss(&why).await;
        return Err(failed(why));
    }
    introduce(reception.guests, local(listener)?).await
}

impl Reception<'_> {
    /// Deals with a caller; an error if the ranks can never come together.
    async fn take(&mut self, caller: Caller<TcpStream>) -> Result<(), String> {
        let Some(from) = caller.stream.peer_addr().ok() else { return Ok(()) };
        let greeting = caller.greeting.clone();
        let rank = greeting.from;
        if self.guests.get(&rank).is_some_and(|guest| is_closed(&guest.stream)) {
            self.guests.remove(&rank);
        }
        let guest = self.guests.get(&rank).map(|guest| &guest.process);
        let (reason, over) = match judge(self.party, &greeting, guest) {
            Verdict::Welcome => {
                if let Some(stream) = caller.welcome().await {
                    let address = SocketAddr::new(from.ip(), greeting.port);
                    self.guests.insert(rank, Guest { stream, address, process: greeting.process });
                    self.strays.remove(&rank);
                }
                return Ok(());
            }
            Verdict::Away(reason) => (reason, false),
            Verdict::Stray(reason) => {
                let lacking = (1..self.party.world).contains(&rank) && guest.is_none();
                if lacking {
                    let until = Instant::now() + GRACE;
                    self.strays.entry(rank).or_insert_with(|| (until, reason.clone()));
                }
                (reason, false)
            }
            Verdict::Over(reason) => (reason, true),
        };
        tracing::warn!(%from, %reason, "a rank was sent away");
        caller.refuse(&reason).await;
        if over {
            return Err(reason);
        }
        if self.sent_away.len() < 3 && !self.sent_away.contains(&reason) {
            self.sent_away.push(reason);
        }
        Ok(())
    }

    /// Which ranks have not come, if some have not.
    fn missing(&self) -> Option<String> {
        let missing = (1..self.party.world).filter(|rank| !self.guests.contains_key(rank));
        let missing = missing.collect::<Vec<_>>();
        if missing.is_empty() {
            return None;
        }
        let patience = self.party.patience.as_secs_f64();
        let problem = format!("{} did not come within {patience:.1} s", ranks(&missing));
        Some(if self.sent_away.is_empty() {
            problem
        } else {
            format!("{problem} ({})", self.sent_away.join("; "))
        })
    }

    /// Tells all that are in why they have come in vain.
    async fn dismiss(&mut self, why: &str) {
        for guest in self.guests.values_mut() {
            // One that is gone does not mind.
            let _ = send(&mut guest.stream, &Head::Refused(why.to_owned())).await;
        }
    }
}

/// Tells the same to those who come in the next moments.
async fn tell_the_late(door: &mut Door<'_>, why: &str) {
    let until = Instant::now() + LINGER;
    loop {
        tokio::select! {
            caller = door.next() => caller.refuse(why).await,
            () = sleep_until(until) => return,
        }
    }
}

/// Tells all where all listen.
async fn introduce(guests: BTreeMap<u32, Guest>, own: SocketAddr) -> Result<Met> {
    let others = guests.values().map(|guest| guest.address);
    let addresses = std::iter::once(own).chain(others).collect::<Vec<_>>();
    let table = Head::Table { session: nonce()?, addresses: addresses.clone() };
    let mut links = BTreeMap::new();
    for (rank, mut guest) in guests {
        send(&mut guest.stream, &table)
            .await
            .map_err(|error| failed(format!("rank {rank} was lost ({error})")))?;
        links.insert(rank, guest.stream);
    }
    Ok(Met { links, addresses, held: None })
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

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        failed(format!("rank 0 cannot listen on {address} ({error}): choose another GATHER8_PORT"))
    })
}

fn local(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|error| failed(format!("a listener has no address ({error})")))
}
