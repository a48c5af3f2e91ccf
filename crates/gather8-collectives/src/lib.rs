#![doc = include_str!("../README.md")]

pub mod communicator;
pub mod error;
mod host;
pub mod local;
pub mod order;
mod shape;
pub mod solo;
pub mod table;
pub mod traffic;

pub use communicator::{AbortHandle, Communicator, Op, Reduce};
pub use error::{Error, Result};
pub use local::LocalWorld;
pub use order::OrderLog;
pub use solo::Solo;
pub use table::{AmaxTable, SlotKind, SlotSpec, TableConfig, TableState};
pub use traffic::{Counting, Traffic};
