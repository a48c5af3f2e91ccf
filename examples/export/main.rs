//! Converts the matrices of a safetensors file to float8, through the runtime that training uses.

mod progress;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use gather8_examples::export::{self, Options, one_line};
use gather8_kernels::Format;

/// Converts every F32, F16 and BF16 matrix of a safetensors file to float8.
///
/// A matrix `x` becomes F8_E4M3 or F8_E5M2 data under its name, and a scalar `x_scale` that decodes
/// it: value = code * x_scale. Everything else passes through unchanged.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The file to read.
    input: PathBuf,
    /// The file to write; it appears whole or not at all.
    output: PathBuf,
    /// Ranks to shard over, as threads. The output does not depend on it; memory does: every rank
    /// holds one byte per element of the largest matrix.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
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

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Scaling::Dynamic = arguments.scaling;
    let options = Options {
        ranks: arguments.ranks,
        format: match arguments.format {
            Float8::E4m3 => Format::E4m3,
            Float8::E5m2 => Format::E5m2,
        },
    };
    let mut progress = progress::for_stderr();
    match export::export(&arguments.input, &arguments.output, options, &mut *progress) {
        Ok(done) => {
            let text = format!(
                "{}: {} tensors in {} over {} ranks, {} unchanged, {} bytes of {}",
                arguments.output.display(),
                done.converted,
                options.format.name(),
                options.ranks,
                done.unchanged,
                done.bytes.1,
                done.bytes.0
            );
            // The file is there, whether anybody listens or not.
            let _ = writeln!(std::io::stdout(), "{}", one_line(&text));
            ExitCode::SUCCESS
        }
        Err(error) => {
            drop(progress);
            let _ = writeln!(std::io::stderr(), "export: {}", one_line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
