//! The first failure of a backend, which every later call returns.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};

/// What an operation failed with.
pub(super) type Source = Arc<dyn std::error::Error + Send + Sync>;

/// Where the first failure is kept.
#[derive(Debug, Default)]
pub(super) struct Failure(OnceLock<Error>);

impl Failure {
    /// Returns the failure, if there is one.
    pub(super) fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// True once an operation has failed.
    pub(super) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    /// Keeps the first failure; later ones are consequences and are dropped.
    pub(super) fn set(&self, operation: String, source: Source) {
        let _ = self.0.set(Error::Stream { operation, source });
    }
}

/// An operation panicked.
#[derive(Debug, thiserror::Error)]
#[error("{operation} panicked: {message}")]
struct Panicked {
    operation: String,
    message: String,
}

/// Runs an operation and turns a panic into an error.
pub(super) fn guard(
    operation: &str,
    work: impl FnOnce() -> std::result::Result<(), Source>,
) -> std::result::Result<(), Source> {
    // The operation's own data is gone after a panic, and what it wrote to is never read again:
    // the failure stops every later operation of the backend.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(payload) => {
            let message = message_of(payload.as_ref());
            // A payload may itself panic when it is dropped.
            let _ = catch_unwind(AssertUnwindSafe(move || drop(payload)));
            Err(Arc::new(Panicked { operation: operation.to_owned(), message }))
        }
    }
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}
