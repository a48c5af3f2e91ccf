//! Collectives that never hang, and one table for every amax of a model.
//!
//! [`Communicator`] is what fully sharded training needs of a collective library: grouped
//! all-gathers and reduce-scatters, a MAX and a SUM all-reduce, broadcast and barrier, each with a
//! name, a sequence number and a deadline, issued on a [`Backend`](gather8_kernels::Backend)'s
//! stream. A rank that dies, leaves or falls behind makes every other rank return an error that
//! names it.

pub mod communicator;
pub mod error;

pub use communicator::{AbortHandle, Communicator, Op, Reduce};
pub use error::{Error, Result};
