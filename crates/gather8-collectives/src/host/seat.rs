//! One rank's seat in a group: posting, waiting, failing and leaving.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::communicator::Op;
use crate::error::{Error, Result};
use crate::host::board::{Board, Cause, Lane, Outcome, Place};
use crate::host::message::{self, Message};

/// How long late ranks may take to say that they wait for others, all in all.
const GRACE: Duration = Duration::from_millis(500);

/// The reason by which ranks that have found their orders to differ stop each other; the error is
/// then [`Error::Disordered`] on all of them.
pub(crate) const DISORDER: &str = "the ranks have issued different operations";

/// The difference in that error until the logs have been compared.
pub(crate) const UNRESOLVED: &str =
    "the next call compares their logs and says where they part (Fsdp::check does nothing else)";

/// The same where ranks wait for each other, each in an operation that the others have not issued.
/// It stands if their logs are alike.
pub(crate) const STUCK: &str = "each waits for the others; if they have issued the same operations, one has skipped a barrier or an exchange, or what connects them hangs";

/// How contributions and news reach the other ranks. Nothing here waits, but `waits_for`.
pub(crate) trait Link: Send + Sync {
    /// Sends a contribution to every other member.
    fn send(&self, place: Place, members: &[u32], rank: u32, message: &Arc<Message>);
    /// Tells every rank of the family why it has failed.
    fn announce(&self, cause: &Cause);
    /// Tells the members what [`Seat::leave`] says.
    fn leave(&self, group: u64, members: &[u32], rank: u32, issued: u64, host: bool, how: &str);
    /// Tells the other ranks how this one is.
    fn report(&self, text: &str);
    /// Whom these ranks wait for, as far as they say so by `until`; those that wait for nobody are
    /// left out.
    fn waits_for(&self, board: &Board, ranks: &[u32], until: Instant) -> BTreeMap<u32, Vec<u32>>;
}

/// See the module.
pub(crate) struct Seat {
    pub(crate) board: Arc<Board>,
    pub(crate) link: Arc<dyn Link>,
    pub(crate) group: u64,
    /// The group's ranks as the family's world numbers them, in the group's order.
    pub(crate) members: Arc<[u32]>,
    /// This rank's place among them.
    pub(crate) position: usize,
}

impl Seat {
    /// This rank's number in the family's world.
    pub(crate) fn rank(&self) -> u32 {
        self.members.get(self.position).copied().unwrap_or_default()
    }

    pub(crate) fn place(&self, lane: Lane, index: u64) -> Place {
        Place { group: self.group, lane, index }
    }

    /// Contributes, and waits for what all others contribute to the same operation.
    pub(crate) fn round(
        &self,
        lane: Lane,
        index: u64,
        op: &Op<'_>,
        message: Message,
    ) -> Result<Vec<Arc<Message>>> {
        let place = self.place(lane, index);
        let until = Instant::now() + op.deadline.min(LONGEST);
        let message = Arc::new(message);
        self.board.post(place, self.rank(), Arc::clone(&message));
        self.link.send(place, &self.members, self.rank(), &message);

        let _waiting = self.board.waiting(place, self.rank(), &self.members);
        let mut outcome = self.board.wait(place, &self.members, until);
        if let Outcome::Overdue(missing) = outcome {
            let ranks = self.culprits(missing);
            // Someone may have come while the others were asked.
            outcome = match self.board.wait(place, &self.members, Instant::now()) {
                Outcome::Overdue(_) => Outcome::Overdue(ranks),
                other => other,
            };
        }
        let cause = match outcome {
            Outcome::Ready(messages) => match message::difference(&self.members, &messages) {
                None => return Ok(messages),
                Some(difference) => Cause::Disordered { difference },
            },
            Outcome::Failed(cause) => return Err(cause.error_in(self.rank(), op)),
            Outcome::Gone { rank, how } => Cause::Lost { rank, how },
            Outcome::Overdue(ranks) if ranks.is_empty() => {
                Cause::Disordered { difference: STUCK.to_owned() }
            }
            Outcome::Overdue(ranks) => Cause::Late {
                ranks,
                operation: op.name.to_owned(),
                sequence: op.sequence,
                unit: op.unit.to_owned(),
                deadline: op.deadline,
            },
        };
        Err(self.fail(cause).error_in(self.rank(), op))
    }

    /// Who keeps everybody waiting: of the missing ranks, and of those that they wait for in turn,
    /// the ones that wait for nobody. None if each of them waits for another: then they are in
    /// different operations.
    fn culprits(&self, missing: Vec<u32>) -> Vec<u32> {
        let until = Instant::now() + GRACE;
        let mut idle = BTreeSet::new();
        let mut seen = BTreeSet::from([self.rank()]);
        let mut ask = missing;
        while !ask.is_empty() {
            seen.extend(ask.iter().copied());
            let waits = self.link.waits_for(&self.board, &ask, until);
            idle.extend(ask.iter().copied().filter(|rank| !waits.contains_key(rank)));
            ask = waits.into_values().flatten().filter(|rank| !seen.contains(rank)).collect();
            ask.sort_unstable();
            ask.dedup();
        }
        idle.into_iter().collect()
    }

    /// Fails the family, everywhere; returns the cause that stands.
    pub(crate) fn fail(&self, cause: Cause) -> Cause {
        self.board.fail(cause, |new| {
            tracing::debug!(rank = self.rank(), cause = ?new, "the ranks' communication has failed");
            self.link.announce(new);
        })
    }

    /// This rank contributes nothing more to the group: on streams from the `issued`-th operation
    /// on, and if `host` not from its host either.
    pub(crate) fn leave(&self, issued: u64, host: bool, how: &str) {
        self.board.leave(self.group, self.rank(), issued, host, how);
        self.link.leave(self.group, &self.members, self.rank(), issued, host, how);
    }

    /// The failure, as the error of this operation.
    pub(crate) fn check(&self, op: &Op<'_>) -> Result<()> {
        match self.board.failure() {
            Some(cause) => Err(cause.error_in(self.rank(), op)),
            None => Ok(()),
        }
    }
}

/// Deadlines beyond this are cut to it, so that adding them to the clock cannot overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// An operation that has been issued and must be performed. Dropped unperformed (its stream has
/// failed, or is gone), it tells the peers that this rank will never come.
pub(crate) struct Ticket {
    seat: Arc<Seat>,
    index: u64,
    performed: AtomicBool,
}

impl Ticket {
    pub(crate) fn new(seat: Arc<Seat>, index: u64) -> Self {
        Self { seat, index, performed: AtomicBool::new(false) }
    }

    pub(crate) fn perform(
        &self,
        op: &Op<'_>,
        message: Message,
    ) -> Result<Vec<Arc<Message>>, Error> {
        self.performed.store(true, Ordering::Relaxed);
        self.seat.round(Lane::Stream, self.index, op, message)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.performed.load(Ordering::Relaxed) {
            self.seat.leave(self.index, false, "stopped because an earlier operation failed there");
        }
    }
}
