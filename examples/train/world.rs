//! The ranks of this process: all of them, as threads; or one, when a launcher started the others.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use gather8::collectives::stop::Stop;
use gather8::collectives::{Communicator, Control, JoinOptions, Launch, LocalWorld, TcpWorld};
use gather8::kernels::cpu::Cpu;

use crate::options::{Mover, Settings};

/// Who trains beside this process.
pub(crate) enum World {
    /// Nobody: every rank is a thread here.
    Threads(usize, Stop),
    /// Processes that a launcher started, one rank each, and what must outlive their connections.
    Processes { here: Box<Processes>, _library: Library },
}

/// MPI, which is finalized when this is dropped, on the thread that initialized it: so it stays
/// out of what the ranks' threads share.
#[derive(Default)]
pub(crate) struct Library {
    #[cfg(feature = "mpi")]
    mpi: Option<gather8::collectives::mpi::Mpi>,
}

/// This process's place among the others.
pub(crate) struct Processes {
    launch: Launch,
    mover: Moved,
    stop: Stop,
    /// The connection by which a lost peer is noticed; the watch for signals holds it weakly.
    control: Arc<dyn Control>,
    /// The log that last words go into.
    log: Arc<Mutex<Option<PathBuf>>>,
}

/// What moves the bytes.
enum Moved {
    Tcp(TcpWorld),
    #[cfg(feature = "mpi")]
    Mpi(gather8::collectives::mpi::MpiWorld),
}

/// What the ranks of one run talk through.
pub(crate) enum Group<'a> {
    /// Made for the run.
    Threads(LocalWorld),
    /// There for the whole program.
    Processes(&'a Processes),
}

impl World {
    /// Threads, unless the environment names a world of several processes; then meets them.
    ///
    /// # Errors
    /// What keeps the processes from meeting; a way to move bytes that this program was built
    /// without.
    pub(crate) fn join(launch: Launch, settings: &Settings) -> Result<Self> {
        if launch.world == 1 {
            if matches!(settings.communicator, Mover::Mpi) {
                anyhow::bail!(
                    "--communicator mpi moves bytes between processes, and this one was started alone: start the ranks with mpirun, or leave it out"
                );
            }
            // No peer can be lost: the step in progress is finished in any case.
            let stop = Stop::on_sigterm(|| Ok(()), |_| ())?;
            return Ok(Self::Threads(settings.ranks, stop));
        }
        let options = JoinOptions::from_env()?;
        #[cfg_attr(not(feature = "mpi"), expect(unused_mut, reason = "only MPI is a library"))]
        let mut library = Library::default();
        let mover = match settings.communicator {
            Mover::Tcp => Moved::Tcp(TcpWorld::join(&launch, &options)?),
            #[cfg(feature = "mpi")]
            Mover::Mpi => {
                let mpi = library.mpi.insert(gather8::collectives::mpi::Mpi::init()?);
                Moved::Mpi(mpi.connect(options.deadline)?)
            }
            #[cfg(not(feature = "mpi"))]
            Mover::Mpi => anyhow::bail!(
                "--communicator mpi needs a program built with the feature mpi: cargo build \
                 --release --features mpi --example train"
            ),
        };
        let log = Arc::new(Mutex::new(None::<PathBuf>));
        let control = mover.control();
        let watched = Arc::downgrade(&control);
        let (rank, last) = (launch.rank, Arc::clone(&log));
        let check = move || watched.upgrade().map_or(Ok(()), |control| control.check());
        let stop = Stop::on_sigterm(check, move |sentence| {
            let path = last.lock().unwrap_or_else(PoisonError::into_inner).clone();
            say_last(rank, path, sentence);
        })?;
        let here = Box::new(Processes { launch, mover, stop, control, log });
        Ok(Self::Processes { here, _library: library })
    }

    /// The ranks that run here.
    pub(crate) fn own(&self) -> Range<usize> {
        match self {
            Self::Threads(ranks, _) => 0..*ranks,
            Self::Processes { here: processes, .. } => {
                let rank = processes.launch.rank as usize;
                rank..rank + 1
            }
        }
    }

    /// The number in the name of this process's trace; none if all ranks are in one.
    pub(crate) fn trace_number(&self) -> Option<u32> {
        match self {
            Self::Threads(..) => None,
            Self::Processes { here: processes, .. } => Some(processes.launch.rank),
        }
    }

    /// Prepares for a run whose logs go into `folder`.
    ///
    /// # Errors
    /// More ranks than a world can have.
    pub(crate) fn group(&self, folder: &std::path::Path) -> Result<Group<'_>> {
        Ok(match self {
            Self::Threads(ranks, _) => Group::Threads(LocalWorld::new(u32::try_from(*ranks)?)),
            Self::Processes { here: processes, .. } => {
                let path = folder.join(format!("rank-{}.log", processes.launch.rank));
                *processes.log.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
                Group::Processes(processes)
            }
        })
    }

    /// Whether a launcher has told this process to stop.
    pub(crate) fn stop(&self) -> Stop {
        match self {
            Self::Threads(_, stop) => stop.clone(),
            Self::Processes { here: processes, .. } => processes.stop.clone(),
        }
    }
}

impl Moved {
    fn control(&self) -> Arc<dyn Control> {
        match self {
            Self::Tcp(world) => world.control(),
            #[cfg(feature = "mpi")]
            Self::Mpi(world) => world.control(),
        }
    }
}

impl Group<'_> {
    /// Says which of the processes this is, to whom the run's events go: the launcher's variables were
    /// read before anybody listened.
    pub(crate) fn introduce(&self) {
        if let Self::Processes(processes) = self {
            tracing::info!(target: "gather8_collectives::launch", "{}", processes.launch.said());
        }
    }

    /// Tells ranks that are other processes why this one ends.
    pub(crate) fn announce(&self, error: &anyhow::Error) {
        if let Self::Processes(processes) = self {
            processes.control.announce(&format!("{error:#}"));
        }
    }

    /// A rank's communicator for the run.
    ///
    /// # Errors
    /// No such rank.
    pub(crate) fn communicator(&self, rank: usize, cpu: Cpu) -> Result<Arc<dyn Communicator<Cpu>>> {
        Ok(match self {
            Self::Threads(world) => world.rank(u32::try_from(rank)?, cpu)?,
            Self::Processes(processes) => match &processes.mover {
                Moved::Tcp(world) => world.communicator(cpu),
                #[cfg(feature = "mpi")]
                Moved::Mpi(world) => world.communicator(cpu),
            },
        })
    }
}

/// Who this process is, by its environment; how many ranks share this host's cores.
///
/// # Errors
/// Variables of a launcher that are partial or contradict each other.
pub(crate) fn launch() -> Result<(Launch, usize)> {
    let launch = Launch::from_env().context("cannot tell which rank this is")?;
    let local = launch.local_world.unwrap_or(launch.world) as usize;
    Ok((launch, local))
}

/// The sentence of a rank that is about to be ended, where it will be looked for.
fn say_last(rank: u32, log: Option<PathBuf>, sentence: &str) {
    use std::io::Write as _;
    let _ = std::io::stderr().write_all(format!("train: rank {rank}: {sentence}\n").as_bytes());
    let file = log.and_then(|path| std::fs::OpenOptions::new().append(true).open(path).ok());
    if let Some(mut file) = file {
        // The process ends now; there is nobody left to tell.
        let _ = writeln!(file, "ERROR rank {rank}: {sentence}");
    }
}
