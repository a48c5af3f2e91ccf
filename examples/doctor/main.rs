//! Says what gather8 finds on this machine, what is missing, and what to install.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use gather8_examples::doctor::Report;

/// Looks for what gather8 needs: processor, launcher's variables, driver, GPUs, NVRTC, cuBLASLt, NCCL.
///
/// With --device the exit code says whether ranks can run there: 0 or 1.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Fails, with exit code 1, if this device cannot run. `cuda` also starts this rank's GPU, which
    /// compiles the kernels the first time.
    #[arg(long, value_enum)]
    device: Option<Device>,
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
    let report = Report::here(arguments.device == Some(Device::Cuda));
    let text = if arguments.json {
        serde_json::to_string_pretty(&report).unwrap_or_else(|error| error.to_string()) + "\n"
    } else {
        report.to_string()
    };
    // Whether anybody listens or not, the exit code tells.
    let _ = std::io::stdout().write_all(text.as_bytes());
    let problem = match arguments.device {
        None => None,
        Some(Device::Cpu) => report.cpu,
        Some(Device::Cuda) => report.cuda,
    };
    match problem {
        None => ExitCode::SUCCESS,
        Some(problem) => {
            let _ = writeln!(std::io::stderr(), "doctor: {problem}");
            ExitCode::FAILURE
        }
    }
}
