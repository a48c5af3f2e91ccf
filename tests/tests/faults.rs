//! Ranks that train over TCP, of which one is killed or stopped at a random point: every survivor
//! names it within the deadline and two seconds. `--times 50` tries often; `--gpu` trains on GPUs
//! over NCCL (feature `cuda`). And all ranks are told to stop: they do so after the same step.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed expectation is a failed test"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, ensure};
use gather8::{Config, Fsdp};
use gather8_collectives::stop::{EXIT_CODE, FAREWELL, Stop};
use gather8_collectives::{JoinOptions, Launch, Op, TcpWorld};
use gather8_conformance::Context;
use gather8_conformance::model::{Mlp, initial};
use gather8_conformance::processes::Children;
use gather8_kernels::Backend;
use gather8_kernels::cpu::Cpu;

/// Worlds of which a rank is struck, in turn; on GPUs the last one. In the smallest nobody else can
/// tell the survivor.
const WORLDS: [u32; 3] = [2, 3, 4];
const DEADLINE: f64 = 2.0;
/// Where a rank leaves its verdict.
const FOLDER: &str = "GATHER8_TEST_FOLDER";
/// Set for ranks on GPUs.
const GPU: &str = "GATHER8_TEST_GPU";

fn main() -> ExitCode {
    let args = std::env::args().skip(1).collect::<Vec<_>>();
    if args.iter().any(|arg| arg == "--list") {
        return ExitCode::SUCCESS;
    }
    let done = match std::env::var_os(FOLDER) {
        Some(folder) => train(Path::new(&folder)),
        None => {
            let times = args.iter().position(|arg| arg == "--times");
            let times = times.and_then(|at| args.get(at + 1)?.parse().ok()).unwrap_or(4);
            strike(times, args.iter().any(|arg| arg == "--gpu"))
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A rank: trains until something happens, and writes down what.
fn train(folder: &Path) -> anyhow::Result<()> {
    let launch = Launch::from_env()?;
    let rank = launch.rank;
    let result = |text: &str| std::fs::write(folder.join(format!("{rank}.result")), text);
    let error = match train_until_it_fails(&launch, folder) {
        Ok(step) => {
            result(&format!("{FAREWELL}\nafter step {step}\n"))?;
            std::process::exit(EXIT_CODE);
        }
        Err(error) => error,
    };
    let of_runtime = error.downcast_ref::<gather8::Error>().and_then(gather8::Error::blamed_rank);
    let of_exchange = error
        .downcast_ref::<gather8_collectives::Error>()
        .and_then(gather8_collectives::Error::blamed_rank);
    let blamed = of_runtime.or(of_exchange);
    let blamed = blamed.map_or("nobody".to_owned(), |rank| rank.to_string());
    result(&format!("{blamed}\n{error:#}\n"))?;
    Err(error)
}

/// The step after which all ranks stop, once one is told to.
fn train_until_it_fails(launch: &Launch, folder: &Path) -> anyhow::Result<u64> {
    let tcp = TcpWorld::join(launch, &JoinOptions::from_env()?)?;
    #[cfg(feature = "cuda")]
    if std::env::var_os(GPU).is_some() {
        return train_on(launch, folder, gather8_conformance::processes::gpu(launch, &tcp)?);
    }
    let cpu = Cpu::new();
    let communicator = tcp.communicator(cpu.clone());
    train_on(launch, folder, Context { backend: cpu, communicator })
}

fn train_on<B: Backend>(launch: &Launch, folder: &Path, cx: Context<B>) -> anyhow::Result<u64> {
    let communicator = Arc::clone(&cx.communicator);
    let (weak, file) =
        (Arc::downgrade(&communicator), folder.join(format!("{}.result", launch.rank)));
    let stop = Stop::on_sigterm(
        move || weak.upgrade().map_or(Ok(()), |communicator| communicator.check()),
        move |sentence| drop(std::fs::write(file, sentence)),
    )?;
    let mut config = Config::default();
    config.deadline.0 = DEADLINE;
    let model = Mlp { dims: vec![64, 96, 64, 16], frozen_first: false };
    let fsdp = Fsdp::builder(config, cx.backend, cx.communicator)
        .units(model.units())
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    for step in 0.. {
        model.train(
            &fsdp,
            &[model.example(step * u64::from(launch.world) + u64::from(launch.rank))],
        )?;
        fsdp.step()?;
        fsdp.sync()?;
        if step == 3 {
            std::fs::write(folder.join(format!("{}.ready", launch.rank)), "")?;
        }
        let op = Op {
            sequence: step,
            name: "exchange",
            unit: "stop",
            deadline: Duration::from_secs_f64(DEADLINE),
        };
        let stops = communicator.exchange(op, &[u8::from(stop.requested())])?;
        if stops.iter().any(|stop| *stop == [1]) {
            return Ok(step);
        }
    }
    Ok(0)
}

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn strike(times: u64, gpu: bool) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let mut state = now.as_nanos() as u64;
    let last = WORLDS.len() - 1;
    tell_to_stop(WORLDS[last], gpu)?;
    let mut slowest = [Duration::ZERO; 2];
    for time in 0..times {
        let seed = state;
        let world = WORLDS[if gpu { last } else { time as usize / 2 % WORLDS.len() }];
        let victim = (random(&mut state) % u64::from(world)) as u32;
        let pause = Duration::from_micros(random(&mut state) % 300_000);
        let (signal, slow) = if time % 2 == 0 { ("-KILL", 0) } else { ("-STOP", 1) };
        let elapsed = strike_once(time, world, victim, pause, signal, gpu).with_context(|| {
            format!("{signal} of rank {victim} of {world} after {pause:?} (seed {seed})")
        })?;
        slowest[slow] = slowest[slow].max(elapsed);
    }
    println!(
        "{times} strikes: every survivor named the rank; slowest {:.2} s after SIGKILL, {:.2} s after SIGSTOP (deadline {DEADLINE} s)",
        slowest[0].as_secs_f64(),
        slowest[1].as_secs_f64()
    );
    Ok(())
}

/// Every rank gets SIGTERM, as mpirun sends it: all end after the same step, with its code.
fn tell_to_stop(world: u32, gpu: bool) -> anyhow::Result<()> {
    let (folder, mut children) = start(u64::MAX, world, gpu)?;
    for rank in 0..world {
        let process = children.process(rank).to_string();
        let killed = Command::new("kill").args(["-TERM", &process]).status()?;
        ensure!(killed.success(), "kill {process}");
        std::thread::sleep(Duration::from_millis(7));
    }
    let codes = children.wait(Duration::from_secs(20))?;
    let read = |rank| std::fs::read_to_string(folder.join(format!("{rank}.result")));
    let results = (0..world).map(read).collect::<Result<Vec<_>, _>>()?;
    ensure!(codes.iter().all(|code| *code == Some(EXIT_CODE)), "codes {codes:?}: {results:?}");
    ensure!(
        results.iter().all(|text| *text == results[0] && text.starts_with(FAREWELL)),
        "the ranks say {results:?}"
    );
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

/// Starts a world and waits until it trains.
fn start(time: u64, world: u32, gpu: bool) -> anyhow::Result<(PathBuf, Children)> {
    let folder = scratch(time)?;
    let job = format!("faults-{}-{time}", std::process::id());
    let children = Children::start(world, &job, &[], |_, command| {
        command.env(FOLDER, &folder).stdout(Stdio::null()).stderr(Stdio::null());
        if gpu {
            command.env(GPU, "1");
        }
    })?;
    wait_until(Duration::from_secs(60), "the ranks train", || {
        Ok((0..world).all(|rank| folder.join(format!("{rank}.ready")).exists()))
    })?;
    Ok((folder, children))
}

fn strike_once(
    time: u64,
    world: u32,
    victim: u32,
    pause: Duration,
    signal: &str,
    gpu: bool,
) -> anyhow::Result<Duration> {
    let (folder, mut children) = start(time, world, gpu)?;
    std::thread::sleep(pause);
    let process = children.process(victim).to_string();
    ensure!(Command::new("kill").args([signal, &process]).status()?.success(), "kill {process}");
    let struck = Instant::now();

    let survivors = (0..world).filter(|rank| *rank != victim).collect::<Vec<_>>();
    // Aborting NCCL and leaving a GPU takes a while.
    let limit = Duration::from_secs_f64(DEADLINE + if gpu { 8.0 } else { 2.0 });
    wait_until(limit, "the survivors end", || {
        for &rank in &survivors {
            if !children.has_ended(rank)? {
                return Ok(false);
            }
        }
        Ok(true)
    })?;
    let elapsed = struck.elapsed();
    for rank in survivors {
        let result = std::fs::read_to_string(folder.join(format!("{rank}.result")))
            .with_context(|| format!("rank {rank} left no result"))?;
        let blamed = result.lines().next().unwrap_or_default();
        ensure!(blamed == victim.to_string(), "rank {rank} says: {result}");
        ensure!(result.contains(&format!("rank {victim} ")), "rank {rank} says: {result}");
        // The connection's end tells: nobody waits for the deadline.
        let closed = "was killed or crashed (its connection closed)";
        ensure!(gpu || signal != "-KILL" || result.contains(closed), "rank {rank} says: {result}");
    }
    drop(children);
    std::fs::remove_dir_all(&folder)?;
    Ok(elapsed)
}

fn scratch(time: u64) -> anyhow::Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("gather8-faults-{}-{time}", std::process::id()));
    std::fs::create_dir(&folder)?;
    Ok(folder)
}

fn wait_until(
    patience: Duration,
    what: &str,
    mut done: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let until = Instant::now() + patience;
    while !done()? {
        ensure!(Instant::now() < until, "waited {patience:?} until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
