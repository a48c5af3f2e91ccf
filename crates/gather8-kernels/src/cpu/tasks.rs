//! A pass cut into pieces that several threads may share.

use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread;

use super::lane::lock;

/// Elements in a piece; fixed, so that the pieces do not depend on the number of threads. A whole
/// number of tiles of the norm.
pub(super) const PIECE: usize = 1 << 18;

/// Pieces of one pass; they touch different bytes, or words by atomics that commute.
#[derive(Default)]
pub(super) struct Tasks<'t> {
    list: Vec<Box<dyn FnOnce() + Send + 't>>,
    elements: usize,
}

impl<'t> Tasks<'t> {
    pub(super) fn push(&mut self, elements: usize, task: impl FnOnce() + Send + 't) {
        self.elements = self.elements.saturating_add(elements);
        self.list.push(Box::new(task));
    }

    /// Runs all, on at most so many threads, this one included. Small passes stay here: starting a
    /// thread costs more than they do.
    pub(super) fn run(self, threads: usize) {
        let threads = threads.min(self.list.len()).min(self.elements / PIECE);
        if threads <= 1 {
            self.list.into_iter().for_each(|task| task());
            return;
        }
        let tasks = Mutex::new(self.list.into_iter());
        let work = || {
            while let Some(task) = {
                let mut tasks = lock(&tasks);
                tasks.next()
            } {
                task();
            }
        };
        thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads)
                .filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
                .collect();
            work();
            for helper in helpers {
                if let Err(payload) = helper.join() {
                    resume_unwind(payload);
                }
            }
        });
    }
}
