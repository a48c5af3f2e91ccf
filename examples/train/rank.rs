//! The training loop of one rank.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use gather8::collectives::stop::{FAREWELL, Stop};
use gather8_examples::driver::Driver;
use gather8_examples::gpt::Gpt;
use gather8_examples::text::{Windows, share};
use gather8_examples::weights::Weights;

use crate::options::Settings;
use crate::report::{Recorder, StepRecord};

/// What a rank is told before it starts.
pub(crate) struct RankContext<'a> {
    /// This rank.
    pub(crate) rank: usize,
    /// What to train.
    pub(crate) settings: &'a Settings,
    /// The text.
    pub(crate) windows: Windows<'a>,
    /// Takes every step's figures, on rank 0.
    pub(crate) recorder: Option<Recorder>,
    /// Whether the launcher wants an end.
    pub(crate) stop: Stop,
}

/// The launcher wanted an end: the step was finished, and what was recorded is kept.
#[derive(Debug)]
pub(crate) struct Stopped;

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(FAREWELL)
    }
}

impl std::error::Error for Stopped {}

/// Trains to the end; returns the recorder that it was given.
///
/// # Errors
/// The first error of the weights or the driver, and a loss or gradient that is not finite.
pub(crate) fn run_rank(
    context: RankContext<'_>,
    weights: Arc<dyn Weights>,
    driver: &mut dyn Driver,
) -> Result<Option<Recorder>> {
    let RankContext { rank, settings, windows, mut recorder, stop } = context;
    let model = Gpt::new(settings.shape(), weights)?;
    let tokens = (settings.batch * settings.context) as f64;
    let parts = settings.microbatches * settings.ranks;
    for step in 0..settings.steps {
        // At the most important level, so that every log line and every span inside names them.
        let _span = tracing::error_span!("step", rank, step).entered();
        let mut run = || -> Result<(StepRecord, bool)> {
            let started = Instant::now();
            let mut local = 0.0;
            for microbatch in 0..settings.microbatches {
                let samples = share(settings.batch, microbatch * settings.ranks + rank, parts);
                let batch = windows.batch(step as u64, samples);
                // The runtime takes the plain mean over ranks and microbatches; this makes it the
                // mean over samples when their shares differ.
                let factor = (batch.sequences * parts) as f64 / settings.batch as f64;
                driver.begin_microbatch(microbatch, settings.microbatches)?;
                local += factor * model.train(&batch, factor)?;
                driver.finish_backward()?;
            }
            let lr = settings.learning_rate(step);
            let local = local / settings.microbatches as f64;
            let (loss, stopping) = driver.agree(local, stop.requested())?;
            if !loss.is_finite() {
                bail!("the loss is {loss} at step {step}: lower --lr, which is {}", settings.lr);
            }
            let stats = driver.step(lr)?;
            if !stats.grad_norm.is_finite() {
                let norm = stats.grad_norm;
                bail!("the gradient's norm is {norm} at step {step}: lower --lr, {}", settings.lr);
            }
            let record = StepRecord {
                step,
                loss,
                lr,
                grad_norm: stats.grad_norm,
                tokens_per_s: tokens / started.elapsed().as_secs_f64(),
                gathered_bytes: stats.gathered_bytes,
                reduced_bytes: stats.reduced_bytes,
                amax_max: stats.amax_max,
                saturated: stats.saturated,
            };
            tracing::info!(loss, lr, grad_norm = record.grad_norm, "step done");
            Ok((record, stopping))
        };
        let done = run().and_then(|(record, stopping)| {
            recorder.as_mut().map_or(Ok(()), |recorder| recorder.step(record))?;
            Ok(stopping)
        });
        let stopping = done.inspect_err(|error| tracing::error!("{error:#}"))?;
        if stopping {
            tracing::info!("{FAREWELL}");
            recorder.map(Recorder::finish).transpose()?;
            return Err(Stopped.into());
        }
    }
    Ok(recorder)
}
