//! [`Communicator`] for NCCL.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use gather8_kernels::cuda::{Cuda, Stream};
use gather8_kernels::{Backend, Span};

use super::library::{Code, Type, codes};
use super::world::{Handle, Parent, World, lock};
use crate::communicator::{AbortHandle, Communicator, Op, Reduce};
use crate::error::{Error, Result};
use crate::shape;

type Part = (Span<Cuda>, Span<Cuda>);

/// A group of GPUs.
pub struct NcclCommunicator {
    world: Arc<World>,
    /// The parent, in the communicator of all ranks: it only splits. Lent ones are not ended here.
    parent: Option<Parent>,
    /// What carries the collectives.
    comm: Handle,
    /// Whether dropping this value ends `comm`.
    owned: bool,
    host: Arc<dyn Communicator<gather8_kernels::cpu::Cpu>>,
    rank: u32,
    size: u32,
    deadline: Duration,
}

impl NcclCommunicator {
    pub(super) fn root(world: &Arc<World>, deadline: Duration) -> Result<Self> {
        let parent = world.init(deadline)?;
        Self::over(world, parent, deadline)
    }

    /// All ranks of `parent`.
    pub(super) fn over(world: &Arc<World>, parent: Parent, deadline: Duration) -> Result<Self> {
        let (rank, size) = (world.host.rank(), world.host.world());
        let comm = world.split(parent, Some(0), rank, deadline)?;
        let comm = comm.ok_or_else(|| super::library::refused("a split gave no child"))?;
        let host = Arc::clone(&world.host);
        Ok(Self {
            world: Arc::clone(world),
            parent: Some(parent),
            comm,
            owned: true,
            host,
            rank,
            size,
            deadline,
        })
    }

    /// The handle of NCCL's communicator (an `ncclComm_t`) that carries the collectives, for a
    /// host program's own calls. It is this value's; calls must follow the same order on every
    /// rank, and not run at the same time as this value's.
    pub fn raw(&self) -> *mut c_void {
        self.comm.0
    }

    fn address(span: &Span<Cuda>) -> *mut c_void {
        span.address() as *mut c_void
    }

    /// Issues calls as one group, watched until they are over.
    fn issue(
        &self,
        op: &Op<'_>,
        on: &Stream,
        calls: impl FnOnce(&World, Handle) -> Vec<Code>,
    ) -> Result<()> {
        self.world.check()?;
        let cuda = &self.world.cuda;
        cuda.bind_to_thread()?;
        // A captured operation is watched when its graph is replayed, not now.
        let watched = !cuda.is_capturing();
        let _issuing = lock(&self.world.issuing);
        cuda.announce(op.name, on)?;
        let before = if watched { Some(cuda.record(on)?) } else { None };
        // SAFETY: a group of calls of this thread, closed below.
        let mut result = vec![unsafe { (self.world.nccl.group_start)() }];
        result.extend(calls(&self.world, self.comm));
        // SAFETY: closes the group that was opened above.
        result.push(unsafe { (self.world.nccl.group_end)() });
        let checked = result
            .into_iter()
            .try_for_each(|code| self.world.nccl.check(op.name, self.comm.0, code));
        if let Err(error) = checked {
            let error = self.world.inquest(error);
            self.world.fail(error);
            return self.world.check();
        }
        if let Some(before) = before {
            self.world.watch(op, before, cuda.record(on)?);
        }
        Ok(())
    }
}

impl Communicator<Cuda> for NcclCommunicator {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.size
    }

    fn all_gather(&self, op: Op<'_>, parts: &[Part], on: &Stream) -> Result<()> {
        shape::check_all_gather(&op, self.rank, self.size, parts)?;
        self.issue(&op, on, |world, comm| {
            let parts = parts.iter().filter(|(source, _)| !source.is_empty());
            parts
                .map(|(source, destination)| {
                    // SAFETY: lengths are checked; the buffers live until the stream is past this.
                    unsafe {
                        (world.nccl.all_gather)(
                            Self::address(source),
                            Self::address(destination),
                            source.len() as usize,
                            Type::UINT8,
                            comm.0,
                            on.raw(),
                        )
                    }
                })
                .collect()
        })
    }

    fn reduce_scatter(
        &self,
        op: Op<'_>,
        reduce: Reduce,
        parts: &[Part],
        on: &Stream,
    ) -> Result<()> {
        shape::check_reduce_scatter(&op, self.rank, self.size, reduce, parts)?;
        let (kind, combine) = codes(reduce);
        self.issue(&op, on, |world, comm| {
            let parts = parts.iter().filter(|(_, destination)| !destination.is_empty());
            parts
                .map(|(source, destination)| {
                    // SAFETY: lengths are checked; the buffers live until the stream is past this.
                    unsafe {
                        (world.nccl.reduce_scatter)(
                            Self::address(source),
                            Self::address(destination),
                            (destination.len() / reduce.size()) as usize,
                            kind,
                            combine,
                            comm.0,
                            on.raw(),
                        )
                    }
                })
                .collect()
        })
    }

    fn all_reduce(&self, op: Op<'_>, reduce: Reduce, span: &Span<Cuda>, on: &Stream) -> Result<()> {
        shape::check_all_reduce(&op, reduce, span)?;
        let (kind, combine) = codes(reduce);
        if span.is_empty() {
            return self.world.check();
        }
        self.issue(&op, on, |world, comm| {
            // SAFETY: whole elements, in place; the buffer lives until the stream is past this.
            vec![unsafe {
                (world.nccl.all_reduce)(
                    Self::address(span),
                    Self::address(span),
                    (span.len() / reduce.size()) as usize,
                    kind,
                    combine,
                    comm.0,
                    on.raw(),
                )
            }]
        })
    }

    fn broadcast(&self, op: Op<'_>, root: u32, span: &Span<Cuda>, on: &Stream) -> Result<()> {
        shape::check_root(&op, root, self.size)?;
        if span.is_empty() {
            return self.world.check();
        }
        self.issue(&op, on, |world, comm| {
            // SAFETY: in place; the buffer lives until the stream is past this.
            vec![unsafe {
                (world.nccl.broadcast)(
                    Self::address(span),
                    Self::address(span),
                    span.len() as usize,
                    Type::UINT8,
                    root as i32,
                    comm.0,
                    on.raw(),
                )
            }]
        })
    }

    fn barrier(&self, op: Op<'_>) -> Result<()> {
        self.world.check()?;
        // What fails on the host fails on the device: nothing more is enqueued, what is, is aborted.
        self.host.barrier(op).inspect_err(|error| self.world.fail(error.clone()))
    }

    fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Arc<dyn Communicator<Cuda>>>> {
        self.world.check()?;
        self.world.cuda.bind_to_thread()?;
        let host = self.host.split(color, key);
        let host = host.inspect_err(|error| self.world.fail(error.clone()))?;
        let from = self.parent.unwrap_or(Parent { handle: self.comm, waits: true });
        let split = self.world.split(from, color, key, self.deadline);
        let comm = split.inspect_err(|error| self.world.fail(error.clone()))?;
        Ok(host.zip(comm).map(|(host, comm)| -> Arc<dyn Communicator<Cuda>> {
            Arc::new(Self {
                world: Arc::clone(&self.world),
                parent: None,
                comm,
                owned: true,
                rank: host.rank(),
                size: host.world(),
                host,
                deadline: self.deadline,
            })
        }))
    }

    fn abort_handle(&self) -> AbortHandle {
        let world = Arc::downgrade(&self.world);
        AbortHandle::new(move |reason| {
            if let Some(world) = world.upgrade() {
                world.fail(Error::Aborted { reason: reason.to_owned() });
            }
        })
    }

    fn check(&self) -> Result<()> {
        self.world.check()
    }

    fn exchange(&self, op: Op<'_>, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        // After a failure, too: the host's ranks then tell each other what they know of it.
        let failed = self.world.check().is_err();
        let exchanged = self.host.exchange(op, message);
        if !failed && let Err(error) = &exchanged {
            self.world.fail(error.clone());
        }
        exchanged
    }
}

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclCommunicator(rank {} of {})", self.rank, self.size)
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if self.owned {
            self.world.release(self.comm);
        }
        if let Some(parent) = self.parent {
            // Children may live longer; the watchdog ends with the last of them.
            self.world.release(parent.handle);
        }
    }
}
