//! What rows need of a GPU beyond its backend: the device's clock, and graphs to count launches in.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use gather8_kernels::Backend;
use gather8_kernels::cuda::{Cuda, Stream, Timer, probe};

use super::device::Clock;
use super::model::Model;
use super::report::{Figure, Gpu};

/// How long the device is held back before what is timed: enough to issue it.
const AHEAD: Duration = Duration::from_micros(100);

/// The device's clock, by a pair of events. The device is held back until the host has issued
/// everything, so that no time of the host is in it; by a kernel that touches no memory, so that
/// its caches are as the run before has left them.
pub struct EventClock {
    timer: Timer,
}

impl EventClock {
    /// A clock of the device.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn new(cuda: &Cuda) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { timer: cuda.timer()? }))
    }
}

impl Clock<Cuda> for EventClock {
    fn time(
        &self,
        backend: &Cuda,
        stream: &Stream,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Duration> {
        backend.delay(stream, AHEAD)?;
        self.timer.start(stream)?;
        work()?;
        self.timer.stop(stream)?;
        Ok(self.timer.elapsed()?)
    }
}

/// What the numbers were measured on.
///
/// # Errors
/// A driver that does not answer.
pub fn gpu(cuda: &Cuda, world: u32) -> Result<Gpu> {
    let found = probe()?;
    let info = cuda.info();
    let nccl = gather8_collectives::nccl::probe().ok().filter(|_| world > 1);
    let driver = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    Ok(Gpu {
        name: info.name.clone(),
        architecture: info.architecture,
        driver: driver.trim().to_owned(),
        cuda: format!("{}.{}", found.driver_version.0, found.driver_version.1),
        nccl: nccl.map(|(_, version)| version),
        visible: found.devices.len(),
        ranks: world,
    })
}

/// Kernels of a captured step's weight path, dynamic and delayed.
///
/// # Errors
/// A failure of the device.
pub fn launches(cuda: &Cuda, model: &Arc<Model<Cuda>>, tensors: &str) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, delayed) in [("dynamic", false), ("delayed", true)] {
        let path = model.weight_path(delayed)?;
        let mut issued = Ok(());
        let (graph, ()) = cuda.capture(model.stream(), || {
            issued = path.issue();
            Ok(())
        })?;
        issued?;
        let what = format!("kernels of a captured step, {tensors} tensors, {name}");
        figures.push(Figure::once(what, "kernels", graph.kernels() as f64));
    }
    Ok(figures)
}
