//! For tests of order: a stream that is held back, an operation that comes late, waits that are
//! left out.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::driver::sys;

use super::core::lock;
use super::handles::StreamInner;
use super::{Cuda, Stream};
use crate::error::{Error, Result};

/// What [`Cuda::begin_trial`] does to the operations that follow.
#[derive(Clone, Debug, Default)]
pub struct Trial {
    late: Option<(u64, Duration)>,
    left_out: Option<&'static str>,
}

impl Trial {
    /// Only counts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Holds the stream back for `time` before the operation with this number, from 0.
    pub fn late(mut self, operation: u64, time: Duration) -> Self {
        self.late = Some((operation, time));
        self
    }

    /// Leaves out the waits with this id, as the CPU backend's
    /// [`drop_wait`](crate::cpu::Builder::drop_wait) does; here nothing notices but the bytes.
    pub fn without_wait(mut self, id: &'static str) -> Self {
        self.left_out = Some(id);
        self
    }
}

/// What a trial has seen.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Seen {
    /// Operations issued: passes, copies, fills, uploads, downloads, and collectives that announced
    /// themselves. Events and waits are none.
    pub operations: u64,
    /// The operation that came late, and its stream.
    pub late: Option<String>,
    /// The ids of all waits, each once, in the order of first use.
    pub waits: Vec<&'static str>,
}

/// Looks at every operation while there is a trial.
#[derive(Default)]
pub(super) struct Observer {
    active: AtomicBool,
    running: Mutex<(Trial, Seen)>,
}

impl Observer {
    /// Notes a wait; true if it must not be issued.
    pub(super) fn leaves_out(&self, id: &'static str) -> bool {
        if !self.active.load(Ordering::Acquire) {
            return false;
        }
        let mut running = lock(&self.running);
        let (trial, seen) = &mut *running;
        if !seen.waits.contains(&id) {
            seen.waits.push(id);
        }
        trial.left_out == Some(id)
    }

    /// Counts an operation; how long it must be held back, if it must.
    fn count(&self, operation: impl FnOnce() -> String) -> Option<Duration> {
        if !self.active.load(Ordering::Acquire) {
            return None;
        }
        let mut running = lock(&self.running);
        let (trial, seen) = &mut *running;
        let number = seen.operations;
        seen.operations += 1;
        let (late, time) = trial.late?;
        if late != number {
            return None;
        }
        seen.late = Some(operation());
        Some(time)
    }
}

impl Cuda {
    /// Holds a stream back: what is issued on it from now on runs after `time`, during which one
    /// thread of the device spins. For tests.
    ///
    /// # Errors
    /// [`Error::Job`] for more than 10 s; what an earlier operation failed with.
    pub fn delay(&self, on: &Stream, time: Duration) -> Result<()> {
        self.0.enter()?;
        let stream = self.own_stream(on)?;
        self.spin(stream, time)
    }

    fn spin(&self, stream: &StreamInner, time: Duration) -> Result<()> {
        if time > Duration::from_secs(10) {
            return Err(Error::Job {
                pass: "delay",
                problem: format!("{time:?} is longer than the 10 s that are allowed"),
            });
        }
        let (kernel, function) = self.0.function("delay")?;
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(0);
        let mut arguments = [std::ptr::from_ref(&nanoseconds).cast_mut().cast()];
        // SAFETY: a kernel of this context and its one argument, which the driver copies during
        // the call.
        let code = unsafe {
            sys::cuLaunchKernel(
                function.0,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream.raw.0,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.0.check(kernel, code)
    }

    /// Starts a trial, which ends with [`end_trial`](Self::end_trial) or with the next one. For
    /// tests of order: a run in which one operation comes late, whichever it is, must give the same
    /// bytes.
    pub fn begin_trial(&self, trial: Trial) {
        *lock(&self.0.observer.running) = (trial, Seen::default());
        self.0.observer.active.store(true, Ordering::Release);
    }

    /// Ends the trial; what it has seen.
    pub fn end_trial(&self) -> Seen {
        self.0.observer.active.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.0.observer.running)).1
    }

    /// Tells a trial, if there is one, that an operation of another library, such as a collective,
    /// is about to be issued on the stream; it may be held back.
    ///
    /// # Errors
    /// What an earlier operation failed with.
    pub fn announce(&self, operation: &str, on: &Stream) -> Result<()> {
        self.0.enter()?;
        self.observe(|| operation.to_owned(), self.own_stream(on)?)
    }

    /// To be called before every operation, with the context current.
    pub(super) fn observe(
        &self,
        operation: impl FnOnce() -> String,
        on: &StreamInner,
    ) -> Result<()> {
        let named = || format!("{} on stream `{}`", operation(), on.name);
        match self.0.observer.count(named) {
            Some(time) => self.spin(on, time),
            None => Ok(()),
        }
    }
}
