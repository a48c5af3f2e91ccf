//! A bar on a terminal, a line every ten seconds elsewhere; both on stderr.

use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Between two lines when there is no terminal.
const INTERVAL: Duration = Duration::from_secs(10);

/// Progress of one run.
pub(crate) struct Progress {
    name: &'static str,
    steps: usize,
    bar: Option<ProgressBar>,
    last: Instant,
}

impl Progress {
    /// Starts at step 0 of `steps`.
    pub(crate) fn start(name: &'static str, steps: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps as u64).with_prefix(name);
            match ProgressStyle::with_template("{prefix:15} {wide_bar} {pos}/{len} {msg} {eta:>4}")
            {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        Self { name, steps, bar, last: Instant::now() }
    }

    /// Shows that `done` steps are done.
    pub(crate) fn step(&mut self, done: usize, loss: f64, tokens_per_s: f64) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("loss {loss:.3} {tokens_per_s:.0} tokens/s"));
            bar.set_position(done as u64);
        } else if self.last.elapsed() >= INTERVAL {
            self.last = Instant::now();
            let Self { name, steps, .. } = self;
            // A closed stderr is no reason to stop.
            let _ = writeln!(
                std::io::stderr(),
                "{name}: step {done} of {steps}, loss {loss:.3}, {tokens_per_s:.0} tokens/s"
            );
        }
    }

    /// Leaves the bar as it stands.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}
