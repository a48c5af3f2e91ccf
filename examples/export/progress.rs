//! Progress on standard error: a bar on a terminal, else a line every ten seconds.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use gather8_examples::export::Progress;
use indicatif::{ProgressBar, ProgressStyle};

const INTERVAL: Duration = Duration::from_secs(10);

/// What fits standard error.
pub(crate) fn for_stderr() -> Box<dyn Progress + Send> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar(ProgressBar::hidden()))
    } else {
        Box::new(Lines { done: 0, total: 0, start: Instant::now(), last: Instant::now() })
    }
}

struct Bar(ProgressBar);

impl Progress for Bar {
    fn begin(&mut self, bytes: u64) {
        self.0 = ProgressBar::new(bytes);
        let template = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style);
        }
    }

    fn advance(&mut self, bytes: u64) {
        self.0.inc(bytes);
    }

    fn end(&mut self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

struct Lines {
    done: u64,
    total: u64,
    start: Instant,
    last: Instant,
}

impl Progress for Lines {
    fn begin(&mut self, bytes: u64) {
        self.total = bytes;
        (self.start, self.last) = (Instant::now(), Instant::now());
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        if self.last.elapsed() < INTERVAL {
            return;
        }
        self.last = Instant::now();
        let _ = writeln!(
            std::io::stderr(),
            "export: {} of {} MB after {} s",
            self.done / 1_000_000,
            self.total / 1_000_000,
            self.start.elapsed().as_secs()
        );
    }

    fn end(&mut self) {}
}
