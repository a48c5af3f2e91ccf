//! Where ranks leave their contributions and wait for the others': one board for all ranks of a
//! process. With ranks as threads they share it; with ranks as processes a connection fills it.
//!
//! A board knows one family of groups (a world and what was split from it). The first failure in
//! any group fails the family: a rank that is lost to one group is lost to training.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::communicator::Op;
use crate::error::Error;
use crate::host::message::Message;

/// Which count an operation's index belongs to. Streams and the host issue side by side, so each
/// counts by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// Operations on streams.
    Stream,
    /// Barriers, exchanges and splits.
    Host,
    /// Exchanges after a failure that lost nobody.
    Inquest,
}

/// An operation's place among all operations of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) group: u64,
    pub(crate) lane: Lane,
    pub(crate) index: u64,
}

/// Why a family failed; the same for every rank of it. Ranks are those of the family's world.
#[derive(Clone, Debug)]
pub(crate) enum Cause {
    /// A rank is gone.
    Lost { rank: u32, how: String },
    /// A rank aborted.
    Aborted { rank: u32, reason: String },
    /// Ranks are late; the error as the first rank that noticed it has put it.
    Late { ranks: Vec<u32>, operation: String, sequence: u64, unit: String, deadline: Duration },
    /// Ranks passed different things.
    Disordered { difference: String },
}

impl Cause {
    /// The error of the operation that `rank` is in, or asks for.
    pub(crate) fn error(&self, rank: u32, name: &str, sequence: u64, unit: &str) -> Error {
        let lost = |peer: u32, how: String| Error::PeerLost {
            rank: peer,
            how,
            operation: name.to_owned(),
            sequence,
            unit: unit.to_owned(),
        };
        match self.clone() {
            Self::Lost { rank: peer, how } => lost(peer, how),
            Self::Aborted { rank: by, reason } if by == rank => Error::Aborted { reason },
            Self::Aborted { rank: by, reason } => lost(by, format!("aborted ({reason})")),
            Self::Late { ranks, operation, sequence, unit, deadline } => {
                Error::Deadline { ranks, operation, sequence, unit, deadline }
            }
            Self::Disordered { difference } => Error::Disordered { difference },
        }
    }

    /// The error in the words of an operation.
    pub(crate) fn error_in(&self, rank: u32, op: &Op<'_>) -> Error {
        self.error(rank, op.name, op.sequence, op.unit)
    }

    /// Whether every rank is still there to answer.
    fn leaves_all_alive(&self) -> bool {
        matches!(self, Self::Aborted { .. } | Self::Disordered { .. })
    }
}

/// How a wait ended.
pub(crate) enum Outcome {
    /// Everybody's contribution, in the group's order.
    Ready(Vec<Arc<Message>>),
    /// The family has failed.
    Failed(Cause),
    /// A rank has left and will never come.
    Gone { rank: u32, how: String },
    /// The time is up; these ranks are missing.
    Overdue(Vec<u32>),
}

/// A member that will contribute nothing more to a group, from some operation on.
#[derive(Debug)]
struct Leaving {
    /// Operations on streams that it still takes part in.
    issued: u64,
    /// Whether its host is gone too, not only an operation of a stream.
    host: bool,
    how: String,
}

impl Leaving {
    /// Whether it will never come to this place.
    fn skips(&self, place: Place) -> bool {
        match place.lane {
            Lane::Stream => place.index >= self.issued,
            Lane::Host | Lane::Inquest => self.host,
        }
    }
}

#[derive(Default)]
struct Group {
    rounds: HashMap<(Lane, u64), Round>,
    leaving: BTreeMap<u32, Leaving>,
}

#[derive(Default)]
struct Round {
    messages: BTreeMap<u32, Arc<Message>>,
    taken: usize,
}

#[derive(Default)]
struct State {
    failure: Option<Cause>,
    groups: HashMap<u64, Group>,
    /// Waits in progress, by rank.
    waiting: BTreeMap<u32, Vec<(Place, Vec<u32>)>>,
    /// Ranks that have ended in good order, from every group.
    ended: BTreeMap<u32, String>,
    reports: BTreeMap<u32, String>,
}

/// See the module.
pub(crate) struct Board {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether all members of a group take from this board, or one.
    shared: bool,
}

impl Board {
    pub(crate) fn new(shared: bool) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), shared }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a contribution.
    pub(crate) fn post(&self, place: Place, rank: u32, message: Arc<Message>) {
        let mut state = self.lock();
        let group = state.groups.entry(place.group).or_default();
        let round = group.rounds.entry((place.lane, place.index)).or_default();
        round.messages.entry(rank).or_insert(message);
        drop(state);
        self.changed.notify_all();
    }

    /// Says that a rank waits at a place, until the result is dropped. That is longer than one
    /// [`wait`](Self::wait): a rank that asks around whom to blame still waits, and is not to be
    /// blamed by another that asks at the same time.
    pub(crate) fn waiting(&self, place: Place, rank: u32, members: &[u32]) -> Waiting<'_> {
        let waits = (place, members.to_vec());
        self.lock().waiting.entry(rank).or_default().push(waits);
        Waiting { board: self, place, rank }
    }

    /// Waits for the contribution of every member. Never longer than until `until`.
    pub(crate) fn wait(&self, place: Place, members: &[u32], until: Instant) -> Outcome {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = self.look(&mut state, place, members) {
                return outcome;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Outcome::Overdue(missing(&state, place, members));
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn look(&self, state: &mut State, place: Place, members: &[u32]) -> Option<Outcome> {
        if let Some(messages) = self.take(state, place, members) {
            return Some(Outcome::Ready(messages));
        }
        if let Some(cause) = &state.failure
            && !(place.lane == Lane::Inquest && cause.leaves_all_alive())
        {
            return Some(Outcome::Failed(cause.clone()));
        }
        let group = state.groups.get(&place.group);
        missing(state, place, members).into_iter().find_map(|rank| {
            let left = group.and_then(|group| group.leaving.get(&rank));
            let how = match left {
                Some(left) if left.skips(place) => &left.how,
                _ => state.ended.get(&rank)?,
            };
            Some(Outcome::Gone { rank, how: how.clone() })
        })
    }

    fn take(&self, state: &mut State, place: Place, members: &[u32]) -> Option<Vec<Arc<Message>>> {
        let group = state.groups.get_mut(&place.group)?;
        let key = (place.lane, place.index);
        let round = group.rounds.get_mut(&key)?;
        let messages = members
            .iter()
            .map(|rank| round.messages.get(rank).cloned())
            .collect::<Option<Vec<_>>>()?;
        round.taken += 1;
        if !self.shared || round.taken == members.len() {
            group.rounds.remove(&key);
        }
        Some(messages)
    }

    /// Fails the family unless it has failed already; returns the cause that stands. A new cause is
    /// announced before anybody here can learn of it: what a thread of this rank says because of
    /// the failure must not reach the others before its reason. `announce` must not wait, nor touch
    /// the board.
    pub(crate) fn fail(&self, cause: Cause, announce: impl FnOnce(&Cause)) -> Cause {
        let mut state = self.lock();
        let standing = match &state.failure {
            Some(standing) => standing.clone(),
            None => {
                announce(&cause);
                state.failure = Some(cause.clone());
                cause
            }
        };
        drop(state);
        self.changed.notify_all();
        standing
    }

    /// What the family failed with, if it has.
    pub(crate) fn failure(&self) -> Option<Cause> {
        self.lock().failure.clone()
    }

    /// A member leaves a group: operations on streams from the `issued`-th on will never have its
    /// part, nor will those of the hosts if `host`. The smallest count stands, with its reason.
    pub(crate) fn leave(&self, group: u64, rank: u32, issued: u64, host: bool, how: &str) {
        let mut state = self.lock();
        let group = state.groups.entry(group).or_default();
        let new = Leaving { issued, host, how: how.to_owned() };
        match group.leaving.entry(rank) {
            Entry::Vacant(place) => drop(place.insert(new)),
            Entry::Occupied(mut place) => {
                let old = place.get_mut();
                let host = old.host || host;
                if issued < old.issued {
                    *old = new;
                }
                old.host = host;
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A rank ends in good order: nothing more will come from it, in any group.
    pub(crate) fn end(&self, rank: u32, how: &str) {
        self.lock().ended.entry(rank).or_insert_with(|| how.to_owned());
        self.changed.notify_all();
    }

    /// Keeps a rank's last report.
    pub(crate) fn report(&self, rank: u32, text: &str) {
        self.lock().reports.insert(rank, text.to_owned());
    }

    /// The last report of each of these ranks.
    pub(crate) fn reports(&self, ranks: &[u32]) -> Vec<Option<String>> {
        let state = self.lock();
        ranks.iter().map(|rank| state.reports.get(rank).cloned()).collect()
    }

    /// The ranks that a rank waits for; none if it does not wait.
    pub(crate) fn waits_for(&self, rank: u32) -> Vec<u32> {
        let state = self.lock();
        let waits = state.waiting.get(&rank).into_iter().flatten();
        let mut ranks = waits
            .flat_map(|(place, members)| missing(&state, *place, members))
            .filter(|&other| other != rank)
            .collect::<Vec<_>>();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

/// See [`Board::waiting`].
pub(crate) struct Waiting<'a> {
    board: &'a Board,
    place: Place,
    rank: u32,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.board.lock();
        let Some(waits) = state.waiting.get_mut(&self.rank) else { return };
        if let Some(at) = waits.iter().position(|(place, _)| *place == self.place) {
            waits.swap_remove(at);
        }
    }
}

fn missing(state: &State, place: Place, members: &[u32]) -> Vec<u32> {
    let round = state
        .groups
        .get(&place.group)
        .and_then(|group| group.rounds.get(&(place.lane, place.index)));
    let has = |rank: &u32| round.is_some_and(|round| round.messages.contains_key(rank));
    members.iter().copied().filter(|rank| !has(rank)).collect()
}
