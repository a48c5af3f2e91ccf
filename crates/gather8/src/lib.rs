#![doc = include_str!("../README.md")]
//!
//! [`Fsdp`] is built from a [`Config`], a [`Backend`](gather8_kernels::Backend) and a
//! [`Communicator`](gather8_collectives::Communicator); a training loop asks it for weights, hands
//! it gradients, and calls [`Fsdp::step`] and [`Fsdp::sync`].

mod agreement;
mod arena;
mod builder;
mod channel;
pub mod config;
mod error;
mod fsdp;
mod gradient;
pub mod hooks;
mod optimizer;
mod replay;
mod spec;
mod step;
mod unit;
mod unshard;
mod update;
mod view;
mod weight;

pub use agreement::{agree, digest};
pub use builder::FsdpBuilder;
pub use config::{Config, Scaling};
pub use error::{Error, Result};
pub use fsdp::{Fsdp, Phase, Traffic};
pub use gather8_collectives as collectives;
pub use gather8_kernels as kernels;
pub use optimizer::Schedule;
pub use replay::CapturedStep;
pub use spec::{Sharding, UnitId, UnitSpec, WeightId, WeightSpec};
pub use step::StepReport;
pub use unshard::UnitGuard;
pub use view::WeightView;
pub use weight::ShardedWeight;
