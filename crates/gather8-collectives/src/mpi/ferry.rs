//! The thread that carries messages over one MPI communicator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::failed;
use super::requests::{Channel, Request};
use crate::error::Result;
use crate::host::board::Cause;
use crate::net::post::{Carrier, Inbox, Parcel, Taken};
use crate::net::wire::{self, Head};

/// How long the thread sleeps when nothing has moved for a while.
const IDLE: Duration = Duration::from_micros(50);
/// Rounds without news before it sleeps.
const BUSY_ROUNDS: u32 = 100;
/// How long the last messages may take when a rank ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// The near end. Dropped, it says farewell to the peers and ends its thread.
pub(super) struct Ferry {
    peers: Vec<u32>,
    queue: Option<Sender<(u32, Parcel)>>,
    thread: Option<JoinHandle<()>>,
    ended: Mutex<Receiver<()>>,
    broken: Arc<AtomicBool>,
}

impl Ferry {
    /// Starts the thread. `broken` is set if requests are left unfinished.
    pub(super) fn start(comm: Channel, inbox: Inbox, broken: Arc<AtomicBool>) -> Result<Self> {
        let peers = (0..comm.world).filter(|peer| *peer != comm.rank).collect::<Vec<_>>();
        let (queue, parcels) = channel();
        let (alive, ended) = channel();
        let flag = Arc::clone(&broken);
        let others = peers.clone();
        let thread = std::thread::Builder::new()
            .name(format!("gather8-mpi-{}", comm.rank))
            .spawn(move || {
                let _alive = alive;
                let mut crossing = Crossing {
                    comm,
                    inbox,
                    parcels,
                    peers: others,
                    sends: Vec::new(),
                    arriving: BTreeMap::new(),
                    gone: BTreeSet::new(),
                };
                if !crossing.run() {
                    flag.store(true, Ordering::Release);
                }
            })
            .map_err(|error| failed(&format!("no thread for it ({error})")))?;
        let (queue, thread) = (Some(queue), Some(thread));
        Ok(Self { peers, queue, thread, ended: Mutex::new(ended), broken })
    }
}

impl Carrier for Ferry {
    fn peers(&self) -> Vec<u32> {
        self.peers.clone()
    }

    fn send(&self, to: u32, parcel: Parcel) {
        if let Some(queue) = &self.queue {
            // A thread that has ended has failed, which the board knows.
            let _ = queue.send((to, parcel));
        }
    }
}

impl Drop for Ferry {
    fn drop(&mut self) {
        self.queue = None;
        let Some(thread) = self.thread.take() else { return };
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(FAREWELL + Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
            self.broken.store(true, Ordering::Release);
        } else {
            let _ = thread.join();
        }
    }
}

/// The thread's own.
struct Crossing {
    comm: Channel,
    inbox: Inbox,
    parcels: Receiver<(u32, Parcel)>,
    peers: Vec<u32>,
    sends: Vec<Request>,
    /// Messages that are arriving, by sender, in the order in which they were sent.
    arriving: BTreeMap<u32, VecDeque<Request>>,
    /// Peers that have said farewell.
    gone: BTreeSet<u32>,
}

impl Crossing {
    /// Carries messages until the near end is dropped, then says farewell. False if requests are
    /// left unfinished.
    fn run(&mut self) -> bool {
        if let Err(error) = self.carry() {
            self.fail(&error.to_string());
            return false;
        }
        let late = matches!(self.inbox.board.failure(), Some(Cause::Late { .. }));
        self.say_farewell().unwrap_or(false) && !late
    }

    fn carry(&mut self) -> Result<()> {
        let mut quiet = 0;
        loop {
            let open = self.send_queued()?;
            if !open {
                return Ok(());
            }
            if self.advance()? {
                quiet = 0;
            } else {
                quiet += 1;
                if quiet < BUSY_ROUNDS {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep(IDLE);
                }
            }
        }
    }

    /// Starts to send what is queued; false when the near end is gone.
    fn send_queued(&mut self) -> Result<bool> {
        loop {
            match self.parcels.try_recv() {
                Ok((to, parcel)) => self.send(to, parcel)?,
                Err(TryRecvError::Empty) => return Ok(true),
                Err(TryRecvError::Disconnected) => return Ok(false),
            }
        }
    }

    fn send(&mut self, to: u32, mut parcel: Parcel) -> Result<()> {
        let mut bytes = std::mem::take(&mut parcel.head);
        bytes.extend_from_slice(parcel.body());
        self.sends.push(self.comm.send(to, bytes)?);
        Ok(())
    }

    /// One round over everything under way; true if something moved.
    fn advance(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut still = Vec::with_capacity(self.sends.len());
        for mut send in self.sends.drain(..) {
            if send.is_done()? {
                moved = true;
            } else {
                still.push(send);
            }
        }
        self.sends = still;
        while let Some((from, request)) = self.comm.receive()? {
            self.arriving.entry(from).or_default().push_back(request);
            moved = true;
        }
        let mut messages = Vec::new();
        for (&from, requests) in &mut self.arriving {
            while let Some(first) = requests.front_mut() {
                if !first.is_done()? {
                    break;
                }
                messages.extend(requests.pop_front().map(|request| (from, request.into_bytes())));
            }
        }
        moved |= !messages.is_empty();
        for (from, bytes) in messages {
            self.take(from, bytes)?;
        }
        Ok(moved)
    }

    fn take(&mut self, from: u32, bytes: Vec<u8>) -> Result<()> {
        // This thread sends everything, so nothing of this rank's overtakes the news.
        let mut news = None;
        let taken = match wire::parse(bytes) {
            Some((head, payload)) => self.inbox.take(from, head, payload, |head| news = Some(head)),
            None => Taken::Strange,
        };
        match taken {
            Taken::Done => {}
            Taken::Answer(answer) => self.send(from, Parcel::of(&answer))?,
            Taken::Farewell => drop(self.gone.insert(from)),
            Taken::Strange => {
                let how = "sent something that no rank sends".to_owned();
                self.inbox.board.fail(Cause::Lost { rank: from, how }, |cause| {
                    news = Some(Head::Fail(cause.clone()));
                });
            }
        }
        if let Some(news) = news {
            for peer in self.peers.clone() {
                self.send(peer, Parcel::of(&news))?;
            }
        }
        Ok(())
    }

    /// Sends a farewell to all, and waits a little for theirs, so that no message is left between
    /// ranks when MPI is finalized.
    fn say_farewell(&mut self) -> Result<bool> {
        for peer in self.peers.clone() {
            self.send(peer, Parcel::of(&Head::Bye))?;
        }
        let until = Instant::now() + FAREWELL;
        loop {
            let moved = self.advance()?;
            let all_gone = self.gone.len() == self.peers.len();
            if self.sends.is_empty() && all_gone {
                return Ok(true);
            }
            if Instant::now() > until {
                return Ok(self.sends.is_empty());
            }
            if !moved {
                std::thread::sleep(IDLE);
            }
        }
    }

    /// MPI has failed here: nothing of this rank reaches the others any longer.
    fn fail(&mut self, reason: &str) {
        tracing::warn!(rank = self.comm.rank, %reason, "MPI has failed");
        let cause = Cause::Aborted { rank: self.comm.rank, reason: reason.to_owned() };
        let cause = self.inbox.board.fail(cause, |_| {});
        for peer in self.peers.clone() {
            // As far as it still goes.
            let _ = self.send(peer, Parcel::of(&Head::Fail(cause.clone())));
        }
        let _ = self.advance();
    }
}
