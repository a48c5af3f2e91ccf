//! The command line and the configuration file, merged and checked.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use gather8_examples::gpt::Shape;
use gather8_examples::text::VOCABULARY;
use serde::{Deserialize, Serialize};

/// Trains a small GPT whose weights travel in float8; ranks are threads of this process, or
/// processes under mpirun, srun or torchrun.
///
/// Without --gather and --scaling it trains three times - weights gathered in BF16, in float8 with
/// dynamic and with delayed scaling - and draws the three loss curves into one picture.
#[derive(Debug, Default, Parser, Deserialize)]
#[command(name = "train", version, after_help = AFTER)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct Options {
    /// Ranks: each holds its share of every weight and runs as a thread [default: 4, or as many as
    /// mpirun, srun or torchrun have started]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// What travels when a weight is gathered [default: all three runs, as --compare]
    #[arg(long, value_enum)]
    gather: Option<Gather>,
    /// Where a float8 weight's scale comes from: its own largest value, or those of the versions
    /// before it [default: dynamic]
    #[arg(long, value_enum)]
    scaling: Option<Scaling>,
    /// Float8 format of gathered weights [default: e4m3]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Versions that delayed scaling remembers [default: 16]
    #[arg(long, value_name = "N")]
    history: Option<usize>,
    /// Train in BF16, float8 dynamic and float8 delayed in turn, from the same seed [default]
    #[arg(long)]
    compare: bool,
    /// Optimizer steps of each run [default: 500]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Sequences of one step, shared out over ranks and microbatches [default: 16]
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Microbatches of one step on each rank, whose gradients are added up [default: 1]
    #[arg(long, value_name = "N")]
    microbatches: Option<usize>,
    /// Bytes of one sequence [default: 64]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Values per byte between blocks [default: 112]
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// Attention heads; they divide the width [default: 4]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Blocks, each a unit that is gathered on its own [default: 2]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Largest learning rate, reached after the warm-up; it then falls along a cosine to a tenth
    /// [default: 0.004]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    lr: Option<f64>,
    /// Steps over which the learning rate rises [default: a tenth of the steps]
    #[arg(long, value_name = "N")]
    warmup: Option<usize>,
    /// Weight decay of linear weights; norms, biases and embeddings have none [default: 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    weight_decay: Option<f64>,
    /// Gradients whose norm is larger are scaled down to it [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    max_grad_norm: Option<f64>,
    /// Seed of the initial weights and of the batches [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Text to learn instead of Moby-Dick, byte by byte
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Folder for metrics, logs and loss.svg [default: out]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write trace.json, a Chrome trace with a span per phase and unit, for every run
    #[arg(long)]
    trace: bool,
    /// What moves the bytes between processes that mpirun, srun or torchrun has started; mpi needs the
    /// feature of that name [default: tcp]
    #[arg(long, value_enum)]
    communicator: Option<Mover>,
    /// Print what every rank logs at INFO to stderr, not rank 0 alone
    #[arg(long)]
    log_all_ranks: bool,
    /// Least important level in rank-N.log: error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Break the training on purpose, to check the checks: block weights decoded 64 times too small,
    /// one unit frozen at its first gathered values, or one unit's gradients replaced by zeros
    #[arg(long, value_enum, value_name = "FAULT")]
    inject_fault: Option<Fault>,
    /// TOML file with these options, named as here without the dashes in front; the command line
    /// overrides it
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,
}

const AFTER: &str = "\
Files: DIR/RUN/metrics.jsonl, DIR/RUN/rank-N.log and with --trace DIR/RUN/trace.json, where RUN is \
bf16, float8-dynamic or float8-delayed; DIR/loss.svg. Ranks that are processes (mpirun -n 4 train) \
write rank-N.log and trace-N.json each, rank 0 the rest.
RAYON_NUM_THREADS, when not set, becomes cores / ranks, at least 1.
Exit code: 0; 2 for a wrong command line or configuration; 143 when the launcher says stop; 1 for \
everything else.";

/// What travels when a weight is gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Gather {
    /// One byte per element.
    Float8,
    /// Two bytes per element.
    Bf16,
}

/// Where the scale of a float8 weight comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Scaling {
    /// Its own largest absolute value.
    Dynamic,
    /// The largest absolute value of the versions before it.
    Delayed,
}

/// A float8 format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// Largest value 448.
    E4m3,
    /// Largest value 57344.
    E5m2,
}

/// What moves bytes between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mover {
    /// Connections between every two ranks.
    Tcp,
    /// The MPI that started them.
    Mpi,
}

/// A way to break the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// Decoded block weights times 2^-6.
    Scale,
    /// One unit frozen at its first gathered values.
    Stale,
    /// One unit's gradients replaced by zeros.
    DropGradient,
}

/// One training run among those of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Run {
    /// Weights gathered in BF16.
    Bf16,
    /// Weights gathered in float8 with dynamic scaling.
    Float8Dynamic,
    /// Weights gathered in float8 with delayed scaling.
    Float8Delayed,
}

impl Run {
    /// The name of its folder, its curve and its row.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Float8Dynamic => "float8-dynamic",
            Self::Float8Delayed => "float8-delayed",
        }
    }
}

/// Everything that a training depends on, with defaults filled in.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Settings {
    /// Threads.
    pub(crate) ranks: usize,
    /// Trainings in order.
    #[serde(skip)]
    pub(crate) runs: Vec<Run>,
    /// Float8 format.
    pub(crate) format: Format,
    /// Versions that delayed scaling remembers.
    pub(crate) history: usize,
    /// Optimizer steps.
    pub(crate) steps: usize,
    /// Sequences of one step.
    pub(crate) batch: usize,
    /// Microbatches of one step.
    pub(crate) microbatches: usize,
    /// Bytes of one sequence.
    pub(crate) context: usize,
    /// Values per byte between blocks.
    pub(crate) width: usize,
    /// Attention heads.
    pub(crate) heads: usize,
    /// Blocks.
    pub(crate) layers: usize,
    /// Largest learning rate.
    pub(crate) lr: f64,
    /// Steps of the warm-up.
    pub(crate) warmup: usize,
    /// Weight decay of linear weights.
    pub(crate) weight_decay: f64,
    /// Largest norm of the gradient.
    pub(crate) max_grad_norm: f64,
    /// Seed of weights and batches.
    pub(crate) seed: u64,
    /// Text instead of Moby-Dick.
    #[serde(serialize_with = "shown")]
    pub(crate) text: Option<PathBuf>,
    /// Output folder.
    #[serde(skip)]
    pub(crate) out: PathBuf,
    /// Whether to write a Chrome trace.
    #[serde(skip)]
    pub(crate) trace: bool,
    /// What moves bytes between processes.
    #[serde(skip)]
    pub(crate) communicator: Mover,
    /// Whether every rank prints its log.
    #[serde(skip)]
    pub(crate) log_all_ranks: bool,
    /// Level of the logs.
    #[serde(skip)]
    pub(crate) log: tracing::Level,
    /// A fault to inject.
    pub(crate) inject_fault: Option<Fault>,
}

/// A path as it is shown: names need not be Unicode.
fn shown<S: serde::Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.display().to_string()).serialize(serializer)
}

impl Settings {
    /// Sizes of the model.
    pub(crate) fn shape(&self) -> Shape {
        Shape {
            vocabulary: VOCABULARY,
            context: self.context,
            width: self.width,
            heads: self.heads,
            layers: self.layers,
        }
    }

    /// The learning rate of a step: a linear warm-up, then a cosine down to a tenth.
    pub(crate) fn learning_rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / self.warmup as f64;
        }
        let length = self.steps.saturating_sub(self.warmup + 1).max(1);
        let done = (step - self.warmup) as f64 / length as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos());
        self.lr * (0.1 + 0.9 * cosine)
    }
}

/// What the command line asks for.
#[derive(Debug)]
pub(crate) enum Request {
    /// Text for stdout: help or version.
    Show(String),
    /// A training.
    Run(Box<Settings>),
}

/// An error with the exit code that it means.
#[derive(Debug)]
pub(crate) struct Rejected {
    /// One sentence.
    pub(crate) error: anyhow::Error,
    /// 2 for usage, 1 for the rest.
    pub(crate) code: u8,
}

/// Reads the command line and the configuration file that it names. `launched` is the number of
/// ranks that a launcher has started, if one has.
///
/// # Errors
/// Wrong usage with code 2; a configuration file that cannot be read with code 1.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    launched: Option<usize>,
) -> Result<Request, Rejected> {
    let usage = |error| Rejected { error, code: 2 };
    let matches = match Options::command().try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(error) if !error.use_stderr() => return Ok(Request::Show(error.render().to_string())),
        Err(error) => return Err(usage(one_sentence(&error))),
    };
    let given = Options::from_arg_matches(&matches).map_err(|error| usage(one_sentence(&error)))?;
    let filed = match &given.config {
        None => Options::default(),
        Some(path) => {
            let text = read_file(path, 1 << 20)
                .and_then(|bytes| Ok(String::from_utf8(bytes)?))
                .with_context(|| format!("cannot read the configuration {}", path.display()))
                .map_err(|error| Rejected { error, code: 1 })?;
            read(&text, path).map_err(usage)?
        }
    };
    settle(given, filed, launched).map(|settings| Request::Run(Box::new(settings))).map_err(usage)
}

/// A regular file of at most `most` bytes: a device or a pipe would never end.
///
/// # Errors
/// A file that is none, is too large, or cannot be read.
pub(crate) fn read_file(path: &Path, most: u64) -> Result<Vec<u8>> {
    let status = std::fs::metadata(path)?;
    if !status.is_file() {
        bail!("it is no regular file");
    }
    if status.len() > most {
        bail!("it has {} bytes, more than {most}", status.len());
    }
    Ok(std::fs::read(path)?)
}

/// clap's message without its usage lines.
fn one_sentence(error: &clap::Error) -> anyhow::Error {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).take_while(|line| {
        !line.starts_with("Usage:") && !line.starts_with("For more information")
    });
    let sentence = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    anyhow!("{} (--help lists every option)", sentence.trim_start_matches("error: "))
}

fn read(text: &str, path: &Path) -> Result<Options> {
    toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or("");
        let line = before.matches('\n').count() + 1;
        let message = error.message().replace('\n', " ");
        anyhow!("{} line {line}: {message}", path.display())
    })
}

/// Flags over file over defaults, then checks.
fn settle(given: Options, filed: Options, launched: Option<usize>) -> Result<Settings> {
    // A choice of runs on the command line replaces the file's as a whole.
    let chosen = given.compare || given.gather.is_some() || given.scaling.is_some();
    let choice = if chosen { &given } else { &filed };
    let runs = runs(choice.compare, choice.gather, choice.scaling)?;
    let steps = given.steps.or(filed.steps).unwrap_or(500);
    let log = given.log.or(filed.log).unwrap_or_else(|| "info".into());
    let ranks = given.ranks.or(filed.ranks);
    let ranks = match (launched, ranks) {
        (None, ranks) => ranks.unwrap_or(4),
        (Some(world), Some(ranks)) if ranks != world => {
            bail!("the launcher has started {world} ranks: leave out --ranks {ranks}")
        }
        (Some(world), _) => world,
    };
    let settings = Settings {
        ranks,
        runs,
        format: given.format.or(filed.format).unwrap_or(Format::E4m3),
        history: given.history.or(filed.history).unwrap_or(16),
        steps,
        batch: given.batch.or(filed.batch).unwrap_or(16),
        microbatches: given.microbatches.or(filed.microbatches).unwrap_or(1),
        context: given.context.or(filed.context).unwrap_or(64),
        width: given.width.or(filed.width).unwrap_or(112),
        heads: given.heads.or(filed.heads).unwrap_or(4),
        layers: given.layers.or(filed.layers).unwrap_or(2),
        lr: given.lr.or(filed.lr).unwrap_or(0.004),
        warmup: given.warmup.or(filed.warmup).unwrap_or(steps / 10),
        weight_decay: given.weight_decay.or(filed.weight_decay).unwrap_or(0.1),
        max_grad_norm: given.max_grad_norm.or(filed.max_grad_norm).unwrap_or(1.0),
        seed: given.seed.or(filed.seed).unwrap_or(1),
        text: given.text.or(filed.text),
        out: given.out.or(filed.out).unwrap_or_else(|| "out".into()),
        trace: given.trace || filed.trace,
        log: log
            .parse()
            .map_err(|_| anyhow!("--log must be error, warn, info, debug or trace, not {log:?}"))?,
        communicator: given.communicator.or(filed.communicator).unwrap_or(Mover::Tcp),
        log_all_ranks: given.log_all_ranks || filed.log_all_ranks,
        inject_fault: given.inject_fault.or(filed.inject_fault),
    };
    check(&settings)?;
    Ok(settings)
}

fn runs(compare: bool, gather: Option<Gather>, scaling: Option<Scaling>) -> Result<Vec<Run>> {
    Ok(match (compare, gather, scaling) {
        (_, None, None) => vec![Run::Bf16, Run::Float8Dynamic, Run::Float8Delayed],
        (true, ..) => bail!("--compare trains every way: leave out --gather and --scaling"),
        (false, Some(Gather::Bf16), None) => vec![Run::Bf16],
        (false, Some(Gather::Bf16), Some(_)) => {
            bail!("--scaling belongs to a float8 gather: leave it out with --gather bf16")
        }
        (false, _, None | Some(Scaling::Dynamic)) => vec![Run::Float8Dynamic],
        (false, _, Some(Scaling::Delayed)) => vec![Run::Float8Delayed],
    })
}

/// The most bytes of a rank's attention scores: what does not fit the memory ends the process.
const LARGEST_SCORES: usize = 16 << 30;

fn check(settings: &Settings) -> Result<()> {
    let ranges = [
        ("ranks", settings.ranks, 256),
        ("steps", settings.steps, 1_000_000_000),
        ("batch", settings.batch, 65_536),
        ("microbatches", settings.microbatches, 65_536),
        ("context", settings.context, 8192),
        ("width", settings.width, 16_384),
        ("heads", settings.heads, 16_384),
        ("layers", settings.layers, 256),
        ("history", settings.history, 1024),
    ];
    for (name, value, most) in ranges {
        if !(1..=most).contains(&value) {
            bail!("--{name} must be at least 1 and at most {most}, not {value}");
        }
    }
    if !settings.width.is_multiple_of(settings.heads) {
        bail!("--heads {} must divide --width {}", settings.heads, settings.width);
    }
    let parts = settings.ranks.saturating_mul(settings.microbatches);
    if settings.batch < parts {
        bail!(
            "--batch {} must give every one of {} ranks a sequence in every one of {} microbatches: \
             at least {parts}",
            settings.batch,
            settings.ranks,
            settings.microbatches
        );
    }
    // Attention's scores are the largest tensor: sequences x heads x context x context, in f32.
    let scores =
        [settings.batch.div_ceil(parts), settings.heads, settings.context, settings.context, 4]
            .into_iter()
            .fold(1_usize, usize::saturating_mul);
    if scores > LARGEST_SCORES {
        bail!(
            "--context {}, --heads {} and --batch {} make attention take {} GiB at once, more than {}: lower one of them",
            settings.context,
            settings.heads,
            settings.batch,
            scores.div_ceil(1 << 30),
            LARGEST_SCORES >> 30
        );
    }
    // The optimizer computes in f32.
    let finite = |value: f64| (value as f32).is_finite();
    let positive = [("lr", settings.lr), ("max-grad-norm", settings.max_grad_norm)];
    for (name, value) in positive {
        if !(finite(value) && value > 0.0) {
            bail!("--{name} must be a positive number that f32 can hold, not {value}");
        }
    }
    let decay = settings.weight_decay;
    if !(finite(decay) && decay >= 0.0) {
        bail!("--weight-decay must be 0 or a positive number that f32 can hold, not {decay}");
    }
    Ok(())
}
