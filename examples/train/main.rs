//! Trains a small GPT whose weights travel in float8: ranks as threads of one process or as
//! processes under a launcher, the text of Moby-Dick, and the loss curves of dynamic and delayed scaling beside those of a BF16 gather.
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
mod world;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use gather8_examples::whole_file::remove_unfinished_on;
use options::{Request, Settings};
use rank::Stopped;
use signal_hook::consts::{SIGHUP, SIGINT};
use world::World;

fn main() -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let found = world::launch();
    let world = found.as_ref().ok().map(|(launch, _)| launch.world as usize);
    let launched = world.filter(|&world| world > 1);
    let request = options::parse(std::env::args_os(), launched);
    if let Ok(Request::Show(text)) = &request {
        // Help is for those, too, whose environment is half set.
        return finish("train", print(text), 1);
    }
    let (launch, local) = match found {
        Ok(found) => found,
        Err(error) => return finish("train", Err(error), 1),
    };
    if let Ok(Request::Run(settings)) = &request
        && std::env::var_os("RAYON_NUM_THREADS").is_none()
    {
        // Ranks share the cores: left alone, every rank's matrix products would start one thread per
        // core.
        let sharing = if launched.is_some() { local } else { settings.ranks };
        let threads = (cores / sharing.max(1)).max(1).to_string();
        // SAFETY: no other thread runs yet: ranks, the progress bar and rayon's pool start later, and
        // parsing arguments starts none.
        unsafe { std::env::set_var("RAYON_NUM_THREADS", threads) };
    }
    let name = match launched {
        Some(_) => format!("train: rank {}", launch.rank),
        None => "train".to_owned(),
    };
    match request {
        Ok(Request::Show(text)) => finish(&name, print(&text), 1),
        Ok(Request::Run(settings)) => match train(launch, &settings) {
            Err(error) if error.is::<Stopped>() => finish(&name, Err(error), STOPPED),
            result => finish(&name, result, 1),
        },
        Err(error) => finish(&name, Err(error.error), error.code),
    }
}

/// The exit code of a training that a launcher has stopped.
const STOPPED: u8 = gather8::collectives::stop::EXIT_CODE as u8;

fn train(launch: gather8::collectives::Launch, settings: &Settings) -> anyhow::Result<()> {
    // SIGTERM is the launcher's: a training ends by itself then.
    remove_unfinished_on(&[SIGHUP, SIGINT])?;
    let world = World::join(launch, settings)?;
    let outputs = launch::train(&world, settings)?;
    if outputs.is_empty() {
        // Rank 0 is another process, and tells.
        return Ok(());
    }
    plot::loss_curves(&settings.out, &outputs)?;
    let picture = settings.out.join("loss.svg");
    print(&format!("{}Loss curves: {}\n", report::table(&outputs), picture.display()))
}

/// Text on stdout; that it is closed or full is an error like any other.
fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.context("cannot write to stdout")
}

/// One sentence on stderr, whatever RUST_BACKTRACE says; in one piece, since other ranks write too.
fn finish(name: &str, result: anyhow::Result<()>, code: u8) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let sentence = format!("{error:#}").replace('\n', " ");
            // There is nowhere else to complain if stderr is closed.
            let _ = std::io::stderr().write_all(format!("{name}: {sentence}\n").as_bytes());
            ExitCode::from(code)
        }
    }
}
