//! Ranks as threads of one process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use gather8_kernels::cpu::Cpu;

use crate::communicator::Communicator;
use crate::control::{Control, HostControl};
use crate::error::{Error, Result};
use crate::host::board::{Board, Cause, Place};
use crate::host::group::HostGroup;
use crate::host::message::Message;
use crate::host::seat::{Link, Seat};
use crate::host::world::CONTROL;
use crate::solo::Solo;

/// A world's group number; what is split from it gets others.
const WORLD: u64 = CONTROL + 1;

/// A world of ranks that are threads of this process. Make it once, then give each thread its
/// [`rank`](Self::rank).
///
/// A thread that panics, returns early (dropping its communicator) or falls behind a deadline makes
/// the operations of all others fail with an error that names it.
pub struct LocalWorld {
    board: Arc<Board>,
    members: Arc<[u32]>,
    /// Who has been given out: by group and rank.
    taken: Mutex<BTreeSet<(u64, u32)>>,
}

impl LocalWorld {
    /// A world of this many ranks.
    pub fn new(world: u32) -> Self {
        Self {
            board: Arc::new(Board::new(true)),
            members: (0..world).collect(),
            taken: Mutex::default(),
        }
    }

    /// Ranks in the world.
    pub fn world(&self) -> u32 {
        self.members.len() as u32
    }

    /// Rank `rank`'s communicator, whose operations run on that rank's own backend. Take each rank
    /// once.
    ///
    /// # Errors
    /// [`Error::Usage`] if the world has no such rank, or it has been taken.
    pub fn rank(&self, rank: u32, cpu: Cpu) -> Result<Arc<dyn Communicator<Cpu>>> {
        let seat = self.seat(rank, WORLD)?;
        Ok(if self.world() == 1 {
            Arc::new(Solo::new(cpu))
        } else {
            Arc::new(HostGroup::new(seat, cpu))
        })
    }

    /// Rank `rank`'s control connection. Take each once.
    ///
    /// # Errors
    /// [`Error::Usage`] if the world has no such rank, or it has been taken.
    pub fn control(&self, rank: u32) -> Result<Arc<dyn Control>> {
        Ok(Arc::new(HostControl::new(self.seat(rank, CONTROL)?)))
    }

    fn seat(&self, rank: u32, group: u64) -> Result<Seat> {
        let refuse = |problem: String| Error::Usage {
            operation: "rank".to_owned(),
            unit: "local world".to_owned(),
            problem,
        };
        if rank >= self.world() {
            return Err(refuse(format!("there is no rank {rank} in a world of {}", self.world())));
        }
        // Two threads as one rank would take each other's messages.
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if !taken.insert((group, rank)) {
            return Err(refuse(format!("rank {rank} has been taken: each is one thread's")));
        }
        Ok(Seat {
            board: Arc::clone(&self.board),
            link: Arc::new(SharedBoard),
            group,
            members: Arc::clone(&self.members),
            position: rank as usize,
        })
    }
}

/// All ranks read the same board, so nothing need be sent.
struct SharedBoard;

impl Link for SharedBoard {
    fn send(&self, _: Place, _: &[u32], _: u32, _: &Arc<Message>) {}

    fn announce(&self, _: &Cause) {}

    fn leave(&self, _: u64, _: &[u32], _: u32, _: u64, _: bool, _: &str) {}

    fn report(&self, _: &str) {}

    fn waits_for(&self, board: &Board, ranks: &[u32], _: Instant) -> BTreeMap<u32, Vec<u32>> {
        let waits = ranks.iter().map(|&rank| (rank, board.waits_for(rank)));
        waits.filter(|(_, others)| !others.is_empty()).collect()
    }
}
