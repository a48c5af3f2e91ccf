//! Sends and receives that never block, over MPI's C interface: the one place that calls it.

use std::mem::MaybeUninit;
use std::os::raw::c_int;
use std::time::{Duration, Instant};

use ::mpi::ffi;

use super::failed;
use crate::error::{Error, Result};

/// All messages have the same tag: the communicator is ours alone.
const TAG: c_int = 8;

/// A communicator that nothing else in the process uses.
pub(super) struct Channel {
    comm: ffi::MPI_Comm,
    pub(super) rank: u32,
    pub(super) world: u32,
}

// SAFETY: an MPI communicator handle may be used from any thread, since MPI was initialized with
// MPI_THREAD_MULTIPLE; it is used from one at a time.
unsafe impl Send for Channel {}

impl Channel {
    /// Duplicates a communicator; collective. Errors on the duplicate are returned, not fatal.
    pub(super) fn duplicate(
        comm: ffi::MPI_Comm,
        rank: u32,
        world: u32,
        deadline: Duration,
    ) -> Result<Self> {
        // MPI writes the duplicate when all ranks have called, perhaps after we have given up: the
        // place for it is never freed. Nor is the duplicate: freeing is collective, and a peer may
        // be lost by then.
        let copy = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut request = Request { bytes: Vec::new(), raw: MaybeUninit::uninit(), active: false };
        // SAFETY: MPI is initialized, `comm` is a live communicator, and the results go to memory
        // of the right type that stays.
        let code = unsafe { ffi::MPI_Comm_idup(comm, copy.as_mut_ptr(), request.raw.as_mut_ptr()) };
        check("MPI_Comm_idup", code)?;
        request.active = true;
        let until = Instant::now() + deadline;
        while !request.is_done()? {
            if Instant::now() > until {
                return Err(failed(&format!(
                    "the other ranks did not connect within {:.1} s",
                    deadline.as_secs_f64()
                )));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        // SAFETY: the request is done, so the duplicate has been written.
        let comm = unsafe { copy.assume_init() };
        // SAFETY: a live communicator and one of MPI's own error handlers.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        Ok(Self { comm, rank, world })
    }

    /// Starts to send.
    pub(super) fn send(&self, to: u32, bytes: Vec<u8>) -> Result<Request> {
        let count = c_int::try_from(bytes.len())
            .map_err(|_| failed("a message of 2 GiB or more: use Tcp, or smaller units"))?;
        let mut request = Request { bytes, raw: MaybeUninit::uninit(), active: false };
        // SAFETY: the buffer holds `count` bytes and lives, unmoved on the heap, until the request
        // has completed: `Request` leaks it otherwise.
        let code = unsafe {
            ffi::MPI_Isend(
                request.bytes.as_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                TAG,
                self.comm,
                request.raw.as_mut_ptr(),
            )
        };
        check("MPI_Isend", code)?;
        request.active = true;
        Ok(request)
    }

    /// Starts to receive the next message that has arrived, if one has: from whom, and the request
    /// whose bytes it fills.
    pub(super) fn receive(&self) -> Result<Option<(u32, Request)>> {
        let mut flag: c_int = 0;
        let mut message = MaybeUninit::uninit();
        let mut status = MaybeUninit::uninit();
        // SAFETY: every pointer is to memory of the type that MPI writes; message and status are
        // read only after the flag says that they were written. The buffer lives as in `send`.
        unsafe {
            let code = ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                TAG,
                self.comm,
                &raw mut flag,
                message.as_mut_ptr(),
                status.as_mut_ptr(),
            );
            check("MPI_Improbe", code)?;
            if flag == 0 {
                return Ok(None);
            }
            let (mut message, status) = (message.assume_init(), status.assume_init());
            let mut count: c_int = 0;
            let code = ffi::MPI_Get_count(&raw const status, ffi::RSMPI_UINT8_T, &raw mut count);
            check("MPI_Get_count", code)?;
            let length = usize::try_from(count).map_err(|_| failed("a length is negative"))?;
            let from = u32::try_from(status.MPI_SOURCE).map_err(|_| failed("no sender"))?;
            let mut request =
                Request { bytes: vec![0; length], raw: MaybeUninit::uninit(), active: false };
            let code = ffi::MPI_Imrecv(
                request.bytes.as_mut_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                &raw mut message,
                request.raw.as_mut_ptr(),
            );
            check("MPI_Imrecv", code)?;
            request.active = true;
            Ok(Some((from, request)))
        }
    }
}

/// A send or receive under way, with its bytes. Dropped unfinished, the bytes are leaked: MPI may
/// still read or write them.
pub(super) struct Request {
    bytes: Vec<u8>,
    raw: MaybeUninit<ffi::MPI_Request>,
    active: bool,
}

impl Request {
    /// Whether it is done; never waits.
    pub(super) fn is_done(&mut self) -> Result<bool> {
        if !self.active {
            return Ok(true);
        }
        let mut flag: c_int = 0;
        // SAFETY: an active request was written by MPI and has not completed.
        let code = unsafe {
            ffi::MPI_Test(self.raw.as_mut_ptr(), &raw mut flag, ffi::RSMPI_STATUS_IGNORE)
        };
        check("MPI_Test", code)?;
        self.active = flag == 0;
        Ok(!self.active)
    }

    /// The bytes of a request that is done.
    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        if self.active { Vec::new() } else { std::mem::take(&mut self.bytes) }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.active {
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}

fn check(call: &str, code: c_int) -> Result<(), Error> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    Err(Error::Mpi { problem: format!("{call} returned {code}") })
}
