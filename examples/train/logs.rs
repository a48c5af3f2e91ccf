//! Where a rank's events and spans go.

use std::fs::File;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Level, Metadata};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;

use crate::options::Settings;
use crate::trace::{Trace, TraceLayer};

/// The crates whose words are shown.
const LIBRARIES: [&str; 3] = ["gather8", "gather8_collectives", "gather8_kernels"];

/// A subscriber for one rank's threads: `rank-N.log` in `folder`, what the libraries say on stderr
/// (rank 0 at INFO, the others at WARN), and the trace when there is one.
///
/// # Errors
/// A log that cannot be written.
pub(crate) fn subscriber(
    folder: &Path,
    rank: usize,
    settings: &Settings,
    trace: Option<&Arc<Trace>>,
) -> Result<Dispatch> {
    let path = folder.join(format!("rank-{rank}.log"));
    if std::fs::metadata(&path).is_ok_and(|status| !status.is_file()) {
        anyhow::bail!("{} exists and is no regular file: give another --out", path.display());
    }
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let log = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(Arc::new(file))
        .with_filter(LevelFilter::from_level(settings.log));
    // The libraries' own words; what a step did goes to the progress line.
    let said = if rank == 0 || settings.log_all_ranks { Level::INFO } else { Level::WARN };
    let shown = move |metadata: &Metadata<'_>| {
        metadata.is_event()
            && *metadata.level() <= said
            && metadata.target().split("::").next().is_some_and(|of| LIBRARIES.contains(&of))
    };
    let screen = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_filter(filter_fn(shown));
    // The trace takes spans of every level, whatever the log leaves out.
    let trace = trace.map(|trace| TraceLayer::new(trace.clone(), rank));
    Ok(Dispatch::new(tracing_subscriber::registry().with(log).with(screen).with(trace)))
}
