//! Conformance cases: each is a function of one rank's [`Context`], written once and run on every
//! backend and communicator, at every world.
//!
//! Ranks as threads run under libtest ([`threads`]); ranks as processes run under a launcher, with
//! the same list of [`cases`].
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation is a failed case"
)]

pub mod cases;
#[cfg(feature = "cuda")]
pub mod lent;
pub mod model;
pub mod processes;
pub mod ten_steps;
pub mod threads;

use std::sync::Arc;
use std::time::Duration;

use gather8::Config;
use gather8_collectives::Communicator;
use gather8_kernels::Backend;

/// What a case knows of the rank that it runs on.
pub struct Context<B: Backend> {
    /// The rank's device.
    pub backend: B,
    /// The ranks.
    pub communicator: Arc<dyn Communicator<B>>,
}

impl<B: Backend> Context<B> {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.communicator.rank()
    }

    /// Ranks in the group.
    pub fn world(&self) -> u32 {
        self.communicator.world()
    }

    /// A configuration with a short deadline.
    pub fn config(&self) -> Config {
        let mut config = Config::default();
        config.deadline.0 = 20.0;
        config
    }

    /// What every rank passed, in rank order; all ranks call it.
    pub fn exchange(&self, unit: &str, message: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
        let deadline = Duration::from_secs(20);
        let op = gather8_collectives::Op { sequence: 0, name: "exchange", unit, deadline };
        Ok(self.communicator.exchange(op, message)?)
    }
}

/// A case: what every rank of a group does and expects.
pub type Case<B> = fn(&Context<B>) -> anyhow::Result<()>;
