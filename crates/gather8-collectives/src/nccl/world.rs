//! What the communicators of one rank share: the library, the watchdog, the first failure.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gather8_kernels::cpu::Cpu;
use gather8_kernels::cuda::{Cuda, Event};

use super::library::{Code, Comm, Config, Nccl, UniqueId, refused};
use crate::communicator::{Communicator, Op};
use crate::control::Control;
use crate::error::{Error, Result};

/// How often the watchdog looks.
const TICK: Duration = Duration::from_millis(5);
/// How often it tells the others how far this rank is, and that it is there.
const REPORT: Duration = Duration::from_millis(200);
/// A rank that has not reported for so long has stopped.
const SILENCE: Duration = Duration::from_millis(1200);
/// How long an error of NCCL, which names nobody, waits for news of who is gone.
const INQUEST: Duration = Duration::from_secs(2);
/// How long an abort may take before it is left to itself.
const ABORT_PATIENCE: Duration = Duration::from_secs(20);
/// Marks this module's reports among others.
const REPORT_PREFIX: &str = "nccl issued ";

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A communicator's handle. NCCL allows its use from any thread, one at a time; abort and the
/// question for errors at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(pub(super) Comm);

// SAFETY: see the type.
unsafe impl Send for Handle {}
// SAFETY: see the type; calls that enqueue are made under the world's lock.
unsafe impl Sync for Handle {}

impl Handle {
    /// By a method, so that closures capture the handle whole.
    pub(super) const fn raw(self) -> Comm {
        self.0
    }
}

/// A communicator to split.
#[derive(Clone, Copy)]
pub(super) struct Parent {
    pub(super) handle: Handle,
    /// Whether its calls wait for the peers: a host program's, and our own children.
    pub(super) waits: bool,
}

/// An operation whose end the watchdog waits for.
struct Pending {
    operation: String,
    unit: String,
    sequence: u64,
    deadline: Duration,
    /// Passed when the stream has reached the operation, and when it is over.
    before: Event,
    after: Event,
    reached: Option<Instant>,
}

/// See the module.
pub(super) struct World {
    pub(super) nccl: Nccl,
    pub(super) cuda: Cuda,
    pub(super) host: Arc<dyn Communicator<Cpu>>,
    control: Arc<dyn Control>,
    /// Every communicator that is alive, children after their parents.
    comms: Mutex<Vec<Handle>>,
    pending: Mutex<VecDeque<Pending>>,
    /// Each rank's last report, and since when it stands.
    heard: Mutex<Vec<(Option<String>, Instant)>>,
    /// Operations that this rank has issued, and that are over.
    issued: AtomicU64,
    done: AtomicU64,
    failure: Mutex<Option<Error>>,
    failed: AtomicBool,
    stop: AtomicBool,
    /// Held by every call that enqueues.
    pub(super) issuing: Mutex<()>,
}

impl World {
    pub(super) fn new(
        nccl: Nccl,
        cuda: Cuda,
        host: Arc<dyn Communicator<Cpu>>,
        control: Arc<dyn Control>,
    ) -> Self {
        Self {
            nccl,
            cuda,
            host,
            control,
            comms: Mutex::default(),
            pending: Mutex::default(),
            heard: Mutex::default(),
            issued: AtomicU64::new(0),
            done: AtomicU64::new(0),
            failure: Mutex::default(),
            failed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            issuing: Mutex::new(()),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Makes the parent communicator, whose calls do not wait, so that a missing peer costs no more
    /// than the deadline.
    pub(super) fn init(&self, deadline: Duration) -> Result<Parent> {
        let (rank, world) = (self.host.rank(), self.host.world());
        let op = Op { sequence: 0, name: "start of NCCL", unit: "world", deadline };
        let mut id = UniqueId([0; 128]);
        if rank == 0 {
            // SAFETY: room for an id.
            let code = unsafe { (self.nccl.get_unique_id)(&mut id) };
            self.nccl.check("making an id", std::ptr::null_mut(), code)?;
        }
        let ids = self.host.exchange(op, &id.0)?;
        let first = ids.first().and_then(|id| <[u8; 128]>::try_from(id.as_slice()).ok());
        let id = UniqueId(first.ok_or_else(|| usage(&op, "rank 0 sent no id of NCCL"))?);
        let (size, position) = (world as i32, rank as i32);
        let mut comm = std::ptr::null_mut();
        let config = Config::new(false);
        // SAFETY: room for a handle, the same id on every rank, a configuration of known layout.
        let code = unsafe { (self.nccl.init_rank_config)(&mut comm, size, id, position, &config) };
        self.nccl.check("joining", std::ptr::null_mut(), code)?;
        self.track(Handle(comm));
        self.settle(&op, "joining", comm, Instant::now() + deadline)?;
        Ok(Parent { handle: Handle(comm), waits: false })
    }

    /// A host program's communicator as the parent, if it is of these ranks and this device. It is
    /// not on the list of those that are aborted and ended here.
    pub(super) fn borrow(&self, comm: Comm) -> Result<Parent> {
        let ask = |what, question: unsafe extern "C" fn(Comm, *mut i32) -> Code| {
            let mut answer = -1;
            // SAFETY: a live communicator, as the lender promises; an integer to write to.
            let code = unsafe { question(comm, &mut answer) };
            self.nccl.check(what, comm, code).map(|()| answer)
        };
        let size = ask("asking a lent communicator for its ranks", self.nccl.count)?;
        let rank = ask("asking a lent communicator for this rank", self.nccl.user_rank)?;
        let device = ask("asking a lent communicator for its device", self.nccl.device)?;
        let own = (self.host.world(), self.host.rank(), self.cuda.info().ordinal);
        let lent = [size, rank, device].map(|answer| u32::try_from(answer).ok());
        if lent != [Some(own.0), Some(own.1), Some(own.2)] {
            let op = Op { sequence: 0, name: "lending", unit: "world", deadline: Duration::ZERO };
            return Err(usage(
                &op,
                &format!(
                    "the communicator is rank {rank} of {size} on cuda:{device}, the ranks on the \
                     host and the backend are rank {} of {} on cuda:{}: lend the one of the same \
                     ranks and device",
                    own.1, own.0, own.2
                ),
            ));
        }
        Ok(Parent { handle: Handle(comm), waits: true })
    }

    /// A child of `parent` whose calls return when they have enqueued, so that an event that is
    /// recorded afterwards lies behind them.
    pub(super) fn split(
        &self,
        parent: Parent,
        color: Option<u32>,
        key: u32,
        deadline: Duration,
    ) -> Result<Option<Handle>> {
        const NO_COLOR: i32 = -1;
        let op = Op { sequence: 0, name: "split", unit: "world", deadline };
        let color = color.map_or(Ok(NO_COLOR), i32::try_from);
        let key = i32::try_from(key).map_err(|_| usage(&op, "a key lies below 2^31"))?;
        let color = color.map_err(|_| usage(&op, "a colour lies below 2^31"))?;
        let until = Instant::now() + deadline;
        // NCCL writes the handle later, from a thread of its own.
        let child: &'static AtomicPtr<c_void> = Box::leak(Box::default());
        {
            let _issuing = lock(&self.issuing);
            let call = self.nccl.split;
            let split = move || {
                let config = Box::leak(Box::new(Config::new(true)));
                // SAFETY: a live parent; both boxes are leaked, so that a late write finds them.
                unsafe { call(parent.handle.raw(), color, key, child.as_ptr(), config) }
            };
            let code = if parent.waits { self.aside(&op, until, split)? } else { split() };
            self.nccl.check("splitting", parent.handle.0, code)?;
        }
        self.settle(&op, "splitting", parent.handle.0, until)?;
        if color == NO_COLOR {
            return Ok(None);
        }
        while child.load(Ordering::Acquire).is_null() {
            self.not_late(&op, until)?;
            std::thread::sleep(Duration::from_micros(200));
        }
        let handle = child.load(Ordering::Acquire);
        self.settle(&op, "splitting", handle, until)?;
        self.track(Handle(handle));
        Ok(Some(Handle(handle)))
    }

    /// Runs a call that may wait for ever for a peer on a thread of its own, where it is left to
    /// itself at the deadline.
    fn aside(
        &self,
        op: &Op<'_>,
        until: Instant,
        call: impl FnOnce() -> Code + Send + 'static,
    ) -> Result<Code> {
        let (done, returned) = std::sync::mpsc::channel();
        let cuda = self.cuda.clone();
        std::thread::Builder::new()
            .name("gather8-nccl-split".into())
            .spawn(move || {
                let _ = cuda.bind_to_thread();
                let _ = done.send(call());
            })
            .map_err(|error| refused(&format!("no thread to split on: {error}")))?;
        loop {
            match returned.recv_timeout(TICK) {
                Ok(code) => return Ok(code),
                Err(RecvTimeoutError::Timeout) => self.not_late(op, until)?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(refused("the thread that splits has ended"));
                }
            }
        }
    }

    /// Waits until a communicator has done what it was told.
    fn settle(&self, op: &Op<'_>, what: &str, comm: Comm, until: Instant) -> Result<()> {
        loop {
            let mut state = Code::SUCCESS;
            // SAFETY: a live communicator and room for a code.
            let code = unsafe { (self.nccl.async_error)(comm, &mut state) };
            self.nccl.check(what, comm, code)?;
            self.nccl.check(what, comm, state)?;
            if state == Code::SUCCESS {
                return Ok(());
            }
            self.not_late(op, until)?;
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn not_late(&self, op: &Op<'_>, until: Instant) -> Result<()> {
        self.check()?;
        self.control.check()?;
        if Instant::now() < until {
            return Ok(());
        }
        Err(Error::Deadline {
            ranks: self.laggards(0),
            operation: op.name.to_owned(),
            sequence: op.sequence,
            unit: op.unit.to_owned(),
            deadline: op.deadline,
        })
    }

    fn track(&self, comm: Handle) {
        lock(&self.comms).push(comm);
    }

    /// Hands an operation to the watchdog.
    pub(super) fn watch(&self, op: &Op<'_>, before: Event, after: Event) {
        self.issued.fetch_add(1, Ordering::Relaxed);
        lock(&self.pending).push_back(Pending {
            operation: op.name.to_owned(),
            unit: op.unit.to_owned(),
            sequence: op.sequence,
            deadline: op.deadline,
            before,
            after,
            reached: None,
        });
    }

    /// Fails this rank: every later call returns the error, the peers are told, and everything in
    /// flight is aborted. The first error stays.
    pub(super) fn fail(&self, error: Error) {
        {
            let mut failure = lock(&self.failure);
            if failure.is_some() {
                return;
            }
            *failure = Some(error.clone());
        }
        self.failed.store(true, Ordering::Release);
        let text = error.to_string();
        tracing::error!(error = text, "collectives have failed; aborting NCCL");
        let blamed = error.blamed_rank();
        self.cuda.fail("a collective", Arc::new(error));
        // An announcement names this rank. Where another is to blame, the others find it as this
        // one has: by their connection to it, its silence, or their own deadline.
        if blamed.is_none() {
            self.control.announce(&text);
        }
        self.abort();
    }

    /// Ends what is in flight. A live graph that holds collectives would make this hang, so it has
    /// a deadline of its own.
    fn abort(&self) {
        let comms: Vec<_> = std::mem::take(&mut *lock(&self.comms)).into_iter().rev().collect();
        if comms.is_empty() {
            return;
        }
        let (group_start, group_end, abort) =
            (self.nccl.group_start, self.nccl.group_end, self.nccl.abort);
        let cuda = self.cuda.clone();
        let (ended, end) = std::sync::mpsc::channel();
        let spawned =
            std::thread::Builder::new().name("gather8-nccl-abort".into()).spawn(move || {
                // The group aborts all at once; one after the other takes three times as long.
                let _ = cuda.bind_to_thread();
                // SAFETY: live communicators, taken off the list, so that nobody ends them twice.
                unsafe {
                    group_start();
                    for comm in comms {
                        abort(comm.raw());
                    }
                    group_end();
                }
                let _ = ended.send(());
            });
        if spawned.is_err() || end.recv_timeout(ABORT_PATIENCE).is_err() {
            tracing::error!(
                "NCCL did not abort within {} s: a captured graph with collectives may be alive",
                ABORT_PATIENCE.as_secs()
            );
        }
    }

    /// Notes which reports are new.
    fn listen(&self) {
        let reports = self.control.reports();
        let mut heard = lock(&self.heard);
        heard.resize_with(reports.len(), || (None, Instant::now()));
        for (heard, report) in heard.iter_mut().zip(reports) {
            if heard.0 != report {
                *heard = (report, Instant::now());
            }
        }
    }

    /// Other ranks that have reported before and do so no more.
    fn silent(&self) -> Vec<u32> {
        let own = self.host.rank();
        let silent =
            |heard: &(Option<String>, Instant)| heard.0.is_some() && heard.1.elapsed() >= SILENCE;
        let heard = lock(&self.heard);
        let ranks = (0_u32..).zip(&*heard).filter(|(rank, heard)| *rank != own && silent(heard));
        ranks.map(|(rank, _)| rank).collect()
    }

    /// Who keeps this rank waiting: those that are silent; else those that have issued fewer
    /// operations than this one waits for; all others if none says so.
    fn laggards(&self, least: u64) -> Vec<u32> {
        let silent = self.silent();
        if !silent.is_empty() {
            return silent;
        }
        let own = self.host.rank();
        let issued = |text: &Option<String>| {
            let number = text.as_deref()?.strip_prefix(REPORT_PREFIX)?.split(' ').next()?;
            number.parse::<u64>().ok()
        };
        let late: Vec<u32> = (0_u32..)
            .zip(&self.control.reports())
            .filter(|(rank, report)| *rank != own && issued(report).unwrap_or(0) < least)
            .map(|(rank, _)| rank)
            .collect();
        if !late.is_empty() {
            return late;
        }
        (0..self.host.world()).filter(|&rank| rank != own).collect()
    }

    /// The reason behind an error of NCCL, which sees a connection break before this rank has heard
    /// whose: the lost peer, if news of one comes soon, else the error itself.
    pub(super) fn inquest(&self, error: Error) -> Error {
        let until = Instant::now() + INQUEST;
        while Instant::now() < until {
            self.listen();
            if let Err(error) = self.control.check() {
                return self.named(error);
            }
            if let Some(&rank) = self.silent().first() {
                return self.named(Error::PeerLost {
                    rank,
                    how: "stopped answering".to_owned(),
                    operation: "operation".to_owned(),
                    sequence: 0,
                    unit: "nccl".to_owned(),
                });
            }
            std::thread::sleep(TICK);
        }
        error
    }

    /// The watchdog's thread.
    pub(super) fn serve(self: &Arc<Self>) -> std::io::Result<std::thread::JoinHandle<()>> {
        let world = Arc::downgrade(self);
        std::thread::Builder::new().name(format!("gather8-nccl-{}", self.host.rank())).spawn(
            move || {
                let (mut reported, mut beat) = (Instant::now(), 0_u64);
                while let Some(world) = world.upgrade() {
                    if world.stop.load(Ordering::Acquire) {
                        return;
                    }
                    if world.failed.load(Ordering::Acquire) {
                        lock(&world.pending).clear();
                    } else if let Err(error) = world.look() {
                        world.fail(error);
                    }
                    if reported.elapsed() >= REPORT {
                        reported = Instant::now();
                        let issued = world.issued.load(Ordering::Relaxed);
                        beat += 1;
                        world.control.report(&format!("{REPORT_PREFIX}{issued} beat {beat}"));
                    }
                    drop(world);
                    std::thread::sleep(TICK);
                }
            },
        )
    }

    /// One look: at the peers, at NCCL, at the oldest operations.
    fn look(&self) -> Result<()> {
        self.cuda.bind_to_thread()?;
        if let Err(error) = self.control.check() {
            return Err(self.named(error));
        }
        self.listen();
        if let Err(error) = self.look_at_nccl() {
            return Err(self.inquest(error));
        }
        let mut pending = lock(&self.pending);
        while let Some(oldest) = pending.front_mut() {
            if self.cuda.has_passed(&oldest.after)? {
                self.done.fetch_add(1, Ordering::Relaxed);
                pending.pop_front();
                continue;
            }
            if oldest.reached.is_none() && self.cuda.has_passed(&oldest.before)? {
                oldest.reached = Some(Instant::now());
            }
            let late = oldest.reached.is_some_and(|reached| reached.elapsed() >= oldest.deadline);
            if !late {
                break;
            }
            let least = self.done.load(Ordering::Relaxed) + 1;
            return Err(Error::Deadline {
                ranks: self.laggards(least),
                operation: oldest.operation.clone(),
                sequence: oldest.sequence,
                unit: oldest.unit.clone(),
                deadline: oldest.deadline,
            });
        }
        Ok(())
    }

    fn look_at_nccl(&self) -> Result<()> {
        for comm in lock(&self.comms).iter() {
            let mut state = Code::SUCCESS;
            // SAFETY: a live communicator: the list's lock is held.
            let code = unsafe { (self.nccl.async_error)(comm.0, &mut state) };
            self.nccl.check("an operation in flight", comm.0, code)?;
            self.nccl.check("an operation in flight", comm.0, state)?;
        }
        Ok(())
    }

    /// Puts the operation that this rank waits in into an error of the control connection.
    fn named(&self, error: Error) -> Error {
        let pending = lock(&self.pending);
        match (error, pending.front()) {
            (Error::PeerLost { rank, how, .. }, Some(oldest)) => Error::PeerLost {
                rank,
                how,
                operation: oldest.operation.clone(),
                sequence: oldest.sequence,
                unit: oldest.unit.clone(),
            },
            (error, _) => error,
        }
    }

    /// Ends one communicator that is not needed any more.
    pub(super) fn release(&self, comm: Handle) {
        let mut comms = lock(&self.comms);
        let Some(at) = comms.iter().position(|other| *other == comm) else { return };
        comms.remove(at);
        drop(comms);
        let destroy = self.nccl.destroy;
        let cuda = self.cuda.clone();
        let (ended, end) = std::sync::mpsc::channel();
        let _ = std::thread::Builder::new().name("gather8-nccl-end".into()).spawn(move || {
            let _ = cuda.bind_to_thread();
            // SAFETY: a live communicator, taken off the list, so that nobody ends it twice.
            unsafe { destroy(comm.raw()) };
            let _ = ended.send(());
        });
        let _ = end.recv_timeout(ABORT_PATIENCE);
    }

    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::Release);
    }
}

pub(super) fn usage(op: &Op<'_>, problem: &str) -> Error {
    Error::Usage {
        operation: op.name.to_owned(),
        unit: op.unit.to_owned(),
        problem: problem.to_owned(),
    }
}
