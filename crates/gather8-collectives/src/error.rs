//! One error enum for the crate.

use std::time::Duration;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between ranks. Cloneable: a communicator that failed gives the same error to
/// every later call.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer is gone.
    #[error("rank {rank} {how} before {operation} #{sequence} of `{unit}`")]
    PeerLost {
        /// The peer.
        rank: u32,
        /// What it did: `panicked`, `left`, `was killed`, ...
        how: String,
        /// The operation that this rank waits in.
        operation: String,
        /// Its sequence number.
        sequence: u64,
        /// Its unit.
        unit: String,
    },
    /// Peers did not arrive in time.
    #[error(
        "rank {} did not arrive at {operation} #{sequence} of `{unit}` within {:.1} s", ranks_list(.ranks), .deadline.as_secs_f64()
    )]
    Deadline {
        /// Who is missing.
        ranks: Vec<u32>,
        /// The operation.
        operation: String,
        /// Its sequence number.
        sequence: u64,
        /// Its unit.
        unit: String,
        /// How long this rank waited.
        deadline: Duration,
    },
    /// Ranks issued different operations.
    #[error("the ranks have issued different operations: {difference}")]
    Disordered {
        /// The first difference, naming ranks, operations and units.
        difference: String,
    },
    /// Lengths do not fit.
    #[error("{operation} of `{unit}`, part {part}: {problem}")]
    Length {
        /// The operation.
        operation: String,
        /// Its unit.
        unit: String,
        /// The part's number.
        part: usize,
        /// The lengths.
        problem: String,
    },
    /// The communicator was aborted on this rank.
    #[error("aborted: {reason}")]
    Aborted {
        /// The reason given.
        reason: String,
    },
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] gather8_kernels::Error),
}

fn ranks_list(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

impl Error {
    /// The first rank that the error blames, if it blames one.
    pub fn blamed_rank(&self) -> Option<u32> {
        match self {
            Self::PeerLost { rank, .. } => Some(*rank),
            Self::Deadline { ranks, .. } => ranks.first().copied(),
            _ => None,
        }
    }

    /// Looks through a backend's error for what a collective on its stream failed with.
    pub fn from_backend(error: gather8_kernels::Error) -> Self {
        if let gather8_kernels::Error::Stream { source, .. } = &error
            && let Some(inner) = source.downcast_ref::<Self>()
        {
            return inner.clone();
        }
        Self::Backend(error)
    }
}
