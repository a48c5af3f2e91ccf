//! What a rank does when its launcher tells it to stop.
//!
//! mpirun sends SIGTERM to the survivors about a second after a rank has died. A rank that is told
//! to stop therefore looks for a moment whether a peer is lost, and says so; a healthy one finishes
//! its step.
//!
//! The signal reaches ranks at different moments. A trainer whose ranks shall all stop after the
//! same step puts [`Stop::requested`] into a message that they exchange in every step (with the
//! loss, say), and stops after a step in which any rank had it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::error::{Error, Result};

/// The exit code of a process that SIGTERM has ended, as shells give it.
pub const EXIT_CODE: i32 = 128 + SIGTERM;

/// How long a rank waits for news of a lost peer.
const NEWS: Duration = Duration::from_millis(500);

/// Whether this process was told to stop.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Watches for SIGTERM, on a thread of its own, from now on until the process ends. When it
    /// comes, [`requested`](Self::requested) turns true, and for half a second `check` is asked
    /// whether a peer is lost. If one is, `last_words` gets the sentence (to write it where it
    /// belongs) and the process ends with [`EXIT_CODE`]; else the program goes on, finishes its
    /// step and ends by itself, with [`FAREWELL`] and the same code.
    ///
    /// The thread lives as long as the process: let `check` hold the communicator weakly.
    ///
    /// # Errors
    /// [`Error::Usage`] if the system does not let the process watch.
    pub fn on_sigterm(
        check: impl Fn() -> Result<()> + Send + 'static,
        last_words: impl FnOnce(&str) + Send + 'static,
    ) -> Result<Self> {
        let refuse = |error: std::io::Error| Error::Usage {
            operation: "watch".to_owned(),
            unit: "SIGTERM".to_owned(),
            problem: error.to_string(),
        };
        let stop = Self::default();
        let requested = Arc::clone(&stop.0);
        let mut signals = Signals::new([SIGTERM]).map_err(refuse)?;
        let watch = move || {
            if signals.forever().next().is_none() {
                return;
            }
            requested.store(true, Ordering::Release);
            let until = Instant::now() + NEWS;
            while Instant::now() < until {
                if let Err(error) = check() {
                    last_words(&error.to_string());
                    std::process::exit(EXIT_CODE);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        std::thread::Builder::new().name("gather8-stop".to_owned()).spawn(watch).map_err(refuse)?;
        Ok(stop)
    }

    /// True once SIGTERM has come.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What a healthy rank says when it ends because of SIGTERM.
pub const FAREWELL: &str = "told to stop by the launcher";
