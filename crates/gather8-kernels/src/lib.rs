//! The number work of fully sharded training in float8: casts, amax, scales and a fused AdamW with
//! 16-bit remainders, as passes over lists of tensors behind one trait, [`Backend`].
//!
//! A pass is described by [`Job`]s, planned once ([`Backend::plan`]) and launched as often as
//! needed ([`Backend::run`]). The rules of every pass are written as plain scalar functions in
//! [`scalar`]; each backend must give the same bits.

pub mod backend;
pub mod check;
pub mod cpu;
pub mod error;
pub mod fast;
pub mod format;
pub mod job;
pub mod layout;
pub mod scalar;
pub mod scale;

pub use backend::{Backend, Memory, Span, Tensor};
pub use error::{Error, Result};
pub use format::{DType, E4M3, E5M2, Format};
pub use job::Job;
