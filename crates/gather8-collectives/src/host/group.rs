//! The communicator of ranks whose streams the host works off.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gather8_kernels::cpu::{Access, Cpu, Views};
use gather8_kernels::{Backend, Span};

use crate::communicator::{AbortHandle, Communicator, Op, Reduce};
use crate::error::{Error, Result};
use crate::host::board::{Cause, Lane};
use crate::host::combine;
use crate::host::message::{Header, Kind, Message, Payload};
use crate::host::seat::{DISORDER, Seat, Ticket, UNRESOLVED};
use crate::shape;

type CpuStream = <Cpu as Backend>::Stream;
/// Why the host's part of an operation failed.
type HostResult<T> = std::result::Result<T, gather8_kernels::Error>;

/// How long a split may take.
const SPLIT_DEADLINE: Duration = Duration::from_secs(60);

/// One rank of a group on the CPU backend.
pub(crate) struct HostGroup {
    seat: Arc<Seat>,
    cpu: Cpu,
    issued: AtomicU64,
    hosted: AtomicU64,
    inquests: AtomicU64,
}

/// An operation's name, kept until its stream reaches it.
struct Named {
    sequence: u64,
    name: String,
    unit: String,
    deadline: Duration,
}

impl Named {
    fn new(op: &Op<'_>) -> Self {
        Self {
            sequence: op.sequence,
            name: op.name.to_owned(),
            unit: op.unit.to_owned(),
            deadline: op.deadline,
        }
    }

    fn op(&self) -> Op<'_> {
        Op { sequence: self.sequence, name: &self.name, unit: &self.unit, deadline: self.deadline }
    }
}

impl HostGroup {
    pub(crate) fn new(seat: Seat, cpu: Cpu) -> Self {
        Self {
            seat: Arc::new(seat),
            cpu,
            issued: AtomicU64::new(0),
            hosted: AtomicU64::new(0),
            inquests: AtomicU64::new(0),
        }
    }

    /// Issues an operation: when the stream reaches it, `pack` reads this rank's contribution, the
    /// ranks exchange, and `unpack` writes what comes of it.
    fn issue(
        &self,
        op: &Op<'_>,
        header: Header,
        accesses: &[Access],
        on: &CpuStream,
        pack: impl FnOnce(&mut Views<'_>) -> HostResult<Payload> + Send + 'static,
        unpack: impl FnOnce(&mut Views<'_>, &[Arc<Message>]) -> HostResult<()> + Send + 'static,
    ) -> Result<()> {
        self.seat.check(op)?;
        let ticket =
            Ticket::new(Arc::clone(&self.seat), self.issued.fetch_add(1, Ordering::Relaxed));
        let named = Named::new(op);
        let label = format!("{} #{} of `{}`", op.name, op.sequence, op.unit);
        let work = move |views: &mut Views<'_>| -> Result<()> {
            let message = Message { header, payload: pack(views)? };
            let messages = ticket.perform(&named.op(), message)?;
            Ok(unpack(views, &messages)?)
        };
        let work = move |views: &mut Views<'_>| {
            work(views)
                .map_err(|error| -> Arc<dyn std::error::Error + Send + Sync> { Arc::new(error) })
        };
        self.cpu.submit(on, &label, accesses, work).map_err(Error::from_backend)
    }

    /// A round among the hosts, on the calling thread.
    fn meet(&self, lane: Lane, op: &Op<'_>, kind: Kind, bytes: &[u8]) -> Result<Vec<Arc<Message>>> {
        let counter = if lane == Lane::Inquest { &self.inquests } else { &self.hosted };
        let header = Header::new(kind, op, vec![bytes.len() as u64]);
        let payload = Payload::Same(Arc::new(bytes.to_vec()));
        let index = counter.fetch_add(1, Ordering::Relaxed);
        self.seat.round(lane, index, op, Message { header, payload })
    }

    fn world_size(&self) -> usize {
        self.seat.members.len()
    }
}

/// The bytes of a span that fits in memory.
fn length(span: &Span<Cpu>) -> usize {
    span.len() as usize
}

impl Communicator<Cpu> for HostGroup {
    fn rank(&self) -> u32 {
        self.seat.position as u32
    }

    fn world(&self) -> u32 {
        self.seat.members.len() as u32
    }

    fn all_gather(
        &self,
        op: Op<'_>,
        parts: &[(Span<Cpu>, Span<Cpu>)],
        on: &CpuStream,
    ) -> Result<()> {
        shape::check_all_gather(&op, self.rank(), self.world(), parts)?;
        // A source inside its destination is declared as part of it. Destinations come first.
        let apart = parts.iter().map(|(source, destination)| !shape::overlap(source, destination));
        let apart = apart.collect::<Vec<_>>();
        let mut accesses = Vec::with_capacity(2 * parts.len());
        for ((_, destination), &apart) in parts.iter().zip(&apart) {
            accesses.push(if apart {
                Access::Write(destination.clone())
            } else {
                Access::ReadWrite(destination.clone())
            });
        }
        let sources = parts.iter().zip(&apart).filter(|(_, apart)| **apart);
        accesses.extend(sources.map(|((source, _), _)| Access::Read(source.clone())));

        let lengths = parts.iter().map(|(source, _)| length(source)).collect::<Vec<_>>();
        let header = Header::new(Kind::AllGather, &op, lengths.iter().map(|&n| n as u64).collect());
        let position = self.seat.position;
        let for_pack = lengths.clone();
        let pack = move |views: &mut Views<'_>| {
            let mut bytes = Vec::with_capacity(for_pack.iter().sum());
            let mut next = for_pack.len();
            for (part, (&length, apart)) in for_pack.iter().zip(apart).enumerate() {
                if apart {
                    bytes.extend_from_slice(views.read(next)?);
                    next += 1;
                } else {
                    let own = position * length..(position + 1) * length;
                    bytes.extend_from_slice(views.write(part)?.get(own).unwrap_or_default());
                }
            }
            Ok(Payload::Same(Arc::new(bytes)))
        };
        let unpack = move |views: &mut Views<'_>, messages: &[Arc<Message>]| {
            let mut at = 0;
            for (part, &length) in lengths.iter().enumerate() {
                if length > 0 {
                    let pieces = views.write(part)?.chunks_exact_mut(length);
                    for (piece, message) in pieces.zip(messages) {
                        let bytes = message.payload.for_rank(position);
                        copy(bytes.get(at..at + length), piece);
                    }
                }
                at += length;
            }
            Ok(())
        };
        self.issue(&op, header, &accesses, on, pack, unpack)
    }

    fn reduce_scatter(
        &self,
        op: Op<'_>,
        reduce: Reduce,
        parts: &[(Span<Cpu>, Span<Cpu>)],
        on: &CpuStream,
    ) -> Result<()> {
        shape::check_reduce_scatter(&op, self.rank(), self.world(), reduce, parts)?;
        let apart = parts.iter().map(|(source, destination)| !shape::overlap(source, destination));
        let apart = apart.collect::<Vec<_>>();
        let mut accesses = Vec::with_capacity(2 * parts.len());
        for ((source, _), &apart) in parts.iter().zip(&apart) {
            accesses.push(if apart {
                Access::Read(source.clone())
            } else {
                Access::ReadWrite(source.clone())
            });
        }
        let destinations = parts.iter().zip(&apart).filter(|(_, apart)| **apart);
        accesses.extend(destinations.map(|((_, to), _)| Access::Write(to.clone())));

        let lengths = parts.iter().map(|(_, destination)| length(destination)).collect::<Vec<_>>();
        let header = Header::new(
            Kind::ReduceScatter(reduce),
            &op,
            parts.iter().map(|(source, _)| source.len()).collect(),
        );
        let (position, world) = (self.seat.position, self.world_size());
        let for_pack = lengths.iter().copied().zip(apart.iter().copied()).collect::<Vec<_>>();
        let pack = move |views: &mut Views<'_>| {
            let total = for_pack.iter().map(|(length, _)| length).sum();
            let mut pieces = vec![Vec::with_capacity(total); world];
            for (part, &(length, apart)) in for_pack.iter().enumerate() {
                if length == 0 {
                    continue;
                }
                let whole: &[u8] = if apart { views.read(part)? } else { views.write(part)? };
                for (to, from) in pieces.iter_mut().zip(whole.chunks_exact(length)) {
                    to.extend_from_slice(from);
                }
            }
            Ok(Payload::Each(Arc::new(pieces)))
        };
        let unpack = move |views: &mut Views<'_>, messages: &[Arc<Message>]| {
            let (mut at, mut next) = (0, lengths.len());
            for (part, (&length, apart)) in lengths.iter().zip(apart).enumerate() {
                let sources = messages
                    .iter()
                    .map(|message| message.payload.for_rank(position).get(at..at + length))
                    .map(Option::unwrap_or_default)
                    .collect::<Vec<_>>();
                if apart {
                    combine::reduce(reduce, &sources, views.write(next)?);
                    next += 1;
                } else {
                    let own = position * length..(position + 1) * length;
                    if let Some(out) = views.write(part)?.get_mut(own) {
                        combine::reduce(reduce, &sources, out);
                    }
                }
                at += length;
            }
            Ok(())
        };
        self.issue(&op, header, &accesses, on, pack, unpack)
    }

    fn all_reduce(
        &self,
        op: Op<'_>,
        reduce: Reduce,
        span: &Span<Cpu>,
        on: &CpuStream,
    ) -> Result<()> {
        shape::check_all_reduce(&op, reduce, span)?;
        let header = Header::new(Kind::AllReduce(reduce), &op, vec![span.len()]);
        let position = self.seat.position;
        let pack = |views: &mut Views<'_>| Ok(Payload::Same(Arc::new(views.write(0)?.to_vec())));
        let unpack = move |views: &mut Views<'_>, messages: &[Arc<Message>]| {
            let sources = messages
                .iter()
                .map(|message| message.payload.for_rank(position))
                .collect::<Vec<_>>();
            combine::reduce(reduce, &sources, views.write(0)?);
            Ok(())
        };
        self.issue(&op, header, &[Access::ReadWrite(span.clone())], on, pack, unpack)
    }

    fn broadcast(&self, op: Op<'_>, root: u32, span: &Span<Cpu>, on: &CpuStream) -> Result<()> {
        shape::check_root(&op, root, self.world())?;
        let header = Header::new(Kind::Broadcast(root), &op, vec![span.len()]);
        let (position, from) = (self.seat.position, root as usize);
        let is_root = position == from;
        let access = if is_root { Access::Read(span.clone()) } else { Access::Write(span.clone()) };
        let pack = move |views: &mut Views<'_>| {
            Ok(if is_root {
                Payload::Same(Arc::new(views.read(0)?.to_vec()))
            } else {
                Payload::empty()
            })
        };
        let unpack = move |views: &mut Views<'_>, messages: &[Arc<Message>]| {
            if !is_root {
                let bytes = messages.get(from).map(|message| message.payload.for_rank(position));
                copy(bytes, views.write(0)?);
            }
            Ok(())
        };
        self.issue(&op, header, &[access], on, pack, unpack)
    }

    fn barrier(&self, op: Op<'_>) -> Result<()> {
        self.seat.check(&op)?;
        self.meet(Lane::Host, &op, Kind::Barrier, &[]).map(drop)
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Arc<dyn Communicator<Cpu>>>> {
        let sequence = self.hosted.load(Ordering::Relaxed);
        let op = Op { sequence, name: "split", unit: "communicator", deadline: SPLIT_DEADLINE };
        self.seat.check(&op)?;
        let mut wish = vec![u8::from(color.is_some())];
        wish.extend(color.unwrap_or_default().to_le_bytes());
        wish.extend(key.to_le_bytes());
        let messages = self.meet(Lane::Host, &op, Kind::Split, &wish)?;
        let Some(color) = color else { return Ok(None) };

        let mut chosen = Vec::new();
        for (&rank, message) in self.seat.members.iter().zip(&messages) {
            let wish = message.payload.for_rank(self.seat.position);
            let Some((theirs, key)) = read_wish(wish) else {
                return Err(Error::Usage {
                    operation: op.name.to_owned(),
                    unit: op.unit.to_owned(),
                    problem: format!("rank {rank} sent a colour that cannot be read"),
                });
            };
            if theirs == Some(color) {
                chosen.push((key, rank));
            }
        }
        // Members are listed in this group's order, and the sort is stable.
        chosen.sort_by_key(|(key, _)| *key);
        let members = chosen.into_iter().map(|(_, rank)| rank).collect::<Arc<[u32]>>();
        let own = self.seat.rank();
        let position = members.iter().position(|&rank| rank == own).unwrap_or_default();
        let seat = Seat {
            board: Arc::clone(&self.seat.board),
            link: Arc::clone(&self.seat.link),
            group: child_group(self.seat.group, sequence, color),
            members,
            position,
        };
        Ok(Some(Arc::new(Self::new(seat, self.cpu.clone()))))
    }

    fn abort_handle(&self) -> AbortHandle {
        let seat = Arc::downgrade(&self.seat);
        AbortHandle::new(move |reason| {
            let Some(seat) = seat.upgrade() else { return };
            seat.fail(if reason == DISORDER {
                Cause::Disordered { difference: UNRESOLVED.to_owned() }
            } else {
                Cause::Aborted { rank: seat.rank(), reason: reason.to_owned() }
            });
        })
    }

    fn check(&self) -> Result<()> {
        let sequence = self.issued.load(Ordering::Relaxed);
        self.seat.check(&Op {
            sequence,
            name: "operation",
            unit: "communicator",
            deadline: Duration::ZERO,
        })
    }

    fn exchange(&self, op: Op<'_>, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lane = if self.seat.board.failure().is_some() { Lane::Inquest } else { Lane::Host };
        let messages = self.meet(lane, &op, Kind::Exchange, message)?;
        Ok(messages
            .iter()
            .map(|message| message.payload.for_rank(self.seat.position).to_vec())
            .collect())
    }
}

impl Drop for HostGroup {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.seat.fail(Cause::Lost { rank: self.seat.rank(), how: "panicked".to_owned() });
        }
        self.seat.leave(self.issued.load(Ordering::Relaxed), true, "left");
    }
}

fn copy(from: Option<&[u8]>, to: &mut [u8]) {
    // Lengths agree: the headers that state them have been compared.
    if let Some(from) = from.filter(|from| from.len() == to.len()) {
        to.copy_from_slice(from);
    }
}

fn read_wish(bytes: &[u8]) -> Option<(Option<u32>, u32)> {
    let [some, c0, c1, c2, c3, k0, k1, k2, k3] = *bytes else { return None };
    let color = u32::from_le_bytes([c0, c1, c2, c3]);
    let key = u32::from_le_bytes([k0, k1, k2, k3]);
    match some {
        0 => Some((None, key)),
        1 => Some((Some(color), key)),
        _ => None,
    }
}

/// The same on every member, without asking: the parent, the split's number, the colour.
fn child_group(parent: u64, split: u64, color: u32) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"gather8 group");
    hasher.update(&parent.to_le_bytes());
    hasher.update(&split.to_le_bytes());
    hasher.update(&color.to_le_bytes());
    let mut bytes = [0; 8];
    hasher.finalize_xof().fill(&mut bytes);
    u64::from_le_bytes(bytes)
}
