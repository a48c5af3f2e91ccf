//! Ranks as MPI processes: a real MPI moves the bytes (feature `mpi`).
//!
//! Each [`Mpi::connect`] duplicates MPI's world communicator and gives it to one thread, which alone
//! sends and receives on it, with requests that it polls. So no call of ours blocks in MPI, and a
//! deadline holds whatever MPI does: requests that a dead peer leaves unfinished are abandoned
//! together with their buffers.
//!
//! Sums are in rank order, as on Local and Tcp, since contributions travel whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::mpi::Threading;
use ::mpi::environment::Universe;
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{AsRaw, Communicator as _};
use gather8_kernels::cpu::Cpu;

use crate::communicator::Communicator;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::host::board::Board;
use crate::host::world::HostWorld;
use crate::net::post::{Inbox, Post};

mod ferry;
mod requests;

use ferry::Ferry;

/// MPI, for this process. Dropped, it finalizes MPI: drop it last, on the thread that made it.
pub struct Mpi {
    world: SimpleCommunicator,
    rank: u32,
    ranks: u32,
    /// A peer was lost, or a thread of ours did not come back: finalizing would wait for ever.
    broken: Arc<AtomicBool>,
    universe: Option<Universe>,
}

impl Mpi {
    /// Initializes MPI, with calls from several threads allowed. Once in a process, before any
    /// other use of MPI there.
    ///
    /// # Errors
    /// [`Error::Mpi`] if MPI is initialized already, or does not allow several threads.
    pub fn init() -> Result<Self> {
        let Some((universe, provided)) = ::mpi::initialize_with_threading(Threading::Multiple)
        else {
            return Err(failed("it is initialized already: initialize it here alone"));
        };
        if provided < Threading::Multiple {
            return Err(failed("this MPI library does not allow calls from several threads"));
        }
        let world = universe.world();
        let number = |value: i32| {
            u32::try_from(value).map_err(|_| failed("it gave this process a negative rank"))
        };
        let (rank, ranks) = (number(world.rank())?, number(world.size())?);
        Ok(Self { world, rank, ranks, broken: Arc::default(), universe: Some(universe) })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks that MPI has started.
    pub fn world(&self) -> u32 {
        self.ranks
    }

    /// A family of communicators of all ranks. Every rank calls it as often as the others; all
    /// wait for each other here.
    ///
    /// # Errors
    /// [`Error::Mpi`] if the others do not call it within the deadline.
    pub fn connect(&self, deadline: Duration) -> Result<MpiWorld> {
        let deadline = deadline.min(Duration::from_secs(365 * 24 * 3600));
        let comm =
            requests::Channel::duplicate(self.world.as_raw(), self.rank, self.ranks, deadline)
                .inspect_err(|_| self.broken.store(true, Ordering::Release))?;
        let board = Arc::new(Board::new(false));
        let answers = Arc::default();
        let inbox =
            Inbox { rank: self.rank, board: Arc::clone(&board), answers: Arc::clone(&answers) };
        let ferry = Ferry::start(comm, inbox, Arc::clone(&self.broken))?;
        let link = Post::new(self.rank, ferry, answers);
        Ok(MpiWorld { inner: HostWorld::new(self.rank, self.ranks, board, Arc::new(link)) })
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        let universe = self.universe.take();
        if self.broken.load(Ordering::Acquire) {
            // MPI_Finalize waits for peers that may be gone. The process is about to end anyway.
            std::mem::forget(universe);
        }
    }
}

/// This process's place in a world of MPI processes.
pub struct MpiWorld {
    inner: HostWorld,
}

impl MpiWorld {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.inner.rank()
    }

    /// Ranks in the world.
    pub fn world(&self) -> u32 {
        self.inner.world()
    }

    /// A communicator of all ranks, on this rank's backend. Every rank makes as many as the
    /// others, in the same order.
    pub fn communicator(&self, cpu: Cpu) -> Arc<dyn Communicator<Cpu>> {
        self.inner.communicator(cpu)
    }

    /// The control connection; make it once.
    pub fn control(&self) -> Arc<dyn Control> {
        self.inner.control()
    }
}

fn failed(problem: &str) -> Error {
    Error::Mpi { problem: problem.to_owned() }
}
