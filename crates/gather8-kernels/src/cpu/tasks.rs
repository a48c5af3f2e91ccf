//! A pass cut into pieces that several threads may share.

use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread;

use crate::layout::{NORM_TILE, NormRecord};
use crate::scalar::{Elements, ElementsMut, Shard};

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

    /// Cuts something into pieces of [`PIECE`] elements and a rest. An empty thing is one piece,
    /// since an empty tensor touches its slot all the same.
    pub(super) fn push_pieces<T: Split + Send + 't>(
        &mut self,
        whole: T,
        task: impl Fn(T) + Copy + Send + 't,
    ) {
        let mut rest = whole;
        loop {
            let len = rest.elements();
            if len <= PIECE {
                return self.push(len, move || task(rest));
            }
            let (piece, after) = rest.cut(PIECE);
            self.push(PIECE, move || task(piece));
            rest = after;
        }
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
        let next = || lock(&tasks).next();
        let work = || {
            while let Some(task) = next() {
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

/// Elements that can be cut in two.
pub(super) trait Split: Sized {
    fn elements(&self) -> usize;
    /// The first `mid` elements, of which there are as many, and the rest.
    fn cut(self, mid: usize) -> (Self, Self);
}

impl Split for Elements<'_> {
    fn elements(&self) -> usize {
        self.len()
    }

    fn cut(self, mid: usize) -> (Self, Self) {
        self.split_at(mid)
    }
}

impl Split for ElementsMut<'_> {
    fn elements(&self) -> usize {
        self.len()
    }

    fn cut(self, mid: usize) -> (Self, Self) {
        self.split_at(mid)
    }
}

impl Split for Shard<'_> {
    fn elements(&self) -> usize {
        self.len()
    }

    fn cut(self, mid: usize) -> (Self, Self) {
        self.split_at(mid)
    }
}

impl<T> Split for &[T] {
    fn elements(&self) -> usize {
        self.len()
    }

    fn cut(self, mid: usize) -> (Self, Self) {
        self.split_at(mid)
    }
}

impl<T> Split for &mut [T] {
    fn elements(&self) -> usize {
        self.len()
    }

    fn cut(self, mid: usize) -> (Self, Self) {
        self.split_at_mut(mid)
    }
}

/// A norm's records, cut at the tile that begins with an element.
pub(super) struct Tiles<'a>(pub(super) &'a mut [NormRecord]);

impl Split for Tiles<'_> {
    fn elements(&self) -> usize {
        self.0.len() * NORM_TILE as usize
    }

    fn cut(self, mid: usize) -> (Self, Self) {
        let (a, b) = self.0.split_at_mut(mid / NORM_TILE as usize);
        (Self(a), Self(b))
    }
}

/// Source and destination, cut at the same element; the first one's length counts.
impl<A: Split, B: Split> Split for (A, B) {
    fn elements(&self) -> usize {
        self.0.elements()
    }

    fn cut(self, mid: usize) -> (Self, Self) {
        let ((a, b), (c, d)) = (self.0.cut(mid), self.1.cut(mid));
        ((a, c), (b, d))
    }
}

#[cfg(test)]
mod tests {
    use super::{PIECE, Tasks};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn pieces_cover_everything_once_on_any_number_of_threads() {
        for elements in [0, 1, PIECE, PIECE + 1, 5 * PIECE + 17] {
            for threads in [1, 2, 7] {
                let mut bytes = vec![0_u8; elements];
                let calls = AtomicUsize::new(0);
                let mut tasks = Tasks::default();
                let calls_ref = &calls;
                tasks.push_pieces(bytes.as_mut_slice(), move |piece| {
                    calls_ref.fetch_add(1, Ordering::Relaxed);
                    piece.iter_mut().for_each(|byte| *byte += 1);
                });
                tasks.run(threads);
                assert!(bytes.iter().all(|&byte| byte == 1), "{elements} on {threads}");
                assert_eq!(calls.into_inner(), elements.div_ceil(PIECE).max(1));
            }
        }
    }

    #[test]
    fn a_panic_on_a_helper_thread_comes_back() {
        let mut tasks = Tasks::default();
        for _ in 0..8 {
            tasks.push(PIECE, || panic!("a piece"));
        }
        let payload = catch_unwind(AssertUnwindSafe(|| tasks.run(4))).unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"a piece"));
    }
}
