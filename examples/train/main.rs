//! Trains a small GPT whose weights travel in float8: ranks as threads of one process, the text of
//! Moby-Dick, and the loss curves of dynamic and delayed scaling beside those of a BF16 gather.
//!
//! `cargo run --release --example train` runs all three; `--help` lists every option.

mod fault;
mod launch;
mod logs;
mod options;
mod plot;
mod progress;
mod rank;
mod report;
mod runtime;
mod trace;

use std::process::ExitCode;

use options::{Request, Settings};

fn main() -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let request = options::parse(std::env::args_os());
    if let Ok(Request::Run(settings)) = &request
        && std::env::var_os("RAYON_NUM_THREADS").is_none()
    {
        // Ranks share the cores: left alone, every rank's matrix products would start one thread per
        // core.
        let threads = (cores / settings.ranks).max(1).to_string();
        // SAFETY: no other thread runs yet: ranks, the progress bar and rayon's pool start later, and
        // parsing arguments starts none.
        unsafe { std::env::set_var("RAYON_NUM_THREADS", threads) };
    }
    match request {
        Ok(Request::Show(text)) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Ok(Request::Run(settings)) => finish(train(&settings), 1),
        Err(error) => finish(Err(error.error), error.code),
    }
}

fn train(settings: &Settings) -> anyhow::Result<()> {
    let outputs = launch::train(settings)?;
    plot::loss_curves(&settings.out, &outputs)?;
    print!("{}", report::table(&outputs));
    println!("Loss curves: {}", settings.out.join("loss.svg").display());
    Ok(())
}

/// One sentence on stderr, whatever RUST_BACKTRACE says.
fn finish(result: anyhow::Result<()>, code: u8) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train: {}", format!("{error:#}").replace('\n', " "));
            ExitCode::from(code)
        }
    }
}
