//! Memory, streams and events.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use sys::CUresult as Code;

use super::Cuda;
use super::core::Core;
use super::driver::{Handle, describe};
use super::staging::Pinned;
use crate::backend::{Memory, Span};
use crate::error::{Error, Result};

/// Device memory that this crate has allocated.
pub(super) struct DeviceMemory {
    core: Arc<Core>,
    pub(super) address: u64,
}

impl DeviceMemory {
    /// Zeroed memory; waits until it is.
    pub(super) fn zeroed(core: &Arc<Core>, bytes: u64) -> Result<Self> {
        let memory = Self::uninitialised(core, bytes)?;
        let count = bytes as usize;
        if count > 0 {
            core.relaxed(|| {
                // SAFETY: as many bytes as were allocated, on a stream that is never captured.
                let code =
                    unsafe { sys::cuMemsetD8Async(memory.address, 0, count, core.service.0) };
                core.check("zeroing memory", code)?;
                // SAFETY: a live stream.
                core.check("zeroing memory", unsafe { sys::cuStreamSynchronize(core.service.0) })
            })?;
        }
        Ok(memory)
    }

    pub(super) fn uninitialised(core: &Arc<Core>, bytes: u64) -> Result<Self> {
        let mut address = 0;
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: a pointer to write to; the context is current.
        let code = core.relaxed(|| unsafe { sys::cuMemAlloc_v2(&mut address, size) });
        if code != Code::CUDA_SUCCESS {
            return Err(Error::OutOfMemory {
                device: core.name.clone(),
                bytes,
                reason: format!("{}{}", describe(code), free()),
            });
        }
        Ok(Self { core: Arc::clone(core), address })
    }
}

/// What the current context's device has left, for an error.
fn free() -> String {
    let (mut free, mut total) = (0, 0);
    // SAFETY: two valid integers to write to.
    match unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } {
        Code::CUDA_SUCCESS => format!("; {free} of the device's {total} bytes are free"),
        _ => String::new(),
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.core.bind().is_ok() {
            // The driver waits for the work that still uses it.
            // SAFETY: allocated here, freed once.
            self.core.relaxed(|| unsafe { sys::cuMemFree_v2(self.address) });
        }
    }
}

enum Storage {
    Device {
        _memory: DeviceMemory,
    },
    Host {
        memory: Pinned,
        core: Arc<Core>,
    },
    /// A host program's memory, and what keeps it alive.
    Borrowed {
        _owner: Option<Box<dyn Any + Send + Sync>>,
    },
}

/// A piece of device or pinned host memory.
pub struct Buffer {
    storage: Storage,
    address: u64,
    bytes: u64,
}

impl Buffer {
    pub(super) fn new(core: &Arc<Core>, bytes: u64, memory: Memory) -> Result<Self> {
        match memory {
            Memory::Device => {
                let memory = DeviceMemory::zeroed(core, bytes)?;
                Ok(Self {
                    address: memory.address,
                    storage: Storage::Device { _memory: memory },
                    bytes,
                })
            }
            Memory::Host => {
                let memory = Pinned::new(core, usize::try_from(bytes).unwrap_or(usize::MAX))?;
                // SAFETY: fresh memory of that many bytes.
                unsafe { memory.host.0.write_bytes(0, memory.bytes) };
                let address = memory.device_address(&core.name)?;
                Ok(Self {
                    storage: Storage::Host { memory, core: Arc::clone(core) },
                    address,
                    bytes,
                })
            }
        }
    }

    /// A host program's device memory as a buffer; `owner` is dropped with it.
    ///
    /// # Safety
    /// `address` must be `bytes` bytes of memory that the backend's device can read and write, a
    /// multiple of 16 for full speed and of the elements' size at least, and must stay so until
    /// the buffer is dropped and everything that was issued with it has run. Work of the host
    /// program on the same bytes must be ordered by events, as between streams of the backend.
    pub unsafe fn from_raw(
        address: u64,
        bytes: u64,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        Self { storage: Storage::Borrowed { _owner: owner }, address, bytes }
    }

    /// The address under which kernels reach it.
    pub const fn address(&self) -> u64 {
        self.address
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memory's first byte on the host, if it is host memory.
    pub(super) const fn host(&self) -> Option<*const u8> {
        match &self.storage {
            Storage::Host { memory, .. } => Some(memory.host.0.cast_const()),
            Storage::Device { .. } | Storage::Borrowed { .. } => None,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Storage::Host { core, .. } = &self.storage {
            // Freed by the field, which wants the context; an error has nowhere to go.
            let _ = core.bind();
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:#x}, {} bytes)", self.address, self.bytes)
    }
}

impl Span<Cuda> {
    /// The device address of its first byte, for a host program's own kernels. The bytes live as
    /// long as the span's buffer.
    pub fn address(&self) -> u64 {
        self.buffer().address() + self.range().start
    }
}

/// A queue of operations; clones are the same one.
#[derive(Clone)]
pub struct Stream(pub(super) Arc<StreamInner>);

pub(super) struct StreamInner {
    pub(super) core: Arc<Core>,
    pub(super) raw: Handle<sys::CUstream>,
    pub(super) name: String,
    owned: bool,
}

impl Stream {
    pub(super) fn new(core: &Arc<Core>, name: &str) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // It does not wait for the legacy default stream, nor that for it.
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; a pointer to write to.
        core.check("creating a stream", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Self::wrap(core, raw, name, true))
    }

    pub(super) fn wrap(core: &Arc<Core>, raw: sys::CUstream, name: &str, owned: bool) -> Self {
        Self(Arc::new(StreamInner {
            core: Arc::clone(core),
            raw: Handle(raw),
            name: name.to_owned(),
            owned,
        }))
    }

    /// The driver's handle (a `CUstream`, the same as a `cudaStream_t`), valid while a clone of the
    /// stream lives.
    pub fn raw(&self) -> *mut c_void {
        self.0.raw.0.cast()
    }

    /// The name that it was given.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream(`{}` of {})", self.0.name, self.0.core.name)
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.owned && self.core.bind().is_ok() {
            // What is queued still runs.
            // SAFETY: created here, destroyed once.
            unsafe { sys::cuStreamDestroy_v2(self.raw.0) };
        }
    }
}

/// A point in a stream; clones are the same one.
#[derive(Clone)]
pub struct Event(pub(super) Arc<EventInner>);

pub(super) struct EventInner {
    pub(super) core: Arc<Core>,
    pub(super) raw: Handle<sys::CUevent>,
}

impl Event {
    /// The driver's handle (a `CUevent`, the same as a `cudaEvent_t`), valid while a clone of the
    /// event lives.
    pub fn raw(&self) -> *mut c_void {
        self.0.raw.0.cast()
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({:p})", self.0.raw.0)
    }
}

impl Drop for EventInner {
    fn drop(&mut self) {
        // A wait that has been issued keeps the point that it saw, whatever the event records next.
        self.core.return_event(self.raw);
    }
}
