//! What the book shows of a host program's NCCL compiles. It runs on GPUs, with the conformance cases
//! over `nccl-lent`.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::c_void;
use std::sync::Arc;

use gather8_collectives::{
    Communicator, Error, JoinOptions, Launch, NcclOptions, NcclWorld, TcpWorld,
};
use gather8_kernels::cpu::Cpu;
use gather8_kernels::cuda::Cuda;

/// Of a host program: its context, its communicator.
fn ranks(
    launch: &Launch,
    context: *mut c_void,
    comm: *mut c_void,
) -> Result<Arc<dyn Communicator<Cuda>>, Error> {
    let world = TcpWorld::join(launch, &JoinOptions::from_env()?)?;
    // SAFETY: none of the values outlives the host program's.
    let cuda = unsafe { Cuda::from_context(context) }.map_err(Error::Backend)?;
    let (host, control) = (world.communicator(Cpu::new()), world.control());
    let options = NcclOptions::default();
    // SAFETY: as above; the program calls NCCL with it again when this has returned.
    let ranks = unsafe { NcclWorld::from_raw(comm, cuda, host, control, &options) }?;
    Ok(ranks)
}

#[test]
fn what_is_no_context_is_an_error() {
    let launch = Launch::from_env().unwrap();
    let nothing = std::ptr::null_mut();
    assert!(matches!(ranks(&launch, nothing, nothing), Err(Error::Backend(_))));
}
