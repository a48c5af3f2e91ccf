//! Ranks as processes: started by a launcher, or by this program itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use gather8::Fsdp;
use gather8_collectives::{Communicator, JoinOptions, Launch, Op, TcpWorld};
use gather8_kernels::Backend;
use gather8_kernels::cpu::Cpu;

use crate::model::{Mlp, initial};
use crate::{Case, Context, cases, threads};

/// Worlds that are started when no launcher has.
const WORLDS: [u32; 3] = [1, 2, 4];
/// How long ranks may wait for each other's next case over MPI.
#[cfg(feature = "mpi")]
const CONNECT: Duration = Duration::from_secs(60);
/// How long one world may take over all cases.
const PATIENCE: Duration = Duration::from_secs(600);

/// Makes a device and a communicator of all ranks that no earlier failure has touched; every rank
/// calls it as often as the others.
pub type Fresh<'a, B> = dyn FnMut() -> anyhow::Result<Context<B>> + 'a;

/// What the command line asks for.
#[derive(Debug, Default)]
pub struct Args {
    /// Fails unless the launcher has started this many ranks.
    pub expect_world: Option<u32>,
    /// Worlds to start when no launcher has.
    pub worlds: Option<Vec<u32>>,
    /// Which way the ranks talk.
    pub transport: String,
    /// How often each case is run.
    pub times: u32,
    /// Only cases whose name contains this.
    pub filter: Option<String>,
    /// Say nothing, do nothing: `cargo test -- --list` asks this of every target.
    pub list: bool,
}

impl Args {
    /// Reads the command line; what libtest understands and this runner does not need is let pass.
    pub fn parse(args: impl IntoIterator<Item = String>) -> anyhow::Result<Self> {
        let mut parsed = Self { transport: "tcp".to_owned(), times: 1, ..Self::default() };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} wants a value"));
            match arg.as_str() {
                "--expect-world" => parsed.expect_world = Some(value()?.parse()?),
                "--transport" => parsed.transport = value()?,
                "--times" => parsed.times = value()?.parse()?,
                "--worlds" => {
                    let list = value()?;
                    let worlds = list.split(',').map(str::parse).collect::<Result<_, _>>()?;
                    parsed.worlds = Some(worlds);
                }
                "--list" => parsed.list = true,
                "--test-threads" | "--format" | "--color" | "--skip" | "-Z" => drop(value()?),
                "--nocapture" | "--quiet" | "-q" | "--exact" | "--show-output" | "--ignored"
                | "--include-ignored" => {}
                other if other.starts_with('-') => {}
                name => parsed.filter = Some(name.to_owned()),
            }
        }
        Ok(parsed)
    }
}

/// This process's part: a rank if a launcher has started it, else the launcher.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let launch = Launch::from_env()?;
    if launch.world == 1 && args.expect_world.is_none() {
        return start_worlds(args);
    }
    if let Some(expected) = args.expect_world {
        ensure!(
            launch.world == expected,
            "{expected} ranks were expected, the launcher has started {}",
            launch.world
        );
    }
    let mut joined = 0;
    let mut tcp = || {
        let mut launch = launch.clone();
        launch.job = format!("{}-{joined}", launch.job);
        joined += 1;
        anyhow::Ok(TcpWorld::join(&launch, &JoinOptions::from_env()?)?)
    };
    match args.transport.as_str() {
        "tcp" => {
            let verdicts = tcp()?.communicator(Cpu::new());
            let mut fresh = || {
                let backend = Cpu::new();
                let communicator = tcp()?.communicator(backend.clone());
                Ok(Context { backend, communicator })
            };
            rank(args, &launch, &*verdicts, &ON_CPU, &mut fresh, &NOTHING)
        }
        #[cfg(feature = "cuda")]
        "nccl" => {
            let verdicts = tcp()?.communicator(Cpu::new());
            let mut fresh = || gpu(&launch, &tcp()?);
            rank(args, &launch, &*verdicts, &cases::gpu::ALL, &mut fresh, &NOTHING)
        }
        #[cfg(feature = "cuda")]
        "nccl-lent" => {
            let verdicts = tcp()?.communicator(Cpu::new());
            let program = crate::lent::HostProgram::new()?;
            let mut fresh = || program.lend(&launch, &tcp()?);
            rank(args, &launch, &*verdicts, &cases::gpu::ALL, &mut fresh, &|| program.end())
        }
        #[cfg(feature = "mpi")]
        "mpi" => {
            let mpi = gather8_collectives::mpi::Mpi::init()?;
            ensure!(
                (mpi.rank(), mpi.world()) == (launch.rank, launch.world),
                "MPI says rank {} of {}, the environment {} of {}",
                mpi.rank(),
                mpi.world(),
                launch.rank,
                launch.world
            );
            let verdicts = mpi.connect(CONNECT)?.communicator(Cpu::new());
            let mut fresh = || {
                let backend = Cpu::new();
                let communicator = mpi.connect(CONNECT)?.communicator(backend.clone());
                Ok(Context { backend, communicator })
            };
            rank(args, &launch, &*verdicts, &ON_CPU, &mut fresh, &NOTHING)
        }
        other => bail!("there is no transport `{other}` in this build"),
    }
}

/// What most transports do after a case.
const NOTHING: fn() -> anyhow::Result<()> = || Ok(());

/// Runs every case as one rank of the world, and tells rank 0, which prints.
fn rank<B: Backend>(
    args: &Args,
    launch: &Launch,
    verdicts: &dyn Communicator<Cpu>,
    more: &[(&'static str, Case<B>)],
    fresh: &mut Fresh<'_, B>,
    after: &dyn Fn() -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let loud = launch.rank == 0;
    let (mut passed, mut failed) = (0, 0);
    let cases = cases::all::<B>().into_iter().chain(more.iter().copied());
    for (name, case) in cases.flat_map(|case| (0..args.times).map(move |_| case)) {
        if args.transport.starts_with("nccl") && HOST_ONLY.contains(&name) {
            continue;
        }
        match &args.filter {
            Some(filter) if !name.contains(filter.as_str()) => continue,
            None if LONG.contains(&name) => continue,
            _ => {}
        }
        let start = Instant::now();
        let context = fresh()?;
        let mut verdict = match catch_unwind(AssertUnwindSafe(|| case(&context))) {
            Ok(Ok(())) => String::new(),
            Ok(Err(error)) => format!("{error:#}"),
            Err(panic) => format!("panicked: {}", panic_text(&*panic)),
        };
        drop(context);
        if let (Err(error), true) = (after(), verdict.is_empty()) {
            verdict = format!("afterwards: {error:#}");
        }
        let op =
            Op { sequence: 0, name: "exchange", unit: name, deadline: Duration::from_secs(120) };
        let all = verdicts.exchange(op, verdict.as_bytes())?;
        let bad = all.iter().enumerate().find(|(_, verdict)| !verdict.is_empty());
        match bad {
            None => passed += 1,
            Some(_) => failed += 1,
        }
        if loud {
            let seconds = start.elapsed().as_secs_f64();
            match bad {
                None => println!("case {name} ... ok ({seconds:.2} s)"),
                Some((rank, verdict)) => {
                    let verdict = String::from_utf8_lossy(verdict);
                    println!("case {name} ... FAILED: rank {rank}: {verdict}");
                }
            }
        }
    }
    if loud {
        let (world, transport) = (launch.world, &args.transport);
        println!("world {world} over {transport}: {passed} passed, {failed} failed");
    }
    let well = failed == 0 && (passed > 0 || args.filter.is_some());
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What only communicators that see every rank's call can tell: NCCL is not told what the peers
/// passed.
const HOST_ONLY: [&str; 1] = ["mismatches_are_told_to_all"];

/// What takes minutes, and runs only where it is named.
const LONG: [&str; 1] = ["delays_change_no_byte"];

/// A GPU of this rank's, shared if there are more ranks than GPUs, and NCCL over it.
///
/// # Errors
/// A device or a library that is missing; peers that do not come.
#[cfg(feature = "cuda")]
pub fn gpu(
    launch: &Launch,
    tcp: &TcpWorld,
) -> anyhow::Result<Context<gather8_kernels::cuda::Cuda>> {
    use std::sync::Arc;

    use gather8_collectives::{NcclOptions, NcclWorld, Solo};
    use gather8_kernels::cuda::{Cuda, probe};
    let devices = probe()?.devices.len() as u32;
    ensure!(devices > 0, "there is no GPU");
    let backend = Cuda::new(launch.rank % devices)?;
    let communicator: Arc<dyn Communicator<Cuda>> = if launch.world == 1 {
        Arc::new(Solo::new(backend.clone()))
    } else {
        let mut options = NcclOptions::default();
        options.share_gpu = launch.world > devices;
        NcclWorld::join(backend.clone(), tcp.communicator(Cpu::new()), tcp.control(), &options)?
    };
    Ok(Context { backend, communicator })
}

/// Cases for ranks that are processes on the CPU.
const ON_CPU: [(&str, Case<Cpu>); 1] =
    [("the_same_state_as_between_threads", the_same_state_as_between_threads)];

/// Losses and masters of a short training, as bits.
fn trained(cx: &Context<Cpu>) -> anyhow::Result<Vec<u32>> {
    let model = Mlp::uneven();
    let fsdp = Fsdp::builder(cx.config(), cx.backend.clone(), cx.communicator.clone())
        .units(model.units())
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let mut bits = Vec::new();
    for step in 0..5 {
        let example = model.example(step * u64::from(cx.world()) + u64::from(cx.rank()));
        bits.push(model.train(&fsdp, &[example])?.to_bits());
        fsdp.step()?;
        fsdp.sync()?;
    }
    for spec in fsdp.weights() {
        bits.extend(fsdp.master(fsdp.weight_id(&spec.name)?)?.into_iter().map(f32::to_bits));
    }
    Ok(bits)
}

/// The same training with ranks as threads ends in the same state, bit for bit: sums are in rank
/// order everywhere.
fn the_same_state_as_between_threads(cx: &Context<Cpu>) -> anyhow::Result<()> {
    let here = trained(cx)?;
    let there = threads::ranks(cx.world(), trained);
    let there = there.into_iter().nth(cx.rank() as usize).context("as many ranks")??;
    ensure!(here == there, "other losses or masters");
    Ok(())
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or(panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default()
}

fn start_worlds(args: &Args) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    #[cfg(feature = "cuda")]
    let lent = args.transport == "nccl-lent";
    for &world in args.worlds.as_deref().unwrap_or(&WORLDS) {
        let mut options = vec!["--expect-world".to_owned(), world.to_string()];
        options.extend(["--transport".to_owned(), args.transport.clone()]);
        options.extend(["--times".to_owned(), args.times.to_string()]);
        options.extend(args.filter.clone());
        let job = format!("conformance-{}-{world}", std::process::id());
        #[cfg(feature = "cuda")]
        let shared = lent
            && gather8_kernels::cuda::probe()
                .is_ok_and(|found| world as usize > found.devices.len());
        let mut children = Children::start(world, &job, &options, |_rank, command| {
            command.stdout(Stdio::inherit());
            #[cfg(feature = "cuda")]
            if lent {
                // NCCL is started by the host program, which then prepares for it.
                command.env("NCCL_LAUNCH_ORDER_IMPLICIT", "1");
                if shared {
                    command.env("NCCL_HOSTID", format!("conformance-rank-{_rank}"));
                }
            }
        })?;
        let codes = children.wait(PATIENCE)?;
        if codes.iter().any(|code| *code != Some(0)) {
            println!("world {world}: exit codes {codes:?}");
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// Ranks that this process has started; killed when dropped.
pub struct Children(Vec<Child>);

impl Children {
    /// Starts this program once per rank of a world.
    pub fn start(
        world: u32,
        job: &str,
        args: &[String],
        prepare: impl Fn(u32, &mut Command),
    ) -> anyhow::Result<Self> {
        let mut children = Self(Vec::new());
        for rank in 0..world {
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args(args)
                .env("GATHER8_RANK", rank.to_string())
                .env("GATHER8_WORLD", world.to_string())
                .env("GATHER8_LOCAL_RANK", rank.to_string())
                .env("GATHER8_LOCAL_WORLD", world.to_string())
                .env("GATHER8_JOB", job)
                .stdin(Stdio::null());
            prepare(rank, &mut command);
            children.0.push(command.spawn()?);
        }
        Ok(children)
    }

    /// A rank's process.
    pub fn process(&self, rank: u32) -> u32 {
        self.0[rank as usize].id()
    }

    /// Whether a rank has ended.
    pub fn has_ended(&mut self, rank: u32) -> anyhow::Result<bool> {
        Ok(self.0[rank as usize].try_wait()?.is_some())
    }

    /// Waits for all to end; their exit codes (`None` for a signal).
    pub fn wait(&mut self, patience: Duration) -> anyhow::Result<Vec<Option<i32>>> {
        let until = Instant::now() + patience;
        loop {
            let codes = self.0.iter_mut().map(Child::try_wait).collect::<Result<Vec<_>, _>>()?;
            if let Some(codes) = codes.iter().copied().collect::<Option<Vec<_>>>() {
                return Ok(codes.into_iter().map(|code| code.code()).collect());
            }
            ensure!(Instant::now() < until, "the ranks did not end within {patience:?}: {codes:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
