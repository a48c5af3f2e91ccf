//! Rates of the passes on this machine next to a copy's, and of gathers next to the communicator's.

#[cfg(feature = "cuda")]
mod gpu;
mod ranks;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use gather8_collectives::Launch;
use gather8_examples::bench::gather::Gathered;
use gather8_examples::bench::{
    self, Figure, Gpu, Group, Machine, Measured, Report, SCHEMA, Selection, Settings,
};
use gather8_examples::bench::{device, host};
use gather8_examples::export::one_line;
use gather8_examples::size::size;
use gather8_examples::whole_file::{WholeFile, remove_unfinished_on};
use gather8_kernels::cpu::Cpu;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Measures copy, amax, cast and AdamW in GB/s and as a ratio to a copy; with --gather the gather of
/// whole units as a ratio to the communicator's.
///
/// Each run follows a copy, so that other load falls on both; times are medians. On the CPU rows by
/// `fast` call the passes on slices, `scalar` the reference that they must match bit for bit, `cpu`
/// launches them through the CPU backend as the runtime does. On a GPU rows are passes over 872
/// million parameters in 28 and in 560 tensors, and over 20,000 tensors of one element.
#[derive(Parser)]
#[command(name = "bench", version)]
struct Arguments {
    /// Rows to measure: IMPLEMENTATION, PASS or IMPLEMENTATION/PASS, separated by commas; by default
    /// fast,cpu on the CPU and all on a GPU.
    #[arg(long, value_delimiter = ',')]
    rows: Option<Vec<String>>,
    /// Bytes of memory that every row works on at least; K, M and G are 2^10, 2^20, 2^30. Of the CPU.
    #[arg(long, default_value = "256M", value_parser = size)]
    size: u64,
    /// Runs that count; the median is taken. By default 9 on the CPU, 15 on a GPU, 25 of gathers.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: Option<u32>,
    /// Threads that share a pass, separated by commas; 0 means all. Of the CPU.
    #[arg(long, value_delimiter = ',', default_value = "1,0")]
    threads: Vec<usize>,
    /// Where the passes run.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Measures the gather of units between ranks that are processes (mpirun, srun, torchrun).
    #[arg(long)]
    gather: bool,
    /// For tests: several ranks may use one GPU.
    #[arg(long)]
    share_gpu: bool,
    /// Divides the size of every weight of --gather and of a GPU's rows, for a quick look.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    divide: u64,
    /// Writes the results as JSON too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The CPU; ranks meet over TCP.
    Cpu,
    /// An NVIDIA GPU; ranks gather over NCCL.
    Cuda,
}

/// What a kind of measurement brings.
#[derive(Default)]
struct Results {
    settings: Settings,
    gpu: Option<Gpu>,
    rows: Vec<Measured>,
    gathers: Vec<Gathered>,
    figures: Vec<Figure>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = one_line(&format!("{error:#}"));
            // In one piece, since other ranks write too.
            let _ = std::io::stderr().write_all(format!("bench: {text}\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn groups(arguments: &Arguments, cores: usize) -> Result<Vec<bench::Group<'static>>> {
    let mut threads: Vec<_> =
        arguments.threads.iter().map(|&n| if n == 0 { cores } else { n }).collect();
    threads.sort_unstable();
    threads.dedup();
    let mut groups = Vec::new();
    for &threads in &threads {
        for functions in [host::FAST, host::SCALAR] {
            groups.push(host::group(functions, threads, arguments.size));
        }
        let backend = Cpu::builder().threads(threads).build();
        let device = device::Device::new(backend, Arc::new(device::HostClock))?;
        let copy = host::copy(threads, arguments.size);
        groups.push(device::group("cpu", threads, &device, arguments.size, Some(copy)));
    }
    Ok(groups)
}

/// The rows that were asked for; a wrong name ends the program.
fn selection(arguments: &Arguments, default: &[&str], groups: &[Group<'_>]) -> Selection {
    let default = || default.iter().map(|&row| row.to_owned()).collect();
    let rows = arguments.rows.clone().unwrap_or_else(default);
    match Selection::new(&rows, groups) {
        Ok(selection) => selection,
        Err(error) => Arguments::command().error(ErrorKind::InvalidValue, error).exit(),
    }
}

fn say(line: &dyn std::fmt::Display) {
    // The numbers are in the JSON too, whether anybody listens or not.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn head(machine: &Machine) {
    say(&format_args!("{}, {} cores, {}", machine.cpu, machine.cores, machine.features.join(" ")));
    if cfg!(debug_assertions) {
        say(&"built without optimisation: the numbers mean nothing; use --release");
    }
}

fn on_cpu(arguments: &Arguments, machine: &Machine) -> Result<Results> {
    let groups = groups(arguments, machine.cores)?;
    let selection = selection(arguments, &["fast", "cpu"], &groups);
    let settings = Settings { size: arguments.size, repeats: arguments.repeats.unwrap_or(9) };
    head(machine);
    say(&Measured::head());
    let rows = bench::run(&groups, &selection, settings, |row| say(row))?;
    Ok(Results { settings, rows, ..Results::default() })
}

fn run(arguments: &Arguments) -> Result<()> {
    remove_unfinished_on(&[SIGHUP, SIGINT, SIGTERM])?;
    let machine = Machine::here();
    if arguments.gather {
        return ranks::run(arguments, machine);
    }
    let launch = Launch::from_env()?;
    if launch.world > 1 {
        bail!(
            "{} ranks were started, but passes are measured by one process: start it alone, or give --gather",
            launch.world
        );
    }
    // Before the work, so that a path that cannot be written costs nothing.
    let json = arguments.json.as_deref().map(WholeFile::create).transpose()?;
    let results = match arguments.device {
        Device::Cpu => on_cpu(arguments, &machine)?,
        #[cfg(feature = "cuda")]
        Device::Cuda => gpu::rows(arguments, &launch, &machine)?,
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => bail!("{}", gather8_examples::doctor::NOT_COMPILED_IN),
    };
    write(json, machine, results)
}

/// Writes the JSON, if it was asked for.
fn write(json: Option<WholeFile>, machine: Machine, results: Results) -> Result<()> {
    let Some(mut file) = json else { return Ok(()) };
    let report = Report {
        schema: SCHEMA,
        date: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
        command: std::env::args().collect(),
        version: env!("CARGO_PKG_VERSION"),
        optimised: !cfg!(debug_assertions),
        machine,
        settings: results.settings,
        gpu: results.gpu,
        rows: results.rows,
        gathers: results.gathers,
        figures: results.figures,
    };
    let mut text = serde_json::to_string_pretty(&report)?;
    text.push('\n');
    file.file().write_all(text.as_bytes()).context("cannot write the JSON")?;
    file.finish()
}
