//! metrics.jsonl, and the closing table.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use gather8_examples::whole_file::WholeFile;
use serde::Serialize;
use serde_json::json;

use crate::options::{Run, Settings};
use crate::progress::Progress;
use crate::runtime;

/// Layout of metrics.jsonl; it grows when a field changes its meaning.
const SCHEMA: u32 = 1;

/// Steps whose mean loss stands for a run's result.
const LAST: usize = 20;

/// One line of metrics.jsonl.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct StepRecord {
    /// From 0.
    pub(crate) step: usize,
    /// Mean loss of the global batch in nats per byte, before the update.
    pub(crate) loss: f64,
    /// Learning rate of the update.
    pub(crate) lr: f64,
    /// Norm of the whole gradient before clipping.
    pub(crate) grad_norm: f64,
    /// Bytes of text per second, all ranks together.
    pub(crate) tokens_per_s: f64,
    /// Bytes that all-gathers delivered to each rank.
    pub(crate) gathered_bytes: u64,
    /// Bytes that each rank put into reduce-scatters.
    pub(crate) reduced_bytes: u64,
    /// Largest absolute value of any float8 weight.
    pub(crate) amax_max: f64,
    /// Weights that the cast to float8 clamped.
    pub(crate) saturated: u64,
}

/// A finished run.
#[derive(Debug)]
pub(crate) struct Output {
    /// Which.
    pub(crate) run: Run,
    /// Every step.
    pub(crate) records: Vec<StepRecord>,
    /// From the first step's start to the last one's end.
    pub(crate) time: Duration,
    /// Bytes of text per step.
    pub(crate) tokens: usize,
}

/// Writes metrics.jsonl under a temporary name and gives it its own when the run is complete; a run
/// that fails after its first step leaves none, nor that of a run before it.
pub(crate) struct Recorder {
    run: Run,
    /// What an earlier run has left, until the first step is done.
    stale: Vec<PathBuf>,
    file: WholeFile,
    records: Vec<StepRecord>,
    progress: Progress,
    started: Instant,
    tokens: usize,
}

impl Recorder {
    /// Starts the metrics of a run in `folder`.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn create(settings: &Settings, run: Run, folder: &Path) -> Result<Self> {
        let path = folder.join("metrics.jsonl");
        let file = WholeFile::create(&path)?;
        let mut recorder = Self {
            run,
            stale: vec![path, settings.out.join("loss.svg")],
            file,
            records: Vec::new(),
            progress: Progress::start(run.name(), settings.steps),
            started: Instant::now(),
            tokens: settings.batch * settings.context,
        };
        let configuration = json!({
            "run": run,
            "training": settings,
            "runtime": runtime::config(settings, run),
        });
        let digest = blake3::hash(configuration.to_string().as_bytes()).to_string();
        recorder.line(&json!({
            "header": { "schema": SCHEMA, "configuration": configuration, "digest": digest }
        }))?;
        Ok(recorder)
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        let written = self.file.file().write_all(line.as_bytes());
        written.with_context(|| format!("cannot write {}", self.file.path().display()))
    }

    /// Takes one step's figures; the first of them end those of an earlier run.
    ///
    /// # Errors
    /// A file that cannot be written or removed.
    pub(crate) fn step(&mut self, record: StepRecord) -> Result<()> {
        for stale in std::mem::take(&mut self.stale) {
            match std::fs::remove_file(&stale) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("cannot remove {}", stale.display()));
                }
                _ => {}
            }
        }
        self.line(&record)?;
        self.progress.step(record.step + 1, record.loss, record.tokens_per_s);
        self.records.push(record);
        Ok(())
    }

    /// Completes the file.
    ///
    /// # Errors
    /// A file that cannot be flushed or renamed.
    pub(crate) fn finish(self) -> Result<Output> {
        let time = self.started.elapsed();
        self.progress.finish();
        self.file.finish()?;
        Ok(Output { run: self.run, records: self.records, time, tokens: self.tokens })
    }
}

impl Output {
    /// Mean loss of the last steps.
    pub(crate) fn final_loss(&self) -> f64 {
        let last = self.records.iter().rev().take(LAST);
        last.clone().map(|record| record.loss).sum::<f64>() / last.count() as f64
    }
}

/// A row per run.
pub(crate) fn table(outputs: &[Output]) -> String {
    let base = outputs.iter().find(|output| output.run == Run::Bf16).map(Output::final_loss);
    let mut text = format!(
        "{:<15} {:>14} {:>8} {:>9} {:>8} {:>14} {:>14} {:>16}\n",
        "run",
        "loss (last 20)",
        "to bf16",
        "tokens/s",
        "seconds",
        "gathered/step",
        "reduced/step",
        "saturated/rank 0"
    );
    for output in outputs {
        let loss = output.final_loss();
        let to_base =
            base.map_or_else(String::new, |base| format!("{:+.2} %", 100.0 * (loss / base - 1.0)));
        let steps = output.records.len().max(1);
        let seconds = output.time.as_secs_f64();
        let sum = |field: fn(&StepRecord) -> u64| output.records.iter().map(field).sum::<u64>();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<15} {loss:>14.4} {to_base:>8} {:>9.0} {seconds:>8.1} {:>14} {:>14} {:>16}",
            output.run.name(),
            (output.tokens * steps) as f64 / seconds,
            kilobytes(sum(|record| record.gathered_bytes) / steps as u64),
            kilobytes(sum(|record| record.reduced_bytes) / steps as u64),
            sum(|record| record.saturated),
        );
    }
    text
}

fn kilobytes(bytes: u64) -> String {
    format!("{:.1} kB", bytes as f64 / 1000.0)
}
