//! Ranks as processes, over TCP.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gather8_kernels::cpu::Cpu;

use crate::communicator::Communicator;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::host::board::Board;
use crate::host::world::HostWorld;
use crate::launch::Launch;
use crate::net::mesh::{self, Mesh};
use crate::net::post::{Inbox, Post};
use crate::net::proof::{LONGEST_TOKEN, SHORTEST_TOKEN};
use crate::net::rendezvous::{self, HELD, Met, Party, Venue};

/// A secret that the ranks of a job on several hosts share. Never printed.
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl Token {
    /// 16 to 1024 bytes.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] for another length.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if !(SHORTEST_TOKEN..=LONGEST_TOKEN).contains(&bytes.len()) {
            return Err(failed(format!(
                "a token has {SHORTEST_TOKEN} to {LONGEST_TOKEN} bytes, not {}",
                bytes.len()
            )));
        }
        Ok(Self(bytes))
    }

    /// From `GATHER8_TOKEN`, or the file that `GATHER8_TOKEN_FILE` names (white space at the end
    /// does not count); `None` if neither is set.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] if the file cannot be read or the token has a wrong length.
    pub fn from_env() -> Result<Option<Self>> {
        if let Some(token) = std::env::var_os("GATHER8_TOKEN").filter(|token| !token.is_empty()) {
            return Self::new(token.into_encoded_bytes()).map(Some);
        }
        let Some(path) = std::env::var_os("GATHER8_TOKEN_FILE").filter(|path| !path.is_empty())
        else {
            return Ok(None);
        };
        let path = PathBuf::from(path);
        let read = || -> std::io::Result<Vec<u8>> {
            use std::io::Read as _;
            let mut bytes = Vec::new();
            let limit = 2 * LONGEST_TOKEN as u64;
            std::fs::File::open(&path)?.take(limit).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|error| {
            failed(format!("GATHER8_TOKEN_FILE {} cannot be read ({error})", path.display()))
        })?;
        Self::new(bytes.trim_ascii_end()).map(Some)
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// How ranks come together.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JoinOptions {
    /// How long the ranks may take to find each other: 60 s by default.
    pub deadline: Duration,
    /// For ranks on several hosts.
    pub token: Option<Token>,
    /// Where the file lies by which ranks of one host meet; by default in `XDG_RUNTIME_DIR` or the
    /// temporary folder.
    pub directory: Option<PathBuf>,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(60), token: None, directory: None }
    }
}

impl JoinOptions {
    /// The defaults, with the token of the environment.
    ///
    /// # Errors
    /// As [`Token::from_env`].
    pub fn from_env() -> Result<Self> {
        Ok(Self { token: Token::from_env()?, ..Self::default() })
    }
}

/// This process's place in a world of processes, each connected with every other.
///
/// One thread serves the connections, on a runtime of its own. It ends, with a farewell to the
/// peers, when this value and every communicator made from it are dropped.
pub struct TcpWorld {
    inner: HostWorld,
    addresses: Vec<SocketAddr>,
}

impl TcpWorld {
    /// Meets the other ranks: through a file if all are on this host, else at the launch's meeting
    /// place, with a token. A world of 1 opens nothing.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] naming the ranks that did not come, or what keeps this one out;
    /// several hosts without a token.
    pub fn join(launch: &Launch, options: &JoinOptions) -> Result<Self> {
        let board = Arc::new(Board::new(false));
        let answers = Arc::default();
        let (mesh, addresses) = if launch.world == 1 {
            (Mesh::new(0, 1).0, Vec::new())
        } else {
            let (board, answers) = (Arc::clone(&board), Arc::clone(&answers));
            connect(launch, options, Inbox { rank: launch.rank, board, answers })?
        };
        let link = Post::new(launch.rank, mesh, answers);
        let inner = HostWorld::new(launch.rank, launch.world, board, Arc::new(link));
        Ok(Self { inner, addresses })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.inner.rank()
    }

    /// Ranks in the world.
    pub fn world(&self) -> u32 {
        self.inner.world()
    }

    /// Where each rank listened while the ranks met; empty in a world of 1.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
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

/// Starts the connections' thread and waits until the ranks have met.
fn connect(
    launch: &Launch,
    options: &JoinOptions,
    inbox: Inbox,
) -> Result<(Mesh, Vec<SocketAddr>)> {
    let venue = venue(launch, options)?;
    let deadline = tokio::time::Instant::from_std(
        Instant::now() + options.deadline.min(Duration::from_secs(365 * 24 * 3600)),
    );
    let party = Party {
        rank: launch.rank,
        world: launch.world,
        job: *blake3::hash(launch.job.as_bytes()).as_bytes(),
        deadline,
        patience: options.deadline,
    };
    let (mut mesh, queues) = Mesh::new(launch.rank, launch.world);
    let (report, reported) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new()
        .name(format!("gather8-net-{}", launch.rank))
        .spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = report.send(Err(failed(format!("no event loop ({error})"))));
                    return;
                }
            };
            runtime.block_on(async {
                match rendezvous::meet(&party, &venue).await {
                    Ok(Met { links, addresses, held }) => {
                        let _ = report.send(Ok(addresses));
                        // Ends with the runtime, if not before.
                        tokio::spawn(async move {
                            tokio::time::sleep(HELD).await;
                            drop(held);
                        });
                        mesh::serve(queues, links, inbox).await;
                    }
                    Err(error) => drop(report.send(Err(error))),
                }
            });
            // Name look-ups may hang in threads of the runtime's own.
            runtime.shutdown_background();
        })
        .map_err(|error| failed(format!("no thread for the connections ({error})")))?;
    mesh.own(thread);
    let addresses = reported
        .recv()
        .unwrap_or_else(|_| Err(failed("the connections' thread has ended".to_owned())))?;
    Ok((mesh, addresses))
}

fn venue(launch: &Launch, options: &JoinOptions) -> Result<Venue> {
    let Some(meeting) = &launch.meeting else { return file(launch, options) };
    if let Some(token) = &options.token {
        return Ok(Venue::Network {
            host: meeting.host.clone(),
            port: meeting.port,
            token: token.0.clone(),
        });
    }
    let loopback = meeting.host == "localhost"
        || meeting.host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if loopback {
        return file(launch, options);
    }
    Err(failed(format!(
        "ranks that meet at {}:{} need a token: set GATHER8_TOKEN or GATHER8_TOKEN_FILE to the same {SHORTEST_TOKEN} bytes or more on every host",
        meeting.host, meeting.port
    )))
}

#[cfg(unix)]
fn file(launch: &Launch, options: &JoinOptions) -> Result<Venue> {
    let port = launch.port.or(launch.meeting.as_ref().map(|meeting| meeting.port));
    let path = crate::net::token::path(options.directory.as_deref(), &launch.job, port)?;
    Ok(Venue::File { path, port, job: launch.job.clone() })
}

#[cfg(not(unix))]
fn file(_: &Launch, _: &JoinOptions) -> Result<Venue> {
    Err(failed("on this system ranks need GATHER8_ADDR and GATHER8_TOKEN".to_owned()))
}

fn failed(problem: String) -> Error {
    Error::Rendezvous { problem }
}
