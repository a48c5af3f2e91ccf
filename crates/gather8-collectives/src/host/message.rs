//! What one rank contributes to one operation.

use std::fmt;
use std::sync::Arc;

use crate::communicator::{Op, Reduce};

/// What is done, with everything in which ranks must agree but the lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllGather,
    ReduceScatter(Reduce),
    AllReduce(Reduce),
    Broadcast(u32),
    Barrier,
    Exchange,
    Split,
}

impl Kind {
    /// Host messages may differ in length.
    fn free_length(self) -> bool {
        matches!(self, Self::Exchange | Self::Split)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllGather => f.write_str("all-gather"),
            Self::ReduceScatter(reduce) => write!(f, "reduce-scatter {reduce:?}"),
            Self::AllReduce(reduce) => write!(f, "all-reduce {reduce:?}"),
            Self::Broadcast(root) => write!(f, "broadcast from {root}"),
            Self::Barrier => f.write_str("barrier"),
            Self::Exchange => f.write_str("exchange"),
            Self::Split => f.write_str("split"),
        }
    }
}

/// What precedes the bytes: enough to tell whether ranks are in the same operation, and to say how
/// they differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Bytes of each part as passed: the sources of gathers and reduce-scatters.
    pub(crate) lengths: Vec<u64>,
    pub(crate) name: String,
    pub(crate) unit: String,
    pub(crate) sequence: u64,
}

impl Header {
    pub(crate) fn new(kind: Kind, op: &Op<'_>, lengths: Vec<u64>) -> Self {
        Self {
            kind,
            lengths,
            name: op.name.to_owned(),
            unit: op.unit.to_owned(),
            sequence: op.sequence,
        }
    }

    fn agrees(&self, other: &Self) -> bool {
        self.kind == other.kind && (self.kind.free_length() || self.lengths == other.lengths)
    }
}

/// The bytes for each rank of the group.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    /// Every rank gets the same bytes.
    Same(Arc<Vec<u8>>),
    /// The r-th entry is for rank r.
    Each(Arc<Vec<Vec<u8>>>),
}

impl Payload {
    pub(crate) fn empty() -> Self {
        Self::Same(Arc::default())
    }

    pub(crate) fn for_rank(&self, position: usize) -> &[u8] {
        match self {
            Self::Same(bytes) => bytes,
            Self::Each(pieces) => pieces.get(position).map_or(&[], Vec::as_slice),
        }
    }
}

/// One rank's contribution.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) payload: Payload,
}

/// What the ranks passed, if they do not agree. The text is the same on every rank.
pub(crate) fn difference(members: &[u32], messages: &[Arc<Message>]) -> Option<String> {
    let first = messages.first()?;
    if messages.iter().all(|message| message.header.agrees(&first.header)) {
        return None;
    }
    let part = messages.iter().find_map(|message| first_part(&first.header, &message.header));
    let said = members.iter().zip(messages).map(|(rank, message)| {
        let header = &message.header;
        let length = part.and_then(|part| header.lengths.get(part).map(|length| (part, length)));
        let lengths = match length {
            Some((part, length)) if header.lengths.len() > 1 => {
                format!("{} parts, part {part} of {length} bytes", header.lengths.len())
            }
            Some((_, length)) => format!("{length} bytes"),
            None => format!("{} parts", header.lengths.len()),
        };
        format!("rank {rank} passed {} of `{}` ({lengths})", header.kind, header.unit)
    });
    Some(format!(
        "at {} #{}, {}",
        first.header.name,
        first.header.sequence,
        said.collect::<Vec<_>>().join(", ")
    ))
}

/// The first part whose length differs; part 0 if the difference lies elsewhere.
fn first_part(a: &Header, b: &Header) -> Option<usize> {
    if a.agrees(b) {
        return None;
    }
    Some(a.lengths.iter().zip(&b.lengths).position(|(x, y)| x != y).unwrap_or(0))
}
