//! The handles of streams and events.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use crate::error::{Error, Result};

use super::clock::Clock;
use super::failure::Failure;
use super::graph::Captured;
use super::lane::{Lane, Pauses, Progress, on_worker};

/// A queue of operations and the thread that works it off. Clones are the same stream; when the
/// last is dropped, what has been issued is still done, then the thread ends and is joined.
#[derive(Clone)]
pub struct Stream(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) owner: u64,
    pub(super) number: usize,
    pub(super) name: Arc<str>,
    /// Locked only by who holds the backend's ledger.
    pub(super) issued: Mutex<Issued>,
    pub(super) lane: Arc<Lane>,
    thread: Option<JoinHandle<()>>,
}

/// What has been issued on a stream.
#[derive(Default)]
pub(super) struct Issued {
    /// Number of operations.
    pub(super) tick: u64,
    /// What the next operation comes after, the stream's own earlier operations included.
    pub(super) clock: Clock,
}

impl Stream {
    pub(super) fn start(
        device: &str,
        owner: u64,
        number: usize,
        name: &str,
        failure: Arc<Failure>,
        pauses: Option<Pauses>,
    ) -> Result<Self> {
        let lane = Arc::new(Lane::new());
        let worker = Arc::clone(&lane);
        // A thread's name must not hold a zero byte.
        let thread = thread::Builder::new()
            .name(name.replace('\0', " "))
            .spawn(move || worker.work(&failure, pauses))
            .map_err(|e| Error::Device {
                device: device.to_owned(),
                what: format!("starting the thread of stream `{name}`"),
                reason: format!("{e}; raise the limit on threads or use fewer ranks"),
            })?;
        Ok(Self(Arc::new(Inner {
            owner,
            number,
            name: Arc::from(name),
            issued: Mutex::default(),
            lane,
            thread: Some(thread),
        })))
    }

    /// The name that it was made with.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream(`{}`)", self.0.name)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.lane.close();
        // An operation may hold the last handle of its own stream, or of one that waits for its
        // own; then the thread ends by itself.
        if let Some(thread) = self.thread.take()
            && !on_worker()
        {
            let _ = thread.join();
        }
    }
}

/// A point in a stream.
#[derive(Clone)]
pub struct Event(pub(super) Arc<Point>);

pub(super) struct Point {
    pub(super) owner: u64,
    pub(super) stream: usize,
    pub(super) tick: u64,
    /// Everything that comes before, on all streams.
    pub(super) clock: Clock,
    pub(super) progress: Arc<Progress>,
    /// Set if it was recorded while a graph was captured.
    pub(super) captured: Option<Captured>,
}

impl Event {
    /// True if the point has been passed; never, of an event of a capture.
    pub fn is_done(&self) -> bool {
        self.0.progress.is_done(self.0.tick)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event(operation {} of stream {})", self.0.tick, self.0.stream)
    }
}

/// Refuses to block the thread of a stream.
pub(super) fn may_block(device: &str, what: &str) -> Result<()> {
    if on_worker() {
        return Err(Error::Device {
            device: device.to_owned(),
            what: what.to_owned(),
            reason: "an operation on a stream cannot wait for streams: order it with an event before it is issued"
                .to_owned(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    /// Compiles only if handles may be shared among threads.
    #[test]
    fn handles_are_shared_freely() {
        fn shared<T: Send + Sync + Clone + 'static>() {}
        shared::<super::Stream>();
        shared::<super::Event>();
        shared::<crate::cpu::Cpu>();
    }
}
