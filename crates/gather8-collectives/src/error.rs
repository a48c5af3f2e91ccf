//! One error enum for the crate.

use std::time::Duration;

use crate::communicator::Op;

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
    /// A sync found weights that hold a NaN or an infinity. Scales and rings are as they were.
    #[error(
        "the amax of {} is not finite: {} holds a NaN or an infinity on some rank; scales are unchanged. Start from finite weights (a checkpoint's), or repair these and acknowledge", names_list(.names), if .names.len() == 1 { "the weight" } else { "each" }
    )]
    NonFiniteWeights {
        /// Every such weight, in the table's order.
        names: Vec<String>,
    },
    /// A saved table, or a slot that was asked for, does not fit this table.
    #[error("amax table: {problem}")]
    Table {
        /// What does not fit.
        problem: String,
    },
    /// A communicator was asked for something that no group can do.
    #[error("{operation} of `{unit}`: {problem}")]
    Usage {
        /// The operation.
        operation: String,
        /// Its unit.
        unit: String,
        /// What is wrong with the call.
        problem: String,
    },
    /// A rank objected to what all were about to do.
    #[error("rank {rank} objects: {reason}")]
    Vetoed {
        /// The lowest rank that objects.
        rank: u32,
        /// Why.
        reason: String,
    },
    /// The environment does not say who this process is.
    #[error("launch: {problem}")]
    Launch {
        /// Which variables say what.
        problem: String,
    },
    /// The ranks did not find each other.
    #[error("rendezvous: {problem}")]
    Rendezvous {
        /// What failed; ranks that are missing.
        problem: String,
    },
    /// MPI said no.
    #[error("MPI: {problem}")]
    Mpi {
        /// What, and to which call.
        problem: String,
    },
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] gather8_kernels::Error),
}

fn ranks_list(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

fn names_list(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

impl Error {
    /// An operation of this name, as the errors give it.
    pub(crate) fn length(op: &Op<'_>, part: usize, problem: String) -> Self {
        Self::Length { operation: op.name.to_owned(), unit: op.unit.to_owned(), part, problem }
    }

    /// The first rank that the error blames, if it blames one.
    pub fn blamed_rank(&self) -> Option<u32> {
        match self {
            Self::PeerLost { rank, .. } | Self::Vetoed { rank, .. } => Some(*rank),
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
