//! A connection between every two ranks, served by one thread.
//!
//! Contributions go to writers, one per peer, through queues that never make an issuing thread
//! wait; readers put what comes onto the board. A connection that ends without a farewell is a lost
//! rank.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender, WeakUnboundedSender};
use tokio::task::JoinSet;

use crate::host::board::Cause;
use crate::net::post::{Carrier, Inbox, Parcel, Taken};
use crate::net::wire::{self, Head};

/// After a connection has ended, how long another rank's news may take to say why.
const NEWS: Duration = Duration::from_millis(100);
/// How long the last messages may take when a rank ends.
const FAREWELL: Duration = Duration::from_secs(2);
/// Payloads up to this are sent together with their head.
const SMALL: usize = 16 * 1024;

/// See the module. Dropped, it says farewell to the peers and ends its thread.
pub(crate) struct Mesh {
    senders: BTreeMap<u32, UnboundedSender<Parcel>>,
    thread: Option<JoinHandle<()>>,
    ended: Mutex<std::sync::mpsc::Receiver<()>>,
}

/// The queues' far ends, for the thread that serves them.
pub(crate) struct Queues {
    weak: BTreeMap<u32, WeakUnboundedSender<Parcel>>,
    receivers: BTreeMap<u32, UnboundedReceiver<Parcel>>,
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
        let (alive, ended) = std::sync::mpsc::sync_channel(1);
        let mesh = Self { senders, thread: None, ended: Mutex::new(ended) };
        (mesh, Queues { weak, receivers, _ended: alive })
    }

    /// The thread that ends with the mesh.
    pub(crate) fn own(&mut self, thread: JoinHandle<()>) {
        self.thread = Some(thread);
    }
}

impl Carrier for Mesh {
    fn peers(&self) -> Vec<u32> {
        self.senders.keys().copied().collect()
    }

    fn send(&self, to: u32, parcel: Parcel) {
        if let Some(sender) = self.senders.get(&to) {
            // Only a peer whose connection has ended takes no more.
            let _ = sender.send(parcel);
        }
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
pub(crate) async fn serve(queues: Queues, links: BTreeMap<u32, TcpStream>, inbox: Inbox) {
    let Queues { weak, mut receivers, _ended } = queues;
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
        let reader = Reader { peer, inbox: inbox.clone(), peers: Arc::clone(&weak) };
        readers.spawn(reader.receive_all(read));
    }
    while writers.join_next().await.is_some() {}
    // Readers end with the runtime: nobody is left to read for.
}

async fn send_all(mut queue: UnboundedReceiver<Parcel>, mut write: OwnedWriteHalf) {
    while let Some(parcel) = queue.recv().await {
        if send(&mut write, parcel).await.is_err() {
            // The reader of this connection sees its end and says so, in a while: when the last
            // writer ends, so do the readers.
            while queue.recv().await.is_some() {}
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

async fn send(write: &mut OwnedWriteHalf, mut parcel: Parcel) -> std::io::Result<()> {
    if parcel.body().len() <= SMALL {
        let mut bytes = std::mem::take(&mut parcel.head);
        bytes.extend_from_slice(parcel.body());
        return write.write_all(&bytes).await;
    }
    write.write_all(&parcel.head).await?;
    write.write_all(parcel.body()).await
}

/// Puts what a peer sends onto the board.
struct Reader {
    peer: u32,
    inbox: Inbox,
    peers: Arc<BTreeMap<u32, WeakUnboundedSender<Parcel>>>,
}

impl Reader {
    async fn receive_all(self, read: OwnedReadHalf) {
        let mut read = tokio::io::BufReader::with_capacity(64 * 1024, read);
        let how = loop {
            match wire::read(&mut read).await {
                Ok((head, payload)) => {
                    match self.inbox.take(self.peer, head, payload, |head| self.tell_all(&head)) {
                        Taken::Done => {}
                        Taken::Answer(answer) => self.tell(self.peer, &answer),
                        Taken::Farewell => return,
                        Taken::Strange => break "sent something that no rank sends".to_owned(),
                    }
                }
                Err(error) => break ending(&error),
            }
        };
        // If another rank's loss has led to this one, its news are on the way.
        tokio::time::sleep(NEWS).await;
        self.inbox.board.fail(Cause::Lost { rank: self.peer, how }, |cause| {
            tracing::debug!(rank = self.inbox.rank, peer = self.peer, ?cause, "a rank is lost");
            self.tell_all(&Head::Fail(cause.clone()));
        });
    }

    fn tell_all(&self, head: &Head) {
        self.peers.keys().for_each(|&peer| self.tell(peer, head));
    }

    fn tell(&self, peer: u32, head: &Head) {
        let sender = self.peers.get(&peer).and_then(WeakUnboundedSender::upgrade);
        if let Some(sender) = sender {
            let _ = sender.send(Parcel::of(head));
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::host::board::Board;
    use crate::net::post::Answers;

    /// A world of 2, where no third rank brings the news: the writer to the lost peer fails before
    /// the reader has told the board.
    #[test]
    fn a_lost_peer_is_named_however_much_is_sent_to_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let (mut mesh, queues) = Mesh::new(0, 2);
        let board = Arc::new(Board::new(false));
        let inbox =
            Inbox { rank: 0, board: Arc::clone(&board), answers: Arc::new(Answers::default()) };
        mesh.own(std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                own.set_nonblocking(true).unwrap();
                let link = TcpStream::from_std(own).unwrap();
                serve(queues, BTreeMap::from([(1, link)]), inbox).await;
            });
        }));
        let say = || mesh.send(1, Parcel::of(&Head::Report("still here".to_owned())));
        // Unread bytes make the end a reset, as a killed process's.
        say();
        peer.peek(&mut [0]).unwrap();
        drop(peer);
        let lost = Instant::now();
        while board.failure().is_none() {
            assert!(lost.elapsed() < Duration::from_secs(5), "nobody says that the peer is lost");
            say();
            std::thread::sleep(Duration::from_millis(1));
        }
        let Some(Cause::Lost { rank: 1, how }) = board.failure() else { panic!("another cause") };
        assert_eq!(how, "was killed or crashed (its connection closed)");
    }
}
