//! The CUDA backend (feature `cuda`): NVIDIA GPUs from Ampere on.
//!
#![doc = include_str!("README.md")]

mod backend;
mod cache;
mod core;
mod driver;
mod graph;
mod handles;
mod library;
mod nvrtc;
mod plan;
mod sources;
mod staging;
mod tables;
mod timer;
mod trial;

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys;

use self::core::Core;
use crate::error::{Error, Result};

pub use cache::CACHE_VARIABLE;
pub use driver::{DeviceInfo, Report, can_access_peer, probe};
pub use graph::Graph;
pub use handles::{Buffer, Event, Stream};
pub use library::NVRTC_VARIABLE;
pub use nvrtc::{Header, Nvrtc};
pub use plan::Plan;
pub use sources::{SOURCES, Source, options};
pub use timer::Timer;
pub use trial::{Seen, Trial};

/// A CUDA device. Clones are the same device; see the module's page for how it works.
#[derive(Clone)]
pub struct Cuda(Arc<Core>);

impl Cuda {
    /// Starts a device by its number among the visible ones, in its primary context, which is the
    /// one that the CUDA runtime and other libraries use. Compiles all kernels, or takes them from
    /// the cache, and loads them.
    ///
    /// # Errors
    /// [`Error::Device`] if driver, device or compiler are missing or too old, with what was tried
    /// and what to install.
    pub fn new(ordinal: u32) -> Result<Self> {
        driver::initialise()?;
        let device = driver::device(ordinal)?;
        Core::new(ordinal, device, None, cache::folder().as_deref()).map(Arc::new).map(Self)
    }

    /// Works in a host program's context (a `CUcontext`).
    ///
    /// # Safety
    /// The context must live until the last clone of the backend and everything made from it are
    /// dropped. Calls leave it as the calling thread's current context.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub unsafe fn from_context(context: *mut c_void) -> Result<Self> {
        driver::initialise()?;
        let context = context.cast();
        let check = |what, code| driver::check("cuda", what, code);
        // SAFETY: a live context, as the caller promises.
        check("entering the host program's context", unsafe { sys::cuCtxSetCurrent(context) })?;
        let mut device = 0;
        // SAFETY: a valid integer to write to.
        check("asking for the context's device", unsafe { sys::cuCtxGetDevice(&mut device) })?;
        // A device's handle is its number.
        let ordinal = device.unsigned_abs();
        Core::new(ordinal, device, Some(context), cache::folder().as_deref())
            .map(Arc::new)
            .map(Self)
    }

    /// A host program's stream (a `CUstream`, the same as a `cudaStream_t`) of the same context.
    ///
    /// # Safety
    /// The stream must live until the last clone of the returned value is dropped.
    pub unsafe fn borrow_stream(&self, stream: *mut c_void, name: &str) -> Stream {
        Stream::wrap(&self.0, stream.cast(), name, false)
    }

    /// The context's handle (a `CUcontext`), valid while a clone of the backend lives.
    pub fn raw_context(&self) -> *mut c_void {
        self.0.raw_context().cast()
    }

    /// Makes the context the calling thread's current one, for calls of other libraries.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn bind_to_thread(&self) -> Result<()> {
        self.0.bind()
    }

    /// What the driver says about the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Whether a capture is under way on any stream of the device.
    pub fn is_capturing(&self) -> bool {
        self.0.capturing.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Whether an event has passed; never waits, and answers on a backend that has failed, too.
    ///
    /// # Errors
    /// What an operation before the event failed with.
    pub fn has_passed(&self, event: &Event) -> Result<bool> {
        self.0.bind()?;
        // SAFETY: a live event.
        match unsafe { sys::cuEventQuery(event.0.raw.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.0.check("an earlier operation", code).map(|()| true),
        }
    }

    /// Makes every later call on the backend return this error, unless an earlier one does
    /// already: for collectives, whose operations fail outside of the driver.
    pub fn fail(
        &self,
        operation: impl Into<String>,
        source: Arc<dyn std::error::Error + Send + Sync>,
    ) {
        self.0.fail(Error::Stream { operation: operation.into(), source });
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({}, {})", self.0.name, self.0.info.name)
    }
}
