//! A world of one rank, on any backend: nothing is sent and no library is loaded.

use std::sync::{Arc, Mutex, PoisonError};

use gather8_kernels::{Backend, Span};

use crate::communicator::{AbortHandle, Communicator, Op, Reduce};
use crate::error::{Error, Result};
use crate::shape;

/// The only rank of its world. A gather or a reduce-scatter is a copy in stream order, and nothing
/// where source and destination are the same bytes.
pub struct Solo<B: Backend> {
    backend: B,
    aborted: Arc<Mutex<Option<String>>>,
}

impl<B: Backend> Solo<B> {
    /// A world of one on this backend.
    pub fn new(backend: B) -> Self {
        Self { backend, aborted: Arc::default() }
    }

    fn copy(&self, from: &Span<B>, to: &Span<B>, on: &B::Stream) -> Result<()> {
        if from.is_empty() || shape::same(from, to) {
            return Ok(());
        }
        self.backend.copy(on, from, to).map_err(Error::from_backend)
    }
}

impl<B: Backend> Communicator<B> for Solo<B> {
    fn rank(&self) -> u32 {
        0
    }

    fn world(&self) -> u32 {
        1
    }

    fn all_gather(&self, op: Op<'_>, parts: &[(Span<B>, Span<B>)], on: &B::Stream) -> Result<()> {
        self.check()?;
        shape::check_all_gather(&op, 0, 1, parts)?;
        parts.iter().try_for_each(|(source, destination)| self.copy(source, destination, on))
    }

    fn reduce_scatter(
        &self,
        op: Op<'_>,
        reduce: Reduce,
        parts: &[(Span<B>, Span<B>)],
        on: &B::Stream,
    ) -> Result<()> {
        self.check()?;
        shape::check_reduce_scatter(&op, 0, 1, reduce, parts)?;
        parts.iter().try_for_each(|(source, destination)| self.copy(source, destination, on))
    }

    fn all_reduce(&self, op: Op<'_>, reduce: Reduce, span: &Span<B>, _: &B::Stream) -> Result<()> {
        self.check()?;
        shape::check_all_reduce(&op, reduce, span)
    }

    fn broadcast(&self, op: Op<'_>, root: u32, _: &Span<B>, _: &B::Stream) -> Result<()> {
        self.check()?;
        shape::check_root(&op, root, 1)
    }

    fn barrier(&self, _: Op<'_>) -> Result<()> {
        self.check()
    }

    fn split(&self, color: Option<u32>, _: u32) -> Result<Option<Arc<dyn Communicator<B>>>> {
        self.check()?;
        Ok(color.map(|_| -> Arc<dyn Communicator<B>> {
            Arc::new(Self { backend: self.backend.clone(), aborted: Arc::clone(&self.aborted) })
        }))
    }

    fn abort_handle(&self) -> AbortHandle {
        let aborted = Arc::clone(&self.aborted);
        AbortHandle::new(move |reason| {
            let mut slot = aborted.lock().unwrap_or_else(PoisonError::into_inner);
            slot.get_or_insert_with(|| reason.to_owned());
        })
    }

    fn check(&self) -> Result<()> {
        let aborted = self.aborted.lock().unwrap_or_else(PoisonError::into_inner);
        match &*aborted {
            Some(reason) => Err(Error::Aborted { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    fn exchange(&self, _: Op<'_>, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        Ok(vec![message.to_vec()])
    }
}
