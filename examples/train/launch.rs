//! Runs in turn, the ranks of each as threads.

use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use gather8::agree;
use gather8::kernels::cpu::Cpu;
use gather8_examples::gpt::{WeightSpec, weights};
use gather8_examples::text::{MOBY_DICK, Windows};
use gather8_examples::whole_file::WholeFile;

use crate::fault::Faulty;
use crate::logs;
use crate::options::{Run, Settings, read_file};
use crate::rank::{RankContext, Stopped, run_rank};
use crate::report::{Output, Recorder};
use crate::runtime::Runtime;
use crate::trace::{Trace, write_run};
use crate::world::{Group, World};

/// How long the ranks wait for each other's settings.
const AGREEMENT: Duration = Duration::from_secs(60);
/// The longest text.
const TEXT_LIMIT: u64 = 1 << 30;

/// Trains every run of the settings.
///
/// # Errors
/// A text that is too short or cannot be read, an output folder that cannot be written, and the first
/// error of any rank.
pub(crate) fn train(world: &World, settings: &Settings) -> Result<Vec<Output>> {
    let own = match &settings.text {
        None => None,
        Some(path) => Some(
            read_file(path, TEXT_LIMIT)
                .with_context(|| format!("cannot read the text {}", path.display()))?,
        ),
    };
    let text = own.as_deref().unwrap_or(MOBY_DICK);
    let windows = Windows::new(text, settings.context, settings.seed)?;
    let specs = weights(&settings.shape());
    let digest = blake3::hash(text).to_hex();
    let once = |&run| train_once(world, settings, run, (windows, &digest), &specs).transpose();
    settings.runs.iter().filter_map(once).collect()
}

/// One run; its output where rank 0 is.
fn train_once(
    world: &World,
    settings: &Settings,
    run: Run,
    (windows, text): (Windows<'_>, &str),
    specs: &[WeightSpec],
) -> Result<Option<Output>> {
    let folder = settings.out.join(run.name());
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create the output folder {}", folder.display()))?;
    let own = world.own();
    let mut recorder = match own.contains(&0) {
        true => Some(Recorder::create(settings, run, &folder)?),
        false => None,
    };
    let trace = settings.trace.then(Trace::start);
    let training = Training { settings, run, text, specs, group: world.group(&folder)? };
    // The error that came first is the cause; the others are its consequences.
    let first_error = Mutex::new(None);

    // Every log is open before the first rank starts, since ranks wait for each other.
    let subscribers = own
        .map(|rank| Ok((rank, logs::subscriber(&folder, rank, settings, trace.as_ref())?)))
        .collect::<Result<Vec<_>>>()?;

    let finished = std::thread::scope(|scope| -> Result<Vec<_>> {
        let mut ranks = Vec::new();
        for (rank, subscriber) in subscribers {
            let (recorder, stop) = (recorder.take(), world.stop());
            let context = RankContext { rank, settings, windows, recorder, stop };
            let (training, first_error) = (&training, &first_error);
            let body = move || {
                tracing::dispatcher::with_default(&subscriber, || {
                    training.run(context).unwrap_or_else(|(error, _runtime)| {
                        if !error.is::<Stopped>() {
                            training.group.announce(&error);
                        }
                        let mut first = first_error.lock().unwrap_or_else(PoisonError::into_inner);
                        first.get_or_insert(error);
                        None
                    })
                })
            };
            let thread = std::thread::Builder::new().name(format!("rank {rank}"));
            match thread.spawn_scoped(scope, body) {
                Ok(thread) => ranks.push(thread),
                Err(error) => {
                    // Taken and dropped: the ranks that wait for this one see that it has left.
                    drop(training.group.communicator(rank, Cpu::new()));
                    let error = anyhow!("cannot start the thread of rank {rank}: {error}");
                    first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    break;
                }
            }
        }
        let join = |(rank, thread): (usize, std::thread::ScopedJoinHandle<'_, _>)| {
            thread.join().map_err(|_| anyhow!("rank {rank} panicked"))
        };
        ranks.into_iter().enumerate().map(join).collect()
    })?;
    if let Some(error) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    // The figures first: they do not depend on the trace.
    let output = finished.into_iter().flatten().next().map(Recorder::finish).transpose()?;
    write_run(trace, &folder, world.trace_number())?;
    Ok(output)
}

/// Writes a file that is there whole or not at all.
///
/// # Errors
/// A file that cannot be written.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<()> {
    let mut whole = WholeFile::create(path)?;
    let written = whole.file().write_all(text.as_bytes());
    written.with_context(|| format!("cannot write {}", path.display()))?;
    whole.finish()
}

/// What the ranks of a run share.
struct Training<'a> {
    settings: &'a Settings,
    run: Run,
    /// The text's digest.
    text: &'a str,
    specs: &'a [WeightSpec],
    group: Group<'a>,
}

impl Training<'_> {
    /// Trains one rank. An error comes with the runtime, whose end the other ranks notice: the error
    /// is to be kept before.
    fn run(
        &self,
        context: RankContext<'_>,
    ) -> Result<Option<Recorder>, (anyhow::Error, Option<Runtime>)> {
        let mut runtime = self.start(context.rank).map_err(|error| (error, None))?;
        let weights = Faulty::wrap(runtime.weights(), self.specs, self.settings.inject_fault);
        run_rank(context, weights, &mut runtime).map_err(|error| (error, Some(runtime)))
    }

    fn start(&self, rank: usize) -> Result<Runtime> {
        // What happens before the first step counts with it, so that every span names a step.
        let _span = tracing::error_span!("start", rank, step = 0).entered();
        self.group.introduce();
        let cpu = Cpu::new();
        let communicator = self.group.communicator(rank, cpu.clone())?;
        let start = || {
            agree(&*communicator, AGREEMENT, &self.lines()?)?;
            Runtime::build(self.settings, self.run, self.specs, cpu, Arc::clone(&communicator))
        };
        start().inspect_err(|error| tracing::error!("{error:#}"))
    }

    /// What must be the same on every rank, beside the model and the runtime's configuration.
    fn lines(&self) -> Result<Vec<String>> {
        let settings = serde_json::to_value(self.settings)?;
        let fields = settings.as_object().into_iter().flatten();
        let mut lines: Vec<_> = fields.map(|(name, value)| format!("{name} = {value}")).collect();
        lines.push(format!("text with digest {}", self.text));
        Ok(lines)
    }
}
