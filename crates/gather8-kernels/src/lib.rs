#![doc = include_str!("../README.md")]
//!
//! A pass is described by [`Job`]s, planned once ([`Backend::plan`]) and launched as often as
//! needed ([`Backend::run`]).

pub mod backend;
pub mod check;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod error;
pub mod fast;
pub mod format;
pub mod job;
pub mod layout;
pub mod scalar;
pub mod scale;
pub mod simd;

pub use backend::{Backend, Memory, Span, Tensor};
pub use error::{Error, Result};
pub use format::{DType, E4M3, E5M2, Format};
pub use job::Job;
