#![doc = include_str!("../README.md")]

pub mod communicator;
pub mod control;
pub mod error;
mod host;
pub mod launch;
pub mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
mod net;
pub mod order;
mod shape;
pub mod solo;
#[cfg(unix)]
pub mod stop;
pub mod table;
pub mod tcp;
pub mod traffic;

pub use communicator::{AbortHandle, Communicator, Op, Reduce};
pub use control::Control;
pub use error::{Error, Result};
pub use launch::Launch;
pub use local::LocalWorld;
#[cfg(feature = "cuda")]
pub use nccl::{NcclOptions, NcclWorld};
pub use order::OrderLog;
pub use solo::Solo;
pub use table::{AmaxTable, SlotKind, SlotSpec, TableConfig, TableState};
pub use tcp::{JoinOptions, TcpWorld, Token};
pub use traffic::{Counting, Traffic};
