//! Where a rank's events and spans go.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;

use crate::trace::{Trace, TraceLayer};

/// A subscriber for one rank's threads: `rank-N.log` in `folder`, and the trace when there is one.
///
/// # Errors
/// A log that cannot be written.
pub(crate) fn subscriber(
    folder: &Path,
    rank: usize,
    level: tracing::Level,
    trace: Option<&Arc<Trace>>,
) -> Result<Dispatch> {
    let path = folder.join(format!("rank-{rank}.log"));
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let log = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(Arc::new(file))
        .with_filter(LevelFilter::from_level(level));
    // The trace takes spans of every level, whatever the log leaves out.
    let trace = trace.map(|trace| TraceLayer::new(trace.clone(), rank));
    Ok(Dispatch::new(tracing_subscriber::registry().with(log).with(trace)))
}
