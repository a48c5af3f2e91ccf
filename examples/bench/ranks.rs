//! Gathers between ranks that are processes.

use std::sync::Arc;

use anyhow::{Result, bail};
use gather8_collectives::Launch;
use gather8_examples::bench::device::{Clock, HostClock};
use gather8_examples::bench::gather::{Gathered, Gathers, host_of_unshard, shapes};
use gather8_examples::bench::{Gpu, Machine, Settings};
use gather8_examples::seat::Seat;
use gather8_examples::whole_file::WholeFile;
use gather8_kernels::Backend;

use crate::{Arguments, Device, Results, head, say, write};

/// Weights of a model whose sync is measured: each has three slots.
const WEIGHTS: usize = 560;

pub(crate) fn run(arguments: &Arguments, machine: Machine) -> Result<()> {
    let launch = Launch::from_env()?;
    match arguments.device {
        Device::Cpu => {
            let seat = Seat::cpu(&launch)?;
            measure(arguments, machine, &seat, Arc::new(HostClock), None)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda => {
            use gather8_examples::bench::cuda::{EventClock, gpu};
            let seat = Seat::cuda(&launch, arguments.share_gpu)?;
            let clock = EventClock::new(&seat.backend)?;
            let gpu = gpu(&seat.backend, launch.world)?;
            measure(arguments, machine, &seat, clock, Some(gpu))
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => bail!("{}", gather8_examples::doctor::NOT_COMPILED_IN),
    }
}

fn measure<B: Backend>(
    arguments: &Arguments,
    machine: Machine,
    seat: &Seat<B>,
    clock: Arc<dyn Clock<B>>,
    gpu: Option<Gpu>,
) -> Result<()> {
    if arguments.rows.is_some() {
        bail!("--rows chooses passes, --gather measures none: leave one of them out");
    }
    let first = seat.is_first();
    if seat.communicator.world() < 2 {
        bail!("one rank gathers nothing: start --gather with two or more (mpirun -n 2 ...)");
    }
    // Only one rank writes; before the work, so that a path that cannot be written costs nothing.
    let path = arguments.json.as_deref().filter(|_| first);
    let json = path.map(WholeFile::create).transpose();
    let json = seat.agree(json, "the JSON file", std::time::Duration::from_secs(60))?;
    if first {
        head(&machine);
        if let Some(gpu) = &gpu {
            say(gpu);
        }
        say(&Gathered::head());
    }
    let settings = Settings { size: 0, repeats: arguments.repeats.unwrap_or(25) };
    let root = &seat.communicator;
    let gathers = Gathers::new(seat.backend.clone(), root, clock)?;
    let mut results = Results { settings, gpu, ..Results::default() };
    for shape in shapes(arguments.divide) {
        for row in gathers.measure(root, &shape, settings.repeats)? {
            if first {
                say(&row);
            }
            results.gathers.push(row);
        }
    }
    results.figures.extend(gathers.sync(WEIGHTS, settings.repeats)?);
    let hosts = host_of_unshard(&seat.backend, root, arguments.divide, settings.repeats)?;
    results.figures.extend(hosts);
    if first {
        results.figures.iter().for_each(|figure| say(figure));
    }
    let written = if first { write(json, machine, results) } else { Ok(()) };
    seat.agree(written, "the end", std::time::Duration::from_secs(60))
}
