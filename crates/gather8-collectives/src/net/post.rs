//! Messages among ranks that are processes, whatever carries them: what is sent for which call, and
//! what a message that has come does to the board.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::host::board::{Board, Cause, Place};
use crate::host::message::{Message, Payload};
use crate::host::seat::Link;
use crate::net::wire::{self, Head};

/// A message on its way to one peer.
pub(crate) struct Parcel {
    /// Everything up to the payload.
    pub(crate) head: Vec<u8>,
    /// The payload, and the peer's place in it.
    payload: Option<(Payload, usize)>,
}

impl Parcel {
    /// A message without payload.
    pub(crate) fn of(head: &Head) -> Self {
        Self { head: wire::encode(head, 0), payload: None }
    }

    /// The bytes after the head.
    pub(crate) fn body(&self) -> &[u8] {
        self.payload.as_ref().map_or(&[], |(payload, position)| payload.for_rank(*position))
    }
}

/// Carries messages; sending never waits.
pub(crate) trait Carrier: Send + Sync {
    /// Every rank but this one.
    fn peers(&self) -> Vec<u32>;
    /// Sends. A peer that is lost is no matter here: the board learns of it elsewhere.
    fn send(&self, to: u32, parcel: Parcel);
}

/// What the peers have answered to questions.
#[derive(Default)]
pub(crate) struct Answers {
    given: Mutex<BTreeMap<(u64, u32), Vec<u32>>>,
    came: Condvar,
}

/// The link of a rank that is a process.
pub(crate) struct Post<C> {
    rank: u32,
    carrier: C,
    answers: Arc<Answers>,
    questions: AtomicU64,
}

impl<C: Carrier> Post<C> {
    pub(crate) fn new(rank: u32, carrier: C, answers: Arc<Answers>) -> Self {
        Self { rank, carrier, answers, questions: AtomicU64::new(0) }
    }

    fn tell_all(&self, head: &Head) {
        self.carrier.peers().into_iter().for_each(|peer| self.carrier.send(peer, Parcel::of(head)));
    }
}

impl<C: Carrier> Link for Post<C> {
    fn send(&self, place: Place, members: &[u32], rank: u32, message: &Arc<Message>) {
        for (position, &peer) in members.iter().enumerate().filter(|(_, peer)| **peer != rank) {
            let length = message.payload.for_rank(position).len() as u64;
            let head = Head::Contribution(place, message.header.clone());
            let payload = Some((message.payload.clone(), position));
            self.carrier.send(peer, Parcel { head: wire::encode(&head, length), payload });
        }
    }

    fn announce(&self, cause: &Cause) {
        self.tell_all(&Head::Fail(cause.clone()));
    }

    fn leave(&self, group: u64, members: &[u32], rank: u32, issued: u64, host: bool, how: &str) {
        let head = Head::Leave { group, issued, host, how: how.to_owned() };
        let peers = members.iter().filter(|peer| **peer != rank);
        peers.for_each(|&peer| self.carrier.send(peer, Parcel::of(&head)));
    }

    fn report(&self, text: &str) {
        self.tell_all(&Head::Report(text.to_owned()));
    }

    fn waits_for(&self, board: &Board, ranks: &[u32], until: Instant) -> BTreeMap<u32, Vec<u32>> {
        let number = self.questions.fetch_add(1, Ordering::Relaxed);
        let mut waits = BTreeMap::new();
        for &rank in ranks {
            if rank == self.rank {
                waits.insert(rank, board.waits_for(rank));
            } else {
                self.carrier.send(rank, Parcel::of(&Head::Ask(number)));
            }
        }
        let mut given = self.answers.given.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            for &rank in ranks {
                if let Some(answer) = given.remove(&(number, rank)) {
                    waits.insert(rank, answer);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || ranks.iter().all(|rank| waits.contains_key(rank)) {
                break;
            }
            let waited = self.answers.came.wait_timeout(given, left);
            given = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        waits.retain(|_, others| !others.is_empty());
        waits
    }
}

/// What a message did.
pub(crate) enum Taken {
    /// It is dealt with.
    Done,
    /// It wants this answer.
    Answer(Head),
    /// The sender has ended in good order.
    Farewell,
    /// No rank sends this after the rendezvous.
    Strange,
}

/// Where messages arrive.
#[derive(Clone)]
pub(crate) struct Inbox {
    pub(crate) rank: u32,
    pub(crate) board: Arc<Board>,
    pub(crate) answers: Arc<Answers>,
}

impl Inbox {
    /// Deals with a message of a peer. `spread` sends to every peer: a failure that is news here is
    /// passed on before anybody here can learn of it, since what this rank does because of it may
    /// reach others before the first report does.
    pub(crate) fn take(
        &self,
        peer: u32,
        head: Head,
        payload: Vec<u8>,
        spread: impl FnOnce(Head),
    ) -> Taken {
        match head {
            Head::Contribution(place, header) => {
                let payload = Payload::Same(Arc::new(payload));
                self.board.post(place, peer, Arc::new(Message { header, payload }));
            }
            Head::Fail(cause) => {
                self.board.fail(cause, |cause| spread(Head::Fail(cause.clone())));
            }
            Head::Leave { group, issued, host, how } => {
                self.board.leave(group, peer, issued, host, &how);
            }
            Head::Ask(number) => {
                return Taken::Answer(Head::Waits(number, self.board.waits_for(self.rank)));
            }
            Head::Waits(number, ranks) => {
                let mut given = self.answers.given.lock().unwrap_or_else(PoisonError::into_inner);
                given.insert((number, peer), ranks);
                self.answers.came.notify_all();
            }
            Head::Report(text) => self.board.report(peer, &text),
            Head::Bye => {
                self.board.end(peer, "left");
                return Taken::Farewell;
            }
            Head::Table { .. } | Head::Refused(_) => return Taken::Strange,
        }
        Taken::Done
    }
}
