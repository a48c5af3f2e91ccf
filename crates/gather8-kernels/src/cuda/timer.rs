//! How long the device takes between two points of a stream.

use std::time::Duration;

use cudarc::driver::sys;

use super::driver::{self, Handle};
use super::{Cuda, Stream};
use crate::error::{Error, Result};

/// The driver's function, in every version of it.
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// A pair of events that carry the device's clock. The events of [`Backend`](crate::Backend) carry
/// none: those cost more to record.
#[derive(Debug)]
pub struct Timer {
    cuda: Cuda,
    elapsed: ElapsedTime,
    start: Handle<sys::CUevent>,
    stop: Handle<sys::CUevent>,
}

impl Cuda {
    /// A timer for streams of this device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn timer(&self) -> Result<Timer> {
        self.0.enter()?;
        // cudarc has one name of it or another, according to the version that it is built for.
        // SAFETY: the function of the driver's C interface with its type there; the driver is never
        // closed.
        let elapsed =
            unsafe { driver::initialise()?.library.get::<ElapsedTime>(b"cuEventElapsedTime\0") };
        let elapsed = *elapsed.map_err(|error| Error::Device {
            device: self.0.name.clone(),
            what: "creating a timer".to_owned(),
            reason: error.to_string(),
        })?;
        let null = Handle(std::ptr::null_mut());
        // From here on Drop destroys what has been made.
        let mut timer = Timer { cuda: self.clone(), elapsed, start: null, stop: null };
        for event in [&mut timer.start, &mut timer.stop] {
            let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
            // SAFETY: the context is current; a pointer to write to.
            let code = unsafe { sys::cuEventCreate(&mut event.0, flags) };
            self.0.check("creating a timer", code)?;
        }
        Ok(timer)
    }
}

impl Timer {
    fn record(&self, event: Handle<sys::CUevent>, on: &Stream) -> Result<()> {
        self.cuda.0.enter()?;
        // SAFETY: a live event and stream.
        let code = unsafe { sys::cuEventRecord(event.0, on.0.raw.0) };
        self.cuda.0.check("recording a time", code)
    }

    /// Time runs from here, in stream order.
    ///
    /// # Errors
    /// What an earlier operation failed with.
    pub fn start(&self, on: &Stream) -> Result<()> {
        self.record(self.start, on)
    }

    /// Time runs to here, in stream order; the stream may be another one.
    ///
    /// # Errors
    /// What an earlier operation failed with.
    pub fn stop(&self, on: &Stream) -> Result<()> {
        self.record(self.stop, on)
    }

    /// Waits for both points and returns the time between them, to half a microsecond.
    ///
    /// # Errors
    /// What an operation before them failed with; a point that was not recorded.
    pub fn elapsed(&self) -> Result<Duration> {
        self.cuda.0.enter()?;
        // SAFETY: a live event.
        let code = unsafe { sys::cuEventSynchronize(self.stop.0) };
        self.cuda.0.check("waiting for a time", code)?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: two live events and a value to write to.
        let code = unsafe { (self.elapsed)(&mut milliseconds, self.start.0, self.stop.0) };
        self.cuda.0.check("reading a time", code)?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if self.cuda.0.bind().is_ok() {
            for event in [self.start, self.stop] {
                if !event.0.is_null() {
                    // SAFETY: created by the backend, destroyed once.
                    unsafe { sys::cuEventDestroy_v2(event.0) };
                }
            }
        }
    }
}
