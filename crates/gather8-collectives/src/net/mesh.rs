//! A connection between every two ranks, served by one thread.
//!
//! Contributions go to writers, one per peer, through queues that never make an issuing thread
//! wait; readers put what comes onto the board. A connection that ends without a farewell is a lost
//! rank.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender, WeakUnboundedSender};
use tokio::task::JoinSet;

use crate::host::board::{Board, Cause, Place};
use crate::host::message::{Message, Payload};
use crate::host::seat::Link;
use crate::net::wire::{self, Head};

/// After a connection has ended, how long another rank's news may take to say why.
const NEWS: Duration = Duration::from_millis(100);
/// How long the last messages may take when a rank ends.
const FAREWELL: Duration = Duration::from_secs(2);
/// Payloads up to this are sent together with their head.
const SMALL: usize = 16 * 1024;

/// A message on its way to one peer.
struct Parcel {
    head: Vec<u8>,
    /// The payload, and the peer's place in it.
    payload: Option<(Payload, usize)>,
}

/// What the peers have answered to questions.
#[derive(Default)]
struct Answers {
    given: Mutex<BTreeMap<(u64, u32), Vec<u32>>>,
    came: Condvar,
}

/// See the module. Dropped, it says farewell to the peers and ends its thread.
pub(crate) struct Mesh {
    rank: u32,
    senders: BTreeMap<u32, UnboundedSender<Parcel>>,
    answers: Arc<Answers>,
    questions: AtomicU64,
    thread: Option<JoinHandle<()>>,
    ended: Mutex<std::sync::mpsc::Receiver<()>>,
}

/// The queues' far ends, for the thread that serves them.
pub(crate) struct Queues {
    rank: u32,
    weak: BTreeMap<u32, WeakUnboundedSender<Parcel>>,
    receivers: BTreeMap<u32, UnboundedReceiver<Parcel>>,
    answers: Arc<Answers>,
    _ended: std::sync::mpsc::SyncSender<()>,
}

impl Mesh {
    /// Queues to all peers; the second part goes to [`serve`] on the connections' thread.
    pub(crate) fn new(rank: u32, world: u32) -> (Self, Queues) {
        let mut senders = BTreeMap::new();
        let mut receivers = BTreeMap::new();
        for peer in (0..world).filter(|peer| *peer != rank) {
            let (sender, receiver) = mpsc::unbounded_channel();
            senders.insert(peer, sender);
            receivers.insert(peer, receiver);
        }
        let weak = senders.iter().map(|(peer, sender)| (*peer, sender.downgrade())).collect();
        let answers = Arc::new(Answers::default());
        let (alive, ended) = std::sync::mpsc::sync_channel(1);
        let mesh = Self {
            rank,
            senders,
            answers: Arc::clone(&answers),
            questions: AtomicU64::new(0),
            thread: None,
            ended: Mutex::new(ended),
        };
        (mesh, Queues { rank, weak, receivers, answers, _ended: alive })
    }

    /// The thread that ends with the mesh.
    pub(crate) fn own(&mut self, thread: JoinHandle<()>) {
        self.thread = Some(thread);
    }

    fn tell(&self, peer: u32, head: &Head) {
        if let Some(sender) = self.senders.get(&peer) {
            // A peer whose writer has ended is lost, which the board knows.
            let _ = sender.send(Parcel { head: wire::encode(head, 0), payload: None });
        }
    }
}

impl Link for Mesh {
    fn send(&self, place: Place, members: &[u32], rank: u32, message: &Arc<Message>) {
        for (position, peer) in members.iter().enumerate().filter(|(_, peer)| **peer != rank) {
            let Some(sender) = self.senders.get(peer) else { continue };
            let length = message.payload.for_rank(position).len() as u64;
            let head = Head::Contribution(place, message.header.clone());
            let head = wire::encode(&head, length);
            let payload = Some((message.payload.clone(), position));
            let _ = sender.send(Parcel { head, payload });
        }
    }

    fn announce(&self, cause: &Cause) {
        let head = Head::Fail(cause.clone());
        self.senders.keys().for_each(|&peer| self.tell(peer, &head));
    }

    fn leave(&self, group: u64, members: &[u32], rank: u32, issued: u64, how: &str) {
        let head = Head::Leave { group, issued, how: how.to_owned() };
        members.iter().filter(|peer| **peer != rank).for_each(|&peer| self.tell(peer, &head));
    }

    fn report(&self, text: &str) {
        let head = Head::Report(text.to_owned());
        self.senders.keys().for_each(|&peer| self.tell(peer, &head));
    }

    fn waits_for(&self, board: &Board, ranks: &[u32], until: Instant) -> BTreeMap<u32, Vec<u32>> {
        let number = self.questions.fetch_add(1, Ordering::Relaxed);
        let mut waits = BTreeMap::new();
        for &rank in ranks {
            if rank == self.rank {
                waits.insert(rank, board.waits_for(rank));
            } else {
                self.tell(rank, &Head::Ask(number));
            }
        }
        let mut given = self.answers.given.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            for &rank in ranks {
                if let Some(answer) = given.remove(&(number, rank)) {
                    waits.insert(rank, answer);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || ranks.iter().all(|rank| waits.contains_key(rank)) {
                break;
            }
            let waited = self.answers.came.wait_timeout(given, left);
            given = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        waits.retain(|_, others| !others.is_empty());
        waits
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // The writers send what is queued, then a farewell, and end; with them the thread.
        self.senders.clear();
        let Some(thread) = self.thread.take() else { return };
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let over = ended.recv_timeout(FAREWELL + Duration::from_secs(1));
        if over != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = thread.join();
        }
    }
}

/// Serves the connections until the mesh is dropped.
pub(crate) async fn serve(queues: Queues, links: BTreeMap<u32, TcpStream>, board: Arc<Board>) {
    let Queues { rank, weak, mut receivers, answers, _ended } = queues;
    let weak = Arc::new(weak);
    let mut writers = JoinSet::new();
    let mut readers = JoinSet::new();
    for (peer, stream) in links {
        let Some(queue) = receivers.remove(&peer) else { continue };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(peer, %error, "messages to this peer may be delayed");
        }
        let (read, write) = stream.into_split();
        writers.spawn(send_all(queue, write));
        let reader = Reader {
            rank,
            peer,
            board: Arc::clone(&board),
            answers: Arc::clone(&answers),
            peers: Arc::clone(&weak),
        };
        readers.spawn(reader.receive_all(read));
    }
    while writers.join_next().await.is_some() {}
    // Readers end with the runtime: nobody is left to read for.
}

async fn send_all(mut queue: UnboundedReceiver<Parcel>, mut write: OwnedWriteHalf) {
    while let Some(parcel) = queue.recv().await {
        if send(&mut write, parcel).await.is_err() {
            // The reader of this connection sees its end and says so.
            return;
        }
        if queue.is_closed() && queue.is_empty() {
            break;
        }
    }
    let farewell = async {
        write.write_all(&wire::encode(&Head::Bye, 0)).await?;
        write.shutdown().await
    };
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
}

async fn send(write: &mut OwnedWriteHalf, parcel: Parcel) -> std::io::Result<()> {
    let Parcel { mut head, payload } = parcel;
    let body = payload.as_ref().map_or(&[][..], |(payload, position)| payload.for_rank(*position));
    if body.len() <= SMALL {
        head.extend_from_slice(body);
        return write.write_all(&head).await;
    }
    write.write_all(&head).await?;
    write.write_all(body).await
}

/// Puts what a peer sends onto the board.
struct Reader {
    rank: u32,
    peer: u32,
    board: Arc<Board>,
    answers: Arc<Answers>,
    peers: Arc<BTreeMap<u32, WeakUnboundedSender<Parcel>>>,
}

impl Reader {
    async fn receive_all(self, read: OwnedReadHalf) {
        let mut read = tokio::io::BufReader::with_capacity(64 * 1024, read);
        let how = loop {
            match wire::read(&mut read).await {
                Ok((Head::Bye, _)) => return self.board.end(self.peer, "left"),
                Ok((head, payload)) => {
                    if !self.take(head, payload) {
                        break "sent something that no rank sends".to_owned();
                    }
                }
                Err(error) => break ending(&error),
            }
        };
        // If another rank's loss has led to this one, its news are on the way.
        tokio::time::sleep(NEWS).await;
        let (cause, new) = self.board.fail(Cause::Lost { rank: self.peer, how });
        if new {
            tracing::warn!(rank = self.rank, peer = self.peer, ?cause, "a rank is lost");
            self.peers.keys().for_each(|&peer| self.tell(peer, &Head::Fail(cause.clone())));
        }
    }

    /// False for what a rank does not send after the rendezvous.
    fn take(&self, head: Head, payload: Vec<u8>) -> bool {
        match head {
            Head::Contribution(place, header) => {
                let payload = Payload::Same(Arc::new(payload));
                self.board.post(place, self.peer, Arc::new(Message { header, payload }));
            }
            Head::Fail(cause) => {
                self.board.fail(cause);
            }
            Head::Leave { group, issued, how } => self.board.leave(group, self.peer, issued, &how),
            Head::Ask(number) => {
                self.tell(self.peer, &Head::Waits(number, self.board.waits_for(self.rank)));
            }
            Head::Waits(number, ranks) => {
                let mut given = self.answers.given.lock().unwrap_or_else(PoisonError::into_inner);
                given.insert((number, self.peer), ranks);
                self.answers.came.notify_all();
            }
            Head::Report(text) => self.board.report(self.peer, &text),
            Head::Bye | Head::Table { .. } | Head::Refused(_) => return false,
        }
        true
    }

    fn tell(&self, peer: u32, head: &Head) {
        let sender = self.peers.get(&peer).and_then(WeakUnboundedSender::upgrade);
        if let Some(sender) = sender {
            let _ = sender.send(Parcel { head: wire::encode(head, 0), payload: None });
        }
    }
}

/// How a connection ended, in a peer's sentence: "rank 2 …".
fn ending(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "was killed or crashed (its connection closed)".to_owned()
        }
        ErrorKind::InvalidData => format!("sent {error}"),
        _ => format!("was lost ({error})"),
    }
}
