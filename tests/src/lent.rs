//! A host program that has started NCCL by itself and lends its communicator.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use gather8_collectives::{Communicator, Launch, NcclOptions, NcclWorld, Op, TcpWorld, nccl};
use gather8_kernels::cpu::Cpu;
use gather8_kernels::cuda::{Cuda, probe};
use gather8_kernels::{Backend, Memory, Span};
use libloading::Library;

use crate::Context;

#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type InitRank = unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int) -> c_int;
type AllGather = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    c_int,
    *mut c_void,
    *mut c_void,
) -> c_int;
type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;

/// NCCL as a program in C has it: its calls wait for the peers.
pub struct HostProgram {
    library: Library,
    lent: RefCell<Option<Lent>>,
}

/// One communicator.
struct Lent {
    comm: *mut c_void,
    cuda: Cuda,
    host: Arc<dyn Communicator<Cpu>>,
}

impl HostProgram {
    /// Loads NCCL, whose environment is set already.
    ///
    /// # Errors
    /// NCCL that is missing.
    pub fn new() -> anyhow::Result<Self> {
        let (path, version) = nccl::probe()?;
        tracing::info!(path, version, "a host program loads NCCL");
        // SAFETY: NCCL's initialisers start nothing.
        let library = unsafe { Library::new(&path) }?;
        Ok(Self { library, lent: RefCell::new(None) })
    }

    /// Starts a communicator and lends it: what the cases run on.
    ///
    /// # Errors
    /// A failure of NCCL or of the host's ranks.
    pub fn lend(&self, launch: &Launch, tcp: &TcpWorld) -> anyhow::Result<Context<Cuda>> {
        let devices = probe()?.devices.len() as u32;
        ensure!(devices > 0, "there is no GPU");
        let backend = Cuda::new(launch.rank % devices)?;
        backend.bind_to_thread()?;
        let host = tcp.communicator(Cpu::new());
        let mut id = UniqueId([0; 128]);
        if launch.rank == 0 {
            // SAFETY: the function with its type in NCCL's interface; room for an id.
            let code = unsafe { self.library.get::<GetUniqueId>(b"ncclGetUniqueId")?(&mut id) };
            ensure!(code == 0, "ncclGetUniqueId: {code}");
        }
        let deadline = std::time::Duration::from_secs(60);
        let op = Op { sequence: 0, name: "exchange", unit: "id", deadline };
        let ids = host.exchange(op, &id.0)?;
        id.0 = ids.first().context("rank 0")?.as_slice().try_into()?;
        let (world, rank) = (launch.world as c_int, launch.rank as c_int);
        let mut comm = std::ptr::null_mut();
        // SAFETY: as above; room for a handle, the same id on every rank.
        let code = unsafe {
            self.library.get::<InitRank>(b"ncclCommInitRank")?(&mut comm, world, id, rank)
        };
        ensure!(code == 0, "ncclCommInitRank: {code}");

        // One of other ranks is refused, on every rank.
        if launch.world > 1 {
            let alone = gather8_collectives::LocalWorld::new(1);
            let (cpu, control) = (alone.rank(0, Cpu::new())?, alone.control(0)?);
            let guest = Cuda::new(launch.rank % devices)?;
            // SAFETY: a live communicator.
            let refused =
                unsafe { NcclWorld::from_raw(comm, guest, cpu, control, &NcclOptions::default()) };
            let text = refused.err().context("it took ranks for others")?.to_string();
            ensure!(text.contains("lend the one of the same ranks"), "{text}");
        }

        let options = NcclOptions::default();
        let (ranks, control) = (Arc::clone(&host), tcp.control());
        // SAFETY: the communicator lives until `end`, which comes when the case is over, and nobody
        // else calls NCCL with it meanwhile.
        let communicator =
            unsafe { NcclWorld::from_raw(comm, backend.clone(), ranks, control, &options) }?;
        *self.lent.borrow_mut() = Some(Lent { comm, cuda: backend.clone(), host });
        Ok(Context { backend, communicator })
    }

    /// The case is over, well or not: the communicator still gathers, and ends.
    ///
    /// # Errors
    /// What does not work any more.
    pub fn end(&self) -> anyhow::Result<()> {
        let lent = self.lent.borrow_mut().take().context("nothing is lent")?;
        let (world, rank) = (lent.host.world(), lent.host.rank());
        // The backend has failed where the case was one of failures; its context lives.
        let cuda = Cuda::new(lent.cuda.info().ordinal)?;
        let stream = cuda.stream("host program")?;
        let own = Span::whole(&cuda.alloc(4, Memory::Device)?);
        let all = Span::whole(&cuda.alloc(4 * u64::from(world), Memory::Device)?);
        cuda.upload(&stream, &(rank + 7).to_le_bytes(), &own)?;
        let (from, to) = (own.address() as *const c_void, all.address() as *mut c_void);
        // SAFETY: the function with its type in NCCL's interface; four bytes from each rank.
        let code = unsafe {
            self.library.get::<AllGather>(b"ncclAllGather")?(
                from,
                to,
                4,
                1,
                lent.comm,
                stream.raw(),
            )
        };
        ensure!(code == 0, "ncclAllGather on the lent communicator: {code}");
        let mut bytes = vec![0; 4 * world as usize];
        cuda.download(&stream, &all, &mut bytes)?;
        let expected = (0..world).flat_map(|rank| (rank + 7).to_le_bytes()).collect::<Vec<_>>();
        ensure!(bytes == expected, "the lent communicator gathers {bytes:?}");
        // SAFETY: the function with its type in NCCL's interface; used by nobody any more.
        let code = unsafe { self.library.get::<Destroy>(b"ncclCommDestroy")?(lent.comm) };
        ensure!(code == 0, "ncclCommDestroy of the lent communicator: {code}");
        Ok(())
    }
}
