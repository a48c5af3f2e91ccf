//! Says what gather8 finds on this machine, what is missing, and what to install.

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use gather8_examples::doctor::{Report, Start};
use gather8_examples::size::size;

/// Looks for what gather8 needs: processor, launcher's variables, driver, GPUs, NVRTC, cuBLASLt, NCCL.
///
/// With --device the exit code says whether ranks can run there: 0 or 1.
#[derive(Parser)]
#[command(name = "doctor", version)]
struct Arguments {
    /// Fails, with exit code 1, if this device cannot run. `cuda` also starts this rank's GPU, which
    /// compiles the kernels the first time.
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// Fails if this rank's GPU has not so many bytes free in one piece; K, M and G are 2^10, 2^20,
    /// 2^30. With `--device cuda`.
    #[arg(long, value_parser = size)]
    memory: Option<u64>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let start = match (arguments.device, arguments.memory) {
        (Some(Device::Cuda), memory) => Some(Start { memory: memory.unwrap_or(0) }),
        (_, None) => None,
        (_, Some(_)) => Arguments::command()
            .error(ErrorKind::ArgumentConflict, "--memory is of a GPU: give --device cuda, too")
            .exit(),
    };
    let report = Report::here(start);
    let text = if arguments.json {
        serde_json::to_string_pretty(&report).unwrap_or_else(|error| error.to_string()) + "\n"
    } else {
        report.to_string()
    };
    let mut stdout = std::io::stdout();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    let written = written.err().map(|error| format!("cannot write to stdout: {error}"));
    let problem = match arguments.device {
        None => None,
        Some(Device::Cpu) => report.cpu,
        Some(Device::Cuda) => report.cuda,
    };
    match problem.or(written) {
        None => ExitCode::SUCCESS,
        Some(problem) => {
            let _ = std::io::stderr().write_all(format!("doctor: {problem}\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}
