//! Spans as a Chrome trace (the "Trace Event Format"; chrome://tracing and Perfetto read it).

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Fields that a span has of those around it.
const INHERITED: [&str; 2] = ["rank", "step"];

/// The spans of all ranks of a run.
pub(crate) struct Trace {
    started: Instant,
    events: Mutex<Vec<Value>>,
}

impl Trace {
    /// An empty trace; its time starts now.
    pub(crate) fn start() -> Arc<Self> {
        Arc::new(Self { started: Instant::now(), events: Mutex::default() })
    }

    fn push(&self, event: Value) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Writes the file whole or not at all.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let text = serde_json::to_string(&json!({ "traceEvents": *events }))?;
        crate::launch::write_whole(path, &text)
    }
}

/// Turns one rank's spans into events of a trace.
pub(crate) struct TraceLayer {
    trace: Arc<Trace>,
    rank: usize,
}

impl TraceLayer {
    /// A layer for `rank`.
    pub(crate) fn new(trace: Arc<Trace>, rank: usize) -> Self {
        trace.push(json!({
            "ph": "M", "name": "thread_name", "pid": 0, "tid": rank,
            "args": { "name": format!("rank {rank}") }
        }));
        Self { trace, rank }
    }
}

/// What a span carries between its events.
#[derive(Default)]
struct Open {
    fields: Map<String, Value>,
    entered: Option<Instant>,
}

impl Visit for Open {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields.insert(field.name().into(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name().into(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.fields.insert(field.name().into(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.fields.insert(field.name().into(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.fields.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.fields.insert(field.name().into(), value.into());
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut open = Open::default();
        if let Some(parent) = span.parent()
            && let Some(around) = parent.extensions().get::<Open>()
        {
            for name in INHERITED {
                if let Some(value) = around.fields.get(name) {
                    open.fields.insert(name.into(), value.clone());
                }
            }
        }
        attributes.record(&mut open);
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            values.record(open);
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            open.entered = Some(Instant::now());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(open) = extensions.get_mut::<Open>() else { return };
        let Some(entered) = open.entered.take() else { return };
        // Microseconds, as the format wants them.
        let micros = |duration: std::time::Duration| duration.as_secs_f64() * 1e6;
        self.trace.push(json!({
            "ph": "X", "name": span.name(), "pid": 0, "tid": self.rank,
            "ts": micros(entered.duration_since(self.trace.started)),
            "dur": micros(entered.elapsed()),
            "args": open.fields
        }));
    }
}

/// Writes a run's trace, if there is one: `trace.json`, or with a number if ranks are processes.
pub(crate) fn write_run(
    trace: Option<Arc<Trace>>,
    folder: &Path,
    number: Option<u32>,
) -> Result<()> {
    let Some(trace) = trace else { return Ok(()) };
    let name = match number {
        Some(number) => format!("trace-{number}.json"),
        None => "trace.json".to_owned(),
    };
    trace.write(&folder.join(name)).context("the trace is lost")
}
