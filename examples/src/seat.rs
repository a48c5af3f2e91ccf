//! This process's place among ranks that are processes: its device, and its way to the others.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use gather8_collectives::{Communicator, Control, JoinOptions, Launch, Op, TcpWorld};
use gather8_kernels::Backend;
use gather8_kernels::cpu::Cpu;

/// A rank that is a process.
pub struct Seat<B: Backend> {
    /// Its device.
    pub backend: B,
    /// All ranks.
    pub communicator: Arc<dyn Communicator<B>>,
    /// Dropped last: it carries the news of lost peers.
    control: Arc<dyn Control>,
}

/// A GPU's number for this rank: the only visible one, else the local rank; with `share` the ranks
/// are dealt over the GPUs that there are.
///
/// # Errors
/// No GPU, or a local rank beyond the visible ones.
pub fn ordinal(launch: &Launch, visible: u32, share: bool) -> Result<u32> {
    let local = launch.local_rank.unwrap_or(launch.rank);
    match visible {
        0 => bail!(
            "the driver shows no GPU: look at CUDA_VISIBLE_DEVICES, start the container with its GPUs, or use the CPU"
        ),
        1 => Ok(0),
        count if local < count => Ok(local),
        count if share => Ok(local % count),
        count => bail!(
            "local rank {local} has no GPU of its own, {count} are visible: start at most {count} ranks on this host, or give --share-gpu for a test"
        ),
    }
}

impl Seat<Cpu> {
    /// Over TCP, with the passes on the CPU.
    ///
    /// # Errors
    /// Ranks that do not come.
    pub fn cpu(launch: &Launch) -> Result<Self> {
        let world = TcpWorld::join(launch, &JoinOptions::from_env()?)?;
        let backend = Cpu::new();
        let communicator = world.communicator(backend.clone());
        Ok(Self { backend, communicator, control: world.control() })
    }
}

#[cfg(feature = "cuda")]
impl Seat<gather8_kernels::cuda::Cuda> {
    /// On a GPU, over NCCL; a world of 1 starts none.
    ///
    /// # Errors
    /// A driver, a device, a compiler or NCCL that is missing; ranks that do not come.
    pub fn cuda(launch: &Launch, share_gpu: bool) -> Result<Self> {
        use gather8_collectives::{NcclOptions, NcclWorld, Solo};
        use gather8_kernels::cuda::{Cuda, probe};
        let visible = u32::try_from(probe()?.devices.len())?;
        let backend = Cuda::new(ordinal(launch, visible, share_gpu)?)?;
        let world = TcpWorld::join(launch, &JoinOptions::from_env()?)?;
        let control = world.control();
        let communicator: Arc<dyn Communicator<Cuda>> = if launch.world == 1 {
            Arc::new(Solo::new(backend.clone()))
        } else {
            let mut options = NcclOptions::default();
            options.share_gpu = share_gpu;
            let host = world.communicator(Cpu::new());
            NcclWorld::join(backend.clone(), host, Arc::clone(&control), &options)?
        };
        Ok(Self { backend, communicator, control })
    }
}

impl<B: Backend> Seat<B> {
    /// Rank 0 prints, and writes files.
    pub fn is_first(&self) -> bool {
        self.communicator.rank() == 0
    }

    /// All ranks go on, or none: each brings its result of what came before.
    ///
    /// # Errors
    /// This rank's own, else the one of the lowest rank that has one.
    pub fn agree<T>(&self, result: Result<T>, on: &str, patience: Duration) -> Result<T> {
        let op = Op { sequence: 0, name: "agreement", unit: on, deadline: patience };
        match result {
            Ok(value) => {
                self.control.veto(op, None).map_err(|error| anyhow!("{error}"))?;
                Ok(value)
            }
            Err(error) => {
                // This rank's error says more than what becomes of telling it.
                let _ = self.control.veto(op, Some(&format!("{error:#}")));
                Err(error)
            }
        }
    }

    /// Tells the others why this rank stops.
    pub fn announce(&self, failure: &dyn Display) {
        self.control.announce(&failure.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_the_only_gpu_or_the_one_of_its_local_rank() {
        let mut launch = Launch::explicit(5, 8, "test").unwrap();
        launch.local_rank = Some(1);
        assert_eq!(ordinal(&launch, 1, false).unwrap(), 0);
        assert_eq!(ordinal(&launch, 4, false).unwrap(), 1);
        launch.local_rank = Some(3);
        let error = ordinal(&launch, 2, false).unwrap_err().to_string();
        assert!(error.contains("local rank 3") && error.contains("--share-gpu"), "{error}");
        assert_eq!(ordinal(&launch, 2, true).unwrap(), 1);
        launch.local_rank = None;
        assert_eq!(ordinal(&launch, 8, false).unwrap(), 5);
        assert!(ordinal(&launch, 0, true).unwrap_err().to_string().contains("no GPU"));
    }
}
