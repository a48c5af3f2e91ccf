//! Who knocks at a listener, and who of them knows the token.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use crate::net::handshake::{self, Caller};
use crate::net::proof::{Key, nonce};

/// Connections that may be proving themselves at once; beyond that the oldest goes.
const CROWD: usize = 128;

/// A listener and the callers that are still proving themselves, a bounded crowd.
pub(crate) struct Door<'a> {
    listener: &'a TcpListener,
    key: &'a Key,
    handshakes: JoinSet<()>,
    order: VecDeque<AbortHandle>,
    proved: mpsc::Receiver<Caller<TcpStream>>,
    prove: mpsc::Sender<Caller<TcpStream>>,
}

impl<'a> Door<'a> {
    pub(crate) fn new(listener: &'a TcpListener, key: &'a Key) -> Self {
        let (prove, proved) = mpsc::channel(CROWD);
        Self { listener, key, handshakes: JoinSet::new(), order: VecDeque::new(), proved, prove }
    }

    /// The next caller that knows the token.
    pub(crate) async fn next(&mut self) -> Caller<TcpStream> {
        loop {
            tokio::select! {
                Some(caller) = self.proved.recv() => return caller,
                Some(_) = self.handshakes.join_next(), if !self.handshakes.is_empty() => {
                    self.order.retain(|handle| !handle.is_finished());
                }
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => self.examine(stream),
                    // Out of descriptors, or a caller that is gone already.
                    Err(_) => sleep(Duration::from_millis(5)).await,
                },
            }
        }
    }

    fn examine(&mut self, stream: TcpStream) {
        while self.order.len() >= CROWD {
            if let Some(oldest) = self.order.pop_front() {
                oldest.abort();
            }
        }
        let Ok(nonce) = nonce() else { return };
        let (key, prove) = (self.key.clone(), self.prove.clone());
        let handle = self.handshakes.spawn(async move {
            if let Some(caller) = handshake::accept(stream, &key, &nonce).await {
                let _ = prove.send(caller).await;
            }
        });
        self.order.push_back(handle);
    }
}
