//! Vector clocks: which operations of every stream come before a point.

/// For every stream, by number, how many of its operations come before. Streams that are not listed
/// stand at 0; a stream's first operation has tick 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    /// The last operation of `stream` that comes before.
    pub(super) fn get(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    /// True if operation `tick` of `stream` comes before.
    pub(super) fn covers(&self, stream: usize, tick: u64) -> bool {
        self.get(stream) >= tick
    }

    /// Moves `stream` forward to `tick`.
    pub(super) fn advance(&mut self, stream: usize, tick: u64) {
        if stream >= self.0.len() {
            self.0.resize(stream + 1, 0);
        }
        if let Some(entry) = self.0.get_mut(stream) {
            *entry = (*entry).max(tick);
        }
    }

    /// Adds everything that comes before `other`.
    pub(super) fn join(&mut self, other: &Self) {
        if other.0.len() > self.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Clock;

    #[test]
    fn joins_take_the_later_of_each() {
        let mut a = Clock::default();
        a.advance(0, 3);
        a.advance(2, 1);
        let mut b = Clock::default();
        b.advance(0, 1);
        b.advance(3, 7);
        a.join(&b);
        assert_eq!([a.get(0), a.get(1), a.get(2), a.get(3), a.get(9)], [3, 0, 1, 7, 0]);
        assert!(a.covers(0, 3) && !a.covers(0, 4) && a.covers(9, 0));
        a.advance(3, 2);
        assert_eq!(a.get(3), 7, "a clock never goes back");
    }
}
