//! Collectives that never hang, and one table for every amax of a model.
//!
//! [`Communicator`] is what fully sharded training needs of a collective library: grouped
//! all-gathers and reduce-scatters, a MAX and a SUM all-reduce, broadcast and barrier, each with a
//! name, a sequence number and a deadline, issued on a [`Backend`](gather8_kernels::Backend)'s
//! stream. A rank that dies, leaves or falls behind makes every other rank return an error that
//! names it.

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
