//! A communicator with its own count of operations, and what was issued on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gather8_collectives::{Communicator, Op};
use gather8_kernels::Backend;

/// One of the group's communicators.
pub(crate) struct Channel<B: Backend> {
    pub(crate) communicator: Arc<dyn Communicator<B>>,
    sequence: AtomicU64,
    deadline: Duration,
}

impl<B: Backend> Channel<B> {
    pub(crate) fn new(communicator: Arc<dyn Communicator<B>>, deadline: Duration) -> Self {
        Self { communicator, sequence: AtomicU64::new(0), deadline }
    }

    /// The next operation. Issue it before asking for another.
    pub(crate) fn op<'a>(&self, name: &'a str, unit: &'a str) -> Op<'a> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        Op { sequence, name, unit, deadline: self.deadline }
    }
}
