//! Pinned memory through which uploads pass, so that the caller's bytes are free at once and the
//! copy does not wait for the stream.

use cudarc::driver::sys;
use sys::CUresult as Code;

use super::core::Core;
use super::driver::{Handle, check};
use crate::error::{Error, Result};

/// Uploads are cut into pieces of at most this.
pub(super) const PIECE: usize = 4 << 20;
/// Blocks for small uploads: records, hyper-parameters.
const SMALL: usize = 16 << 10;
/// How many blocks of a size there may be before an upload waits for the oldest one's copy.
const SMALL_BLOCKS: usize = 256;
const LARGE_BLOCKS: usize = 64;

/// Pinned memory that the device reaches.
pub(super) struct Pinned {
    pub(super) host: Handle<*mut u8>,
    pub(super) bytes: usize,
}

impl Pinned {
    /// The context is current; a capture on this thread is not disturbed.
    pub(super) fn new(core: &Core, bytes: usize) -> Result<Self> {
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a pointer to write to; the size is not zero.
        let code = core.relaxed(|| unsafe { sys::cuMemHostAlloc(&mut host, bytes.max(1), flags) });
        if code != Code::CUDA_SUCCESS {
            return Err(Error::OutOfMemory {
                device: format!("{} (pinned host memory)", core.name),
                bytes: bytes as u64,
                reason: super::driver::describe(code),
            });
        }
        Ok(Self { host: Handle(host.cast()), bytes })
    }

    /// The address under which kernels reach it.
    pub(super) fn device_address(&self, device: &str) -> Result<u64> {
        let mut address = 0;
        // SAFETY: allocated with the mapping flag.
        let code =
            unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.host.0.cast(), 0) };
        check(device, "mapping host memory", code)?;
        Ok(address)
    }

    /// Fills its first bytes.
    fn write(&self, bytes: &[u8]) {
        let count = bytes.len().min(self.bytes);
        // SAFETY: no copy reads the block now, and both sides hold `count` bytes.
        unsafe { self.host.0.copy_from_nonoverlapping(bytes.as_ptr(), count) };
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; the driver waits for copies that still use it.
        unsafe { sys::cuMemFreeHost(self.host.0.cast()) };
    }
}

struct Block {
    memory: Pinned,
    /// Recorded after the last copy from it.
    used: Handle<sys::CUevent>,
}

/// The blocks that there are, those used longest ago first.
#[derive(Default)]
pub(super) struct Staging {
    small: std::collections::VecDeque<Block>,
    large: std::collections::VecDeque<Block>,
}

impl Staging {
    /// Copies at most [`PIECE`] bytes to `address` in stream order. The context is current.
    pub(super) fn copy(
        &mut self,
        core: &Core,
        on: sys::CUstream,
        bytes: &[u8],
        address: u64,
    ) -> Result<()> {
        let (blocks, size, limit) = if bytes.len() <= SMALL {
            (&mut self.small, SMALL, SMALL_BLOCKS)
        } else {
            (&mut self.large, PIECE, LARGE_BLOCKS)
        };
        let block = match blocks.front() {
            // SAFETY: a live event.
            Some(oldest) => match unsafe { sys::cuEventQuery(oldest.used.0) } {
                Code::CUDA_SUCCESS => blocks.pop_front(),
                Code::CUDA_ERROR_NOT_READY if blocks.len() >= limit => {
                    // SAFETY: a live event.
                    let code = unsafe { sys::cuEventSynchronize(oldest.used.0) };
                    core.check("waiting for an upload", code)?;
                    blocks.pop_front()
                }
                Code::CUDA_ERROR_NOT_READY => None,
                code => {
                    core.check("asking for an upload's end", code)?;
                    None
                }
            },
            None => None,
        };
        let block = match block {
            Some(block) => block,
            None => Block { memory: Pinned::new(core, size)?, used: core.event()? },
        };
        block.memory.write(bytes);
        // SAFETY: the caller vouches for the destination; the block stays until its event passes.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, block.memory.host.0.cast(), bytes.len(), on)
        };
        let copied = core.check("uploading", code);
        // SAFETY: a live event and stream.
        let recorded =
            core.check("recording an upload", unsafe { sys::cuEventRecord(block.used.0, on) });
        blocks.push_back(block);
        copied.and(recorded)
    }

    /// Frees everything; the context is current.
    pub(super) fn release(&mut self) {
        for block in self.small.drain(..).chain(self.large.drain(..)) {
            // SAFETY: the block owns it.
            unsafe { sys::cuEventDestroy_v2(block.used.0) };
        }
    }
}

/// Bytes in pinned memory of their own, for an upload that a graph repeats.
pub(super) fn pinned_copy(core: &Core, bytes: &[u8]) -> Result<Pinned> {
    let memory = Pinned::new(core, bytes.len())?;
    memory.write(bytes);
    Ok(memory)
}

/// Copies bytes to `address` and waits until they are there, outside of any stream and capture.
pub(super) fn upload_now(core: &Core, bytes: &[u8], address: u64, piece: usize) -> Result<()> {
    core.relaxed(|| {
        let mut staging = super::core::lock(&core.staging);
        let mut at = address;
        for piece in bytes.chunks(piece.clamp(1, PIECE)) {
            staging.copy(core, core.service.0, piece, at)?;
            at += piece.len() as u64;
        }
        // SAFETY: a live stream.
        core.check("uploading", unsafe { sys::cuStreamSynchronize(core.service.0) })
    })
}
