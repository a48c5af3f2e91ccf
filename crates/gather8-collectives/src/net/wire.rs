//! What ranks that know each other send: a length, a head, and for contributions the bytes.
//!
//! ```text
//! u32 head length | u64 payload length | head | payload
//! ```
//! All numbers are little endian; texts are a u16 length and UTF-8. A head is at most 1 MiB; a
//! payload is read as it comes, so that a length alone reserves no memory.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};

use crate::communicator::Reduce;
use crate::host::board::{Cause, Lane, Place};
use crate::host::message::{Header, Kind};

/// The longest head.
pub(crate) const MAX_HEAD: u32 = 1 << 20;
/// The longest payload: 64 GiB.
pub(crate) const MAX_PAYLOAD: u64 = 1 << 36;
/// Bytes before the head.
const PREFIX: usize = 12;
/// What a payload's memory starts with, at most.
const FIRST_RESERVE: u64 = 1 << 20;
/// The longest text; longer ones are cut.
const MAX_TEXT: usize = 4096;

/// One message among ranks, without its payload.
#[derive(Clone, Debug)]
pub(crate) enum Head {
    /// A rank's part in an operation.
    Contribution(Place, Header),
    /// Why the family has failed.
    Fail(Cause),
    /// The sender issues nothing in this group from an operation on.
    Leave { group: u64, issued: u64, host: bool, how: String },
    /// The sender ends in good order.
    Bye,
    /// For whom does the receiver wait?
    Ask(u64),
    /// The answer.
    Waits(u64, Vec<u32>),
    /// Where each rank listens, and the session's nonce.
    Table { session: [u8; 32], addresses: Vec<SocketAddr> },
    /// The rendezvous has failed.
    Refused(String),
    /// What a rank has to say of itself.
    Report(String),
}

/// The bytes of a message up to its payload, which follows.
pub(crate) fn encode(head: &Head, payload: u64) -> Vec<u8> {
    let mut bytes = vec![0; PREFIX];
    match head {
        Head::Contribution(place, header) => {
            bytes.push(1);
            put_place(&mut bytes, place);
            put_header(&mut bytes, header);
        }
        Head::Fail(cause) => {
            bytes.push(2);
            put_cause(&mut bytes, cause);
        }
        Head::Leave { group, issued, host, how } => {
            bytes.push(3);
            bytes.extend(group.to_le_bytes());
            bytes.extend(issued.to_le_bytes());
            bytes.push(u8::from(*host));
            put_text(&mut bytes, how);
        }
        Head::Bye => bytes.push(4),
        Head::Ask(number) => {
            bytes.push(5);
            bytes.extend(number.to_le_bytes());
        }
        Head::Waits(number, ranks) => {
            bytes.push(6);
            bytes.extend(number.to_le_bytes());
            put_ranks(&mut bytes, ranks);
        }
        Head::Table { session, addresses } => {
            bytes.push(7);
            bytes.extend(session);
            bytes.extend((addresses.len() as u32).to_le_bytes());
            addresses.iter().for_each(|address| put_text(&mut bytes, &address.to_string()));
        }
        Head::Refused(reason) => {
            bytes.push(8);
            put_text(&mut bytes, reason);
        }
        Head::Report(text) => {
            bytes.push(9);
            put_text(&mut bytes, text);
        }
    }
    let length = (bytes.len() - PREFIX) as u32;
    let prefix = length.to_le_bytes().into_iter().chain(payload.to_le_bytes());
    bytes.iter_mut().zip(prefix).for_each(|(to, from)| *to = from);
    bytes
}

/// Reads one message; an error for everything that no rank sends.
pub(crate) async fn read(
    stream: &mut (impl AsyncRead + Unpin),
) -> std::io::Result<(Head, Vec<u8>)> {
    let mut prefix = [0; PREFIX];
    stream.read_exact(&mut prefix).await?;
    let (head_len, payload_len) = lengths(&prefix)?;
    let mut head = Vec::new();
    (&mut *stream).take(head_len).read_to_end(&mut head).await?;
    let mut payload = Vec::with_capacity(payload_len.min(FIRST_RESERVE) as usize);
    (&mut *stream).take(payload_len).read_to_end(&mut payload).await?;
    if (head.len() as u64, payload.len() as u64) != (head_len, payload_len) {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let head = decode(&head).ok_or_else(|| invalid("a message that no rank sends"))?;
    Ok((head, payload))
}

/// One message that lies in memory whole; `None` for everything that no rank sends.
#[cfg(feature = "mpi")]
pub(crate) fn parse(mut bytes: Vec<u8>) -> Option<(Head, Vec<u8>)> {
    let (head_len, payload_len) = lengths(bytes.first_chunk()?).ok()?;
    let end = PREFIX + head_len as usize;
    if bytes.len() as u64 != end as u64 + payload_len {
        return None;
    }
    let head = decode(bytes.get(PREFIX..end)?)?;
    bytes.drain(..end);
    Some((head, bytes))
}

fn lengths(prefix: &[u8; PREFIX]) -> std::io::Result<(u64, u64)> {
    let mut rest = Rest(prefix);
    let head = rest.u32().unwrap_or(u32::MAX);
    let payload = rest.u64().unwrap_or(u64::MAX);
    if head > MAX_HEAD || payload > MAX_PAYLOAD {
        return Err(invalid("a message longer than any that a rank sends"));
    }
    Ok((u64::from(head), payload))
}

fn invalid(what: &str) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, what)
}

/// A head from its bytes.
pub(crate) fn decode(bytes: &[u8]) -> Option<Head> {
    let mut rest = Rest(bytes);
    let head = match rest.u8()? {
        1 => Head::Contribution(rest.place()?, rest.header()?),
        2 => Head::Fail(rest.cause()?),
        3 => {
            let (group, issued) = (rest.u64()?, rest.u64()?);
            let host = match rest.u8()? {
                0 => false,
                1 => true,
                _ => return None,
            };
            Head::Leave { group, issued, host, how: rest.text()? }
        }
        4 => Head::Bye,
        5 => Head::Ask(rest.u64()?),
        6 => Head::Waits(rest.u64()?, rest.ranks()?),
        7 => {
            let session = rest.array()?;
            let count = rest.u32()?;
            let addresses = (0..count).map(|_| rest.text()?.parse().ok()).collect::<Option<_>>()?;
            Head::Table { session, addresses }
        }
        8 => Head::Refused(rest.text()?),
        9 => Head::Report(rest.text()?),
        _ => return None,
    };
    rest.0.is_empty().then_some(head)
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let text = text.get(..end).unwrap_or_default();
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put_ranks(bytes: &mut Vec<u8>, ranks: &[u32]) {
    bytes.extend((ranks.len() as u32).to_le_bytes());
    ranks.iter().for_each(|rank| bytes.extend(rank.to_le_bytes()));
}

fn put_place(bytes: &mut Vec<u8>, place: &Place) {
    bytes.extend(place.group.to_le_bytes());
    bytes.push(match place.lane {
        Lane::Stream => 0,
        Lane::Host => 1,
        Lane::Inquest => 2,
    });
    bytes.extend(place.index.to_le_bytes());
}

fn put_header(bytes: &mut Vec<u8>, header: &Header) {
    let (kind, detail) = match header.kind {
        Kind::AllGather => (0, 0),
        Kind::ReduceScatter(reduce) => (1, reduce_number(reduce)),
        Kind::AllReduce(reduce) => (2, reduce_number(reduce)),
        Kind::Broadcast(root) => (3, root),
        Kind::Barrier => (4, 0),
        Kind::Exchange => (5, 0),
        Kind::Split => (6, 0),
    };
    bytes.push(kind);
    bytes.extend(detail.to_le_bytes());
    bytes.extend(header.sequence.to_le_bytes());
    put_text(bytes, &header.name);
    put_text(bytes, &header.unit);
    bytes.extend((header.lengths.len() as u32).to_le_bytes());
    header.lengths.iter().for_each(|length| bytes.extend(length.to_le_bytes()));
}

fn put_cause(bytes: &mut Vec<u8>, cause: &Cause) {
    match cause {
        Cause::Lost { rank, how } => {
            bytes.push(0);
            bytes.extend(rank.to_le_bytes());
            put_text(bytes, how);
        }
        Cause::Aborted { rank, reason } => {
            bytes.push(1);
            bytes.extend(rank.to_le_bytes());
            put_text(bytes, reason);
        }
        Cause::Late { ranks, operation, sequence, unit, deadline } => {
            bytes.push(2);
            put_ranks(bytes, ranks);
            put_text(bytes, operation);
            bytes.extend(sequence.to_le_bytes());
            put_text(bytes, unit);
            let millis = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
            bytes.extend(millis.to_le_bytes());
        }
        Cause::Disordered { difference } => {
            bytes.push(3);
            put_text(bytes, difference);
        }
    }
}

const REDUCES: [Reduce; 4] = [Reduce::MaxU32, Reduce::SumF32, Reduce::SumBf16, Reduce::SumF64];

fn reduce_number(reduce: Reduce) -> u32 {
    REDUCES.iter().position(|known| *known == reduce).unwrap_or_default() as u32
}

/// Bytes yet to be read.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, after) = self.0.split_first_chunk::<N>()?;
        self.0 = after;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A text, fit for an error message.
    fn text(&mut self) -> Option<String> {
        let length = u16::from_le_bytes(self.array()?) as usize;
        let (text, after) = self.0.split_at_checked(length).filter(|_| length <= MAX_TEXT)?;
        self.0 = after;
        let text = std::str::from_utf8(text).ok()?;
        Some(text.chars().map(|c| if c.is_control() { '?' } else { c }).collect())
    }

    fn ranks(&mut self) -> Option<Vec<u32>> {
        let count = self.u32()?;
        (0..count).map(|_| self.u32()).collect()
    }

    fn place(&mut self) -> Option<Place> {
        let group = self.u64()?;
        let lane = match self.u8()? {
            0 => Lane::Stream,
            1 => Lane::Host,
            2 => Lane::Inquest,
            _ => return None,
        };
        Some(Place { group, lane, index: self.u64()? })
    }

    fn header(&mut self) -> Option<Header> {
        let kind = self.u8()?;
        let detail = self.u32()?;
        let reduce = || REDUCES.get(detail as usize).copied();
        let kind = match kind {
            0 => Kind::AllGather,
            1 => Kind::ReduceScatter(reduce()?),
            2 => Kind::AllReduce(reduce()?),
            3 => Kind::Broadcast(detail),
            4 => Kind::Barrier,
            5 => Kind::Exchange,
            6 => Kind::Split,
            _ => return None,
        };
        let sequence = self.u64()?;
        let (name, unit) = (self.text()?, self.text()?);
        let count = self.u32()?;
        let lengths = (0..count).map(|_| self.u64()).collect::<Option<_>>()?;
        Some(Header { kind, lengths, name, unit, sequence })
    }

    fn cause(&mut self) -> Option<Cause> {
        Some(match self.u8()? {
            0 => Cause::Lost { rank: self.u32()?, how: self.text()? },
            1 => Cause::Aborted { rank: self.u32()?, reason: self.text()? },
            2 => Cause::Late {
                ranks: self.ranks()?,
                operation: self.text()?,
                sequence: self.u64()?,
                unit: self.text()?,
                deadline: Duration::from_millis(self.u64()?),
            },
            3 => Cause::Disordered { difference: self.text()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn heads() -> Vec<Head> {
        let place = Place { group: 7, lane: Lane::Host, index: 3 };
        let header = |kind, lengths| Header {
            kind,
            lengths,
            name: "all-gather".into(),
            unit: "block.0".into(),
            sequence: 9,
        };
        let mut heads = vec![
            Head::Contribution(place, header(Kind::AllGather, vec![1, u64::MAX])),
            Head::Contribution(place, header(Kind::Broadcast(3), vec![])),
            Head::Fail(Cause::Lost { rank: 2, how: "panicked".into() }),
            Head::Fail(Cause::Aborted { rank: 2, reason: "why".into() }),
            Head::Fail(Cause::Late {
                ranks: vec![1, 5],
                operation: "barrier".into(),
                sequence: 4,
                unit: "x".into(),
                deadline: Duration::from_millis(1500),
            }),
            Head::Fail(Cause::Disordered { difference: "é".repeat(10) }),
            Head::Leave { group: 1, issued: 2, host: true, how: "left".into() },
            Head::Bye,
            Head::Ask(5),
            Head::Waits(5, vec![0, 9]),
            Head::Table {
                session: [3; 32],
                addresses: vec!["127.0.0.1:80".parse().unwrap(), "[::1]:8".parse().unwrap()],
            },
            Head::Refused("no".into()),
            Head::Report("step 3".into()),
        ];
        for reduce in REDUCES {
            heads.push(Head::Contribution(place, header(Kind::ReduceScatter(reduce), vec![4])));
            heads.push(Head::Contribution(place, header(Kind::AllReduce(reduce), vec![4])));
        }
        heads
    }

    #[test]
    fn heads_come_back_as_they_went() {
        for head in heads() {
            let bytes = encode(&head, 0);
            let back = decode(&bytes[PREFIX..]).unwrap();
            assert_eq!(format!("{head:?}"), format!("{back:?}"));
            // Every cut is refused, and so is a tail.
            for end in PREFIX..bytes.len() {
                assert!(decode(&bytes[PREFIX..end]).is_none(), "{head:?} cut at {end}");
            }
            let longer = [&bytes[PREFIX..], &[0]].concat();
            assert!(decode(&longer).is_none());
        }
    }

    #[test]
    fn huge_lengths_are_refused_without_reserving() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for (head, payload) in [(u32::MAX, 0), (MAX_HEAD + 1, 0), (1, u64::MAX), (1, MAX_PAYLOAD)] {
            let mut bytes = head.to_le_bytes().to_vec();
            bytes.extend(payload.to_le_bytes());
            bytes.push(4);
            let error = runtime.block_on(read(&mut bytes.as_slice())).unwrap_err();
            let expected = if payload == MAX_PAYLOAD {
                ErrorKind::UnexpectedEof
            } else {
                ErrorKind::InvalidData
            };
            assert_eq!(error.kind(), expected);
        }
        // A count in a head is not believed either.
        let mut bytes = vec![6];
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend(u32::MAX.to_le_bytes());
        assert!(decode(&bytes).is_none());
    }

    proptest! {
        #[test]
        fn garbage_is_answered(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 0_u8..12) {
            let _ = decode(&bytes);
            let _ = decode(&[&[kind], bytes.as_slice()].concat());
        }
    }
}
