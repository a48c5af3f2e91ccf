//! A rank's place in a family of groups whose contributions travel over a link.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gather8_kernels::cpu::Cpu;

use crate::communicator::Communicator;
use crate::control::{Control, HostControl};
use crate::host::board::Board;
use crate::host::group::HostGroup;
use crate::host::seat::{Link, Seat};
use crate::solo::Solo;

/// The control group's number; communicators count from 1.
pub(crate) const CONTROL: u64 = 0;

/// See the module.
pub(crate) struct HostWorld {
    rank: u32,
    board: Arc<Board>,
    link: Arc<dyn Link>,
    members: Arc<[u32]>,
    groups: AtomicU64,
}

impl HostWorld {
    pub(crate) fn new(rank: u32, world: u32, board: Arc<Board>, link: Arc<dyn Link>) -> Self {
        let groups = AtomicU64::new(CONTROL + 1);
        Self { rank, board, link, members: (0..world).collect(), groups }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    pub(crate) fn world(&self) -> u32 {
        self.members.len() as u32
    }

    /// A communicator of all ranks; every rank makes as many, in the same order.
    pub(crate) fn communicator(&self, cpu: Cpu) -> Arc<dyn Communicator<Cpu>> {
        if self.world() == 1 {
            return Arc::new(Solo::new(cpu));
        }
        let group = self.groups.fetch_add(1, Ordering::Relaxed);
        Arc::new(HostGroup::new(self.seat(group), cpu))
    }

    pub(crate) fn control(&self) -> Arc<dyn Control> {
        Arc::new(HostControl::new(self.seat(CONTROL)))
    }

    fn seat(&self, group: u64) -> Seat {
        Seat {
            board: Arc::clone(&self.board),
            link: Arc::clone(&self.link),
            group,
            members: Arc::clone(&self.members),
            position: self.rank as usize,
        }
    }
}
