//! Every case with ranks as processes. Under a launcher each process is a rank of its world
//! (`mpirun -n 4 processes --expect-world 4 --transport tcp`); without one this program starts
//! worlds of its own.

use std::process::ExitCode;

use gather8_conformance::processes::{Args, run};

fn main() -> ExitCode {
    let done = Args::parse(std::env::args().skip(1))
        .and_then(|args| if args.list { Ok(ExitCode::SUCCESS) } else { run(&args) });
    done.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::FAILURE
    })
}
