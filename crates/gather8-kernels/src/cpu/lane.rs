//! A stream's queue, the thread that works it off, and how others wait for it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::failure::{Failure, Source, guard};
use super::history::Operation;

/// Locks; a panic elsewhere leaves nothing half-done behind any lock of this backend.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How far a stream has come. Operations are numbered from 1 in the order of issue.
#[derive(Debug)]
pub(super) struct Progress {
    done: AtomicU64,
    /// The smallest of `targets`, or `u64::MAX`.
    next_target: AtomicU64,
    /// What those who wait are waiting for.
    targets: Mutex<Vec<u64>>,
    reached: Condvar,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self {
            done: AtomicU64::new(0),
            next_target: AtomicU64::new(u64::MAX),
            targets: Mutex::new(Vec::new()),
            reached: Condvar::new(),
        }
    }

    /// True if operation `tick` and all before it are over; what they wrote is then visible.
    pub(super) fn is_done(&self, tick: u64) -> bool {
        self.done.load(Ordering::SeqCst) >= tick
    }

    /// Blocks until operation `tick` is over.
    pub(super) fn wait(&self, tick: u64) {
        if self.is_done(tick) {
            return;
        }
        let mut targets = lock(&self.targets);
        targets.push(tick);
        self.next_target.fetch_min(tick, Ordering::SeqCst);
        // Either the worker sees the target after it has raised `done`, and then it takes the lock
        // and notifies; or the target came later, and then `done` is seen here: both orders are
        // sequentially consistent.
        while !self.is_done(tick) {
            targets = self.reached.wait(targets).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(at) = targets.iter().position(|&target| target == tick) {
            targets.swap_remove(at);
        }
        let next = targets.iter().copied().min().unwrap_or(u64::MAX);
        self.next_target.store(next, Ordering::SeqCst);
    }

    /// Marks operation `tick` as over; wakes others only if one of them waits for no more.
    fn complete(&self, tick: u64) {
        self.done.store(tick, Ordering::SeqCst);
        if self.next_target.load(Ordering::SeqCst) <= tick {
            drop(lock(&self.targets));
            self.reached.notify_all();
        }
    }
}

/// Something to do in stream order.
pub(super) type Work = Box<dyn FnOnce() -> std::result::Result<(), Source> + Send>;

/// One entry of a queue; it counts as one operation.
pub(super) enum Step {
    /// Wait for another stream.
    Wait(Arc<Progress>, u64),
    /// An operation.
    Run(Arc<Operation>, Work),
}

#[derive(Default)]
struct Queue {
    steps: VecDeque<Step>,
    closed: bool,
    /// The worker sleeps.
    idle: bool,
}

/// What a stream's handle and its thread share.
pub(super) struct Lane {
    queue: Mutex<Queue>,
    filled: Condvar,
    pub(super) progress: Arc<Progress>,
}

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// True on the thread of a stream (of any CPU backend).
pub(super) fn on_worker() -> bool {
    IS_WORKER.with(Cell::get)
}

impl Lane {
    pub(super) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue::default()),
            filled: Condvar::new(),
            progress: Arc::new(Progress::new()),
        }
    }

    pub(super) fn push(&self, step: Step) {
        let mut queue = lock(&self.queue);
        queue.steps.push_back(step);
        if queue.idle {
            queue.idle = false;
            drop(queue);
            self.filled.notify_one();
        }
    }

    /// Lets the thread end once the queue is empty.
    pub(super) fn close(&self) {
        lock(&self.queue).closed = true;
        self.filled.notify_one();
    }

    /// The thread's main function.
    pub(super) fn work(&self, failure: &Failure, mut pauses: Option<Pauses>) {
        IS_WORKER.with(|flag| flag.set(true));
        let mut batch = VecDeque::new();
        let mut tick = 0;
        loop {
            {
                let mut queue = lock(&self.queue);
                while queue.steps.is_empty() {
                    if queue.closed {
                        return;
                    }
                    queue.idle = true;
                    queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                queue.idle = false;
                std::mem::swap(&mut queue.steps, &mut batch);
            }
            for step in batch.drain(..) {
                if let Some(pauses) = &mut pauses {
                    pauses.pause();
                }
                match step {
                    Step::Wait(progress, target) => progress.wait(target),
                    Step::Run(operation, work) => run(&operation, work, failure),
                }
                tick += 1;
                self.progress.complete(tick);
            }
        }
    }
}

/// Runs one operation, or drops it if the backend has failed.
fn run(operation: &Operation, work: Work, failure: &Failure) {
    let result = guard(&operation.label, move || {
        if failure.is_set() {
            drop(work);
            Ok(())
        } else {
            work()
        }
    });
    if let Err(source) = result {
        tracing::debug!(operation = %operation.label, stream = %operation.stream, error = %source, "an operation failed");
        failure.set(operation.label.to_string(), source);
    }
}

/// Pauses that make the order among streams vary; a function of the seed and the stream's number.
#[derive(Debug)]
pub(super) struct Pauses(u64);

impl Pauses {
    pub(super) fn new(seed: u64, stream: usize) -> Self {
        let mut pauses = Self(seed ^ (stream as u64).wrapping_mul(0xd134_2543_de82_ef95));
        pauses.next();
        pauses
    }

    /// SplitMix64 (Steele, Lea and Flood 2014).
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn pause(&mut self) {
        let random = self.next();
        match random & 3 {
            0 => {}
            1 => (0..random >> 8 & 3).for_each(|_| thread::yield_now()),
            _ => thread::sleep(Duration::from_micros((random >> 8) % 200)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn waiters_with_different_targets_all_wake() {
        for _ in 0..200 {
            let progress = Arc::new(Progress::new());
            let waiters: Vec<_> = [3, 1, 2, 3, 5, 1]
                .map(|target| {
                    let progress = Arc::clone(&progress);
                    thread::spawn(move || {
                        progress.wait(target);
                        assert!(progress.is_done(target));
                    })
                })
                .into_iter()
                .collect();
            for tick in 1..=5 {
                assert!(!progress.is_done(tick));
                progress.complete(tick);
            }
            for waiter in waiters {
                waiter.join().unwrap();
            }
            assert!(progress.targets.lock().unwrap().is_empty());
        }
    }
}
