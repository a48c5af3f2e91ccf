//! Rates of the passes on this machine, next to memcpy's.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use gather8_examples::bench::{self, Machine, Measured, Report, SCHEMA, Selection, Settings};
use gather8_examples::bench::{device, host};
use gather8_examples::whole_file::WholeFile;
use gather8_kernels::cpu::Cpu;

/// Measures copy, amax, cast and AdamW in GB/s and as a ratio to memcpy.
///
/// Each run follows a memcpy, so that other load falls on both; times are medians. Rows by `fast`
/// call the passes on slices, `scalar` the reference that they must match bit for bit, `cpu` launches
/// them through the CPU backend as the runtime does.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Rows to measure: IMPLEMENTATION, PASS or IMPLEMENTATION/PASS, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = [String::from("fast"), String::from("cpu")])]
    rows: Vec<String>,
    /// Bytes of memory that every row works on at least; K, M and G are 2^10, 2^20, 2^30.
    #[arg(long, default_value = "256M", value_parser = size)]
    size: u64,
    /// Runs of each row; the median counts.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Threads that share a pass, separated by commas; 0 means all.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 0])]
    threads: Vec<usize>,
    /// Writes the results as JSON too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (text.get(..at), 1 << 10),
        Some((at, 'M' | 'm')) => (text.get(..at), 1 << 20),
        Some((at, 'G' | 'g')) => (text.get(..at), 1 << 30),
        _ => (Some(text), 1_u64),
    };
    let number = digits.and_then(|digits| digits.parse::<u64>().ok());
    let bytes = number.and_then(|number| number.checked_mul(unit));
    let bytes = bytes.filter(|bytes| (1 << 10..=1 << 40).contains(bytes));
    bytes.ok_or_else(|| "give a number of bytes from 1K to 1024G, such as 256M".to_owned())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "bench: {error:#}");
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

fn run(arguments: &Arguments) -> Result<()> {
    let machine = Machine::here();
    let groups = groups(arguments, machine.cores)?;
    let selection = match Selection::new(&arguments.rows, &groups) {
        Ok(selection) => selection,
        Err(error) => Arguments::command().error(ErrorKind::InvalidValue, error).exit(),
    };
    // Before the work, so that a path that cannot be written costs nothing.
    let json = arguments.json.as_deref().map(WholeFile::create).transpose()?;
    let optimised = !cfg!(debug_assertions);
    let mut out = std::io::stdout();
    writeln!(out, "{}, {} cores, {}", machine.cpu, machine.cores, machine.features.join(" "))?;
    if !optimised {
        writeln!(out, "built without optimisation: the numbers mean nothing; use --release")?;
    }
    writeln!(out, "{}", Measured::head())?;
    let settings = Settings { size: arguments.size, repeats: arguments.repeats };
    let rows = bench::run(&groups, &selection, settings, |row| {
        let _ = writeln!(std::io::stdout(), "{row}");
    })?;
    if let Some(mut file) = json {
        let report = Report {
            schema: SCHEMA,
            date: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            command: std::env::args().collect(),
            version: env!("CARGO_PKG_VERSION"),
            optimised,
            machine,
            settings,
            rows,
        };
        let mut text = serde_json::to_string_pretty(&report)?;
        text.push('\n');
        file.file().write_all(text.as_bytes()).context("cannot write the JSON")?;
        file.finish()?;
    }
    Ok(())
}
