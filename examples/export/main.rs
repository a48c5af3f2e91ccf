//! Converts the matrices of a safetensors file to float8, through the runtime that training uses.

mod progress;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use gather8_collectives::Launch;
use gather8_examples::export::{self, Options, Progress, Silent, Summary, one_line};
use gather8_examples::seat::Seat;
use gather8_examples::whole_file::remove_unfinished_on;
use gather8_kernels::{Backend, Format};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Converts every F32, F16 and BF16 matrix of a safetensors file to float8.
///
/// A matrix `x` becomes F8_E4M3 or F8_E5M2 data under its name, and a scalar `x_scale` that decodes
/// it: value = code * x_scale. Everything else passes through unchanged.
///
/// Started by mpirun, srun or torchrun, each process is a rank; else the ranks are threads.
#[derive(Parser)]
#[command(name = "export", version)]
struct Arguments {
    /// The file to read.
    input: PathBuf,
    /// The file to write; it appears whole or not at all.
    output: PathBuf,
    /// Ranks to shard over, as threads (1 by default). The output does not depend on it; memory
    /// does: each of them holds one byte per element of the largest matrix.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Option<u32>,
    /// What casts and gathers: the CPU, or one GPU per process.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// For tests: several ranks may use one GPU.
    #[arg(long)]
    share_gpu: bool,
    /// The float8 format.
    #[arg(long, value_enum, default_value_t = Float8::E4m3)]
    format: Float8,
    /// Where scales come from. A file holds one version of a weight, so it has no past amaxes.
    #[arg(long, value_enum, default_value_t = Scaling::Dynamic)]
    scaling: Scaling,
}

#[derive(Clone, Copy, ValueEnum)]
enum Float8 {
    /// Largest value 448, three mantissa bits.
    E4m3,
    /// Largest value 57344, two mantissa bits.
    E5m2,
}

#[derive(Clone, Copy, ValueEnum)]
enum Scaling {
    /// Each matrix has the scale of its own largest magnitude.
    Dynamic,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The CPU; processes meet over TCP.
    Cpu,
    /// NVIDIA GPUs; processes gather over NCCL.
    Cuda,
}

impl Arguments {
    fn format(&self) -> Format {
        match self.format {
            Float8::E4m3 => Format::E4m3,
            Float8::E5m2 => Format::E5m2,
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Scaling::Dynamic = arguments.scaling;
    let launch = Launch::from_env();
    let rank = launch.as_ref().ok().filter(|launch| launch.world > 1).map(|launch| launch.rank);
    match launch.map_err(anyhow::Error::from).and_then(|launch| run(&arguments, &launch)) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some((done, ranks))) => {
            let text = format!(
                "{}: {} tensors in {} over {} ranks, {} unchanged, {} bytes of {}",
                arguments.output.display(),
                done.converted,
                arguments.format().name(),
                ranks,
                done.unchanged,
                done.bytes.1,
                done.bytes.0
            );
            // The file is there, whether anybody listens or not.
            let _ = writeln!(std::io::stdout(), "{}", one_line(&text));
            ExitCode::SUCCESS
        }
        Err(error) => {
            let who = rank.map_or(String::new(), |rank| format!("rank {rank}: "));
            let text = one_line(&format!("{error:#}"));
            // In one piece, since other ranks write too.
            let line = format!("export: {who}{text}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            ExitCode::FAILURE
        }
    }
}

/// What was made and over how many ranks, on the rank that says so.
fn run(arguments: &Arguments, launch: &Launch) -> Result<Option<(Summary, u32)>> {
    remove_unfinished_on(&[SIGHUP, SIGINT, SIGTERM])?;
    let threads = arguments.ranks.unwrap_or(1);
    if launch.world == 1 && arguments.device == Device::Cpu {
        let options = Options { ranks: threads, format: arguments.format() };
        let mut progress = progress::for_stderr();
        let (input, output) = (&arguments.input, &arguments.output);
        let done = export::export(input, output, options, &mut *progress)?;
        return Ok(Some((done, threads)));
    }
    if arguments.ranks.is_some_and(|ranks| ranks != launch.world) {
        bail!(
            "--ranks {threads} asks for threads, but ranks are processes here, {} of them: leave it out, and start one process per rank (mpirun -n {threads})",
            launch.world
        );
    }
    match arguments.device {
        Device::Cpu => rank(arguments, &Seat::cpu(launch)?),
        #[cfg(feature = "cuda")]
        Device::Cuda => rank(arguments, &Seat::cuda(launch, arguments.share_gpu)?),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => bail!("{}", gather8_examples::doctor::NOT_COMPILED_IN),
    }
}

fn rank<B: Backend>(arguments: &Arguments, seat: &Seat<B>) -> Result<Option<(Summary, u32)>> {
    let mut progress: Box<dyn Progress + Send> =
        if seat.is_first() { progress::for_stderr() } else { Box::new(Silent) };
    let (input, output) = (&arguments.input, &arguments.output);
    let done = export::export_rank(input, output, arguments.format(), seat, &mut *progress)?;
    Ok(seat.is_first().then(|| (done, seat.communicator.world())))
}
