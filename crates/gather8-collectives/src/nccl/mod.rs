//! Collectives between GPUs through NCCL (feature `cuda`).
//!
//! [`NcclWorld::join`] starts NCCL over ranks that already know each other on the host: a
//! [`TcpWorld`](crate::TcpWorld) carries the id by which NCCL's ranks find each other, small
//! messages, barriers and the news of lost peers, none of which needs a device.
//!
//! Rules that this module keeps (tried with NCCL 2.28):
//!
//! - The parent communicator does not wait in its calls, so joining and splitting have deadlines;
//!   it carries no collectives, because it enqueues them on a thread of its own and an event that
//!   is recorded afterwards could come before them. Collectives run on children that enqueue
//!   before they return.
//! - All calls that enqueue are made under one lock, in the caller's order, which is the same on
//!   every rank. `NCCL_LAUNCH_ORDER_IMPLICIT=1` is set before the library is opened, so that
//!   communicators launch in that order too.
//! - A watchdog thread looks at the peers, at NCCL and at every operation's deadline. On a failure
//!   it aborts all communicators, which frees the streams, and the backend's later calls return
//!   the error. A live captured graph that holds collectives keeps the abort from ending, so
//!   destroy graphs before the world; an abort that does not end is left to itself after 20 s.

mod communicator;
mod library;
mod world;

use std::sync::Arc;
use std::time::Duration;

use gather8_kernels::cpu::Cpu;
use gather8_kernels::cuda::Cuda;

use crate::communicator::Communicator;
use crate::control::Control;
use crate::error::Result;

pub use communicator::NcclCommunicator;
pub use library::NCCL_VARIABLE;

/// How NCCL is started.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NcclOptions {
    /// How long joining and each split may take: 120 s by default.
    pub deadline: Duration,
    /// For tests: several ranks may share one GPU, which NCCL allows only between different hosts,
    /// so each rank gives itself another host's name. Slow: bytes go through sockets.
    pub share_gpu: bool,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(120), share_gpu: false }
    }
}

/// Looks for NCCL: the path or name that it was opened by, and its version, such as `2.28.3`.
///
/// # Errors
/// NCCL that is missing, with every name tried and what to install, or lacks a function.
pub fn probe() -> Result<(String, String)> {
    let nccl = library::Nccl::open()?;
    Ok((nccl.path().to_owned(), nccl.version()))
}

/// Starting NCCL.
#[derive(Debug)]
pub struct NcclWorld;

impl NcclWorld {
    /// Joins NCCL's world on this rank's GPU; every rank of `host` calls it. The communicator that
    /// it returns covers all ranks; make one per purpose with
    /// [`split`](Communicator::split).
    ///
    /// Sets environment variables for NCCL, so call it before other threads of the program call
    /// into C code that reads the environment.
    ///
    /// # Errors
    /// NCCL that is missing, with every name tried, or lacks a function; peers that do not join
    /// within the deadline.
    pub fn join(
        cuda: Cuda,
        host: Arc<dyn Communicator<Cpu>>,
        control: Arc<dyn Control>,
        options: &NcclOptions,
    ) -> Result<Arc<dyn Communicator<Cuda>>> {
        set("NCCL_LAUNCH_ORDER_IMPLICIT", "1");
        if options.share_gpu {
            set("NCCL_HOSTID", &format!("gather8-rank-{}", host.rank()));
        }
        cuda.bind_to_thread()?;
        let nccl = library::Nccl::open()?;
        tracing::info!(path = nccl.path(), version = nccl.version(), "NCCL");
        start(nccl, cuda, host, control, |world| NcclCommunicator::root(world, options.deadline))
    }

    /// The same over a host program's communicator (an `ncclComm_t`), which may be one whose calls
    /// wait for the peers. It is only split: collectives run on children of it, which are made,
    /// aborted and ended here, while the communicator itself stays the host program's, is never
    /// aborted, and may be used and ended as before. What the children do after a failure does not
    /// touch it.
    ///
    /// The ranks of `host` are those of the communicator, in the same order; every rank calls this.
    /// Only `deadline` of the options counts. Several communicators are in flight at once, so start
    /// NCCL with `NCCL_LAUNCH_ORDER_IMPLICIT=1` in the environment, which makes the order of the
    /// calls the order of the launches; without it a warning is logged.
    ///
    /// # Safety
    /// `comm` is a live communicator of the NCCL that this process has loaded (as `libnccl.so.2`, in
    /// the program itself, or as `GATHER8_NCCL` names it), on the device of `cuda`. It must live, and
    /// no other thread may call NCCL with it, during this call and during each
    /// [`split`](Communicator::split) of the communicator that this returns.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) if ranks or device disagree; no NCCL that is loaded, or
    /// one that lacks a function; peers that do not come within the deadline: the call that waits
    /// for them is then left to itself on a thread of its own.
    pub unsafe fn from_raw(
        comm: *mut std::ffi::c_void,
        cuda: Cuda,
        host: Arc<dyn Communicator<Cpu>>,
        control: Arc<dyn Control>,
        options: &NcclOptions,
    ) -> Result<Arc<dyn Communicator<Cuda>>> {
        if std::env::var("NCCL_LAUNCH_ORDER_IMPLICIT").as_deref() != Ok("1") {
            tracing::warn!(
                "a communicator was lent by a program without NCCL_LAUNCH_ORDER_IMPLICIT=1: \
                 collectives of several communicators may wait for each other"
            );
        }
        cuda.bind_to_thread()?;
        #[cfg(unix)]
        let nccl = library::Nccl::loaded()?;
        #[cfg(not(unix))]
        let nccl = library::Nccl::open()?;
        start(nccl, cuda, host, control, |world| {
            let parent = world.borrow(comm)?;
            NcclCommunicator::over(world, parent, options.deadline)
        })
    }
}

/// Starts the watchdog, then the communicator of all ranks.
fn start(
    nccl: library::Nccl,
    cuda: Cuda,
    host: Arc<dyn Communicator<Cpu>>,
    control: Arc<dyn Control>,
    root: impl FnOnce(&Arc<world::World>) -> Result<NcclCommunicator>,
) -> Result<Arc<dyn Communicator<Cuda>>> {
    let world = Arc::new(world::World::new(nccl, cuda, host, control));
    world.serve().map_err(|error| library::refused(&format!("no watchdog thread: {error}")))?;
    let root = root(&world).inspect_err(|error| {
        world.fail(error.clone());
        world.end();
    })?;
    Ok(Arc::new(root))
}

/// Sets a variable that the user has not set.
fn set(name: &str, value: &str) {
    if std::env::var_os(name).is_none() {
        // SAFETY: Rust's own readers are locked out; `join` says what else must not run.
        unsafe { std::env::set_var(name, value) };
    }
}
