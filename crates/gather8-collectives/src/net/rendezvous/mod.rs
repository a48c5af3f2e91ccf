//! How the ranks of a job find each other: all come to rank 0, which lets them in and tells
//! everybody where everybody listens; then each calls those before it.

mod host;
mod judge;
mod visit;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::error::{Error, Result};

/// How long the others' news may take beyond the deadline.
const MARGIN: Duration = Duration::from_secs(5);

/// Where the ranks meet, and by which token.
#[derive(Clone, Debug)]
pub(crate) enum Venue {
    /// Through a file on this host.
    #[cfg(unix)]
    File { path: std::path::PathBuf, port: Option<u16>, job: String },
    /// At an address that every rank knows, with a token that every rank knows.
    Network { host: String, port: u16, token: Vec<u8> },
}

/// Who comes.
#[derive(Clone, Debug)]
pub(crate) struct Party {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) job: [u8; 32],
    pub(crate) deadline: Instant,
    /// The deadline as it was given, for errors.
    pub(crate) patience: Duration,
}

/// Connections with every other rank.
pub(crate) struct Met {
    pub(crate) links: BTreeMap<u32, TcpStream>,
    pub(crate) addresses: Vec<SocketAddr>,
    /// What keeps the job's name taken, on rank 0 of one that meets on one host; to be held for
    /// [`HELD`], so that late-comers of another job with that name learn of it.
    pub(crate) held: Option<Box<dyn Send>>,
}

/// How long a job's name stays taken after its ranks have met.
pub(crate) const HELD: Duration = Duration::from_secs(3);

/// Brings the ranks together.
///
/// # Errors
/// [`Error::Rendezvous`] at the deadline, naming the ranks that did not come; long before it if ranks
/// that know the token do not fit together.
pub(crate) async fn meet(party: &Party, venue: &Venue) -> Result<Met> {
    if party.rank == 0 { host::host(party, venue).await } else { visit::visit(party, venue).await }
}

async fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let mut found = tokio::net::lookup_host((host, port))
        .await
        .map_err(|error| failed(format!("host `{host}` is not known ({error})")))?;
    found.next().ok_or_else(|| failed(format!("host `{host}` has no address")))
}

fn ranks(list: &[u32]) -> String {
    let numbers = list.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    format!("{} {numbers}", if list.len() == 1 { "rank" } else { "ranks" })
}

fn failed(problem: String) -> Error {
    Error::Rendezvous { problem }
}
