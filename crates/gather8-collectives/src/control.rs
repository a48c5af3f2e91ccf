//! What ranks tell each other beside collectives: how far they are, whether they object, that they
//! have failed. Needs no device, so it works when one hangs.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::communicator::Op;
use crate::error::{Error, Result};
use crate::host::board::{Cause, Lane};
use crate::host::message::{Header, Kind, Message, Payload};
use crate::host::seat::Seat;

/// The control connection of one rank.
pub trait Control: Send + Sync {
    /// This rank.
    fn rank(&self) -> u32;

    /// Ranks in the world.
    fn world(&self) -> u32;

    /// Tells the other ranks, in a line, how this one is; never waits.
    fn report(&self, text: &str);

    /// The last report of each rank, in rank order.
    fn reports(&self) -> Vec<Option<String>>;

    /// Every rank calls it before something that all do or none: with an objection, or without.
    ///
    /// # Errors
    /// [`Error::Vetoed`] with the objection of the lowest rank that has one, on every rank; a lost
    /// peer; a missed deadline.
    fn veto(&self, op: Op<'_>, objection: Option<&str>) -> Result<()>;

    /// Tells every rank that this one has failed; whatever they wait for fails with this reason.
    fn announce(&self, failure: &str);

    /// Fails if a rank has announced a failure or is lost; never waits.
    ///
    /// # Errors
    /// What happened.
    fn check(&self) -> Result<()>;
}

/// Control over a board, in one process or between several.
pub(crate) struct HostControl {
    seat: Seat,
    rounds: AtomicU64,
}

impl HostControl {
    pub(crate) fn new(seat: Seat) -> Self {
        Self { seat, rounds: AtomicU64::new(0) }
    }
}

impl Control for HostControl {
    fn rank(&self) -> u32 {
        self.seat.rank()
    }

    fn world(&self) -> u32 {
        self.seat.members.len() as u32
    }

    fn report(&self, text: &str) {
        self.seat.board.report(self.seat.rank(), text);
        self.seat.link.report(text);
    }

    fn reports(&self) -> Vec<Option<String>> {
        self.seat.board.reports(&self.seat.members)
    }

    fn veto(&self, op: Op<'_>, objection: Option<&str>) -> Result<()> {
        let bytes = match objection {
            Some(text) => [&[1], text.as_bytes()].concat(),
            None => vec![0],
        };
        let index = self.rounds.fetch_add(1, Ordering::Relaxed);
        let header = Header::new(Kind::Exchange, &op, vec![bytes.len() as u64]);
        let payload = Payload::Same(std::sync::Arc::new(bytes));
        let messages = self.seat.round(Lane::Host, index, &op, Message { header, payload })?;
        for (&rank, message) in self.seat.members.iter().zip(&messages) {
            if let [1, text @ ..] = message.payload.for_rank(self.seat.position) {
                let reason = String::from_utf8_lossy(text).into_owned();
                return Err(Error::Vetoed { rank, reason });
            }
        }
        Ok(())
    }

    fn announce(&self, failure: &str) {
        self.seat.fail(Cause::Aborted { rank: self.seat.rank(), reason: failure.to_owned() });
    }

    fn check(&self) -> Result<()> {
        let sequence = self.rounds.load(Ordering::Relaxed);
        let deadline = std::time::Duration::ZERO;
        self.seat.check(&Op { sequence, name: "operation", unit: "control", deadline })
    }
}

impl Drop for HostControl {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.seat.fail(Cause::Lost { rank: self.seat.rank(), how: "panicked".to_owned() });
        }
        self.seat.leave(self.rounds.load(Ordering::Relaxed), true, "left");
    }
}
